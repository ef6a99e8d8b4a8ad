"""MetaX accelerators: the page of mx-exporter, and the table of mx-smi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.accelerators import GPU
from collectors.base import Context, Family, Sample, Source
from collectors.pages import metax_text
from collectors.pages.presence import METAX, Presence
from collectors.pages.reader import FILE, PageFeed, PageSettings
from collectors.pages.rows import Rows, Translator
from collectors.pages.text import Page, PageError
from collectors.pages.tool import Pace, Run, Tool
from trainwarden.records import Gap
from trainwarden.settings import option

MX_SMI = ("/opt/mxdriver/bin/mx-smi", "/opt/maca/bin/mx-smi", "/usr/bin/mx-smi")


class MetaxSource(Source):
    """Rows of MetaX chips; quiet on a node without any.

    Written from public descriptions of the page and of the table: no capture of a real node was at hand (docs/accelerators.md).
    """

    name: ClassVar[str] = "metax"
    families: ClassVar[tuple[Family, ...]] = (GPU,)

    @dataclass(frozen=True)
    class Settings(PageSettings):
        """Keys of ``[collector.sources.metax]``."""

        smi: str = option("auto", "mx-smi: auto, off, an absolute path, or file:/path of an answer that others write")
        smi_every_s: float = option(10.0, "cadence of mx-smi; stretched where it costs more than `tool_share`")
        tool_deadline_s: float = option(8.0, "longest wait for mx-smi")
        tool_share: float = option(0.002, "processor time that the tool may take, share of a core")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._presence = Presence(context, METAX)
        self._translator = Translator(metax_text.RULES, metax_text.chip_of, metax_text.unknown)
        wanted = self._translator.metrics | {metax_text.STATE}
        self._page = PageFeed(context, settings, wanted, "collector.sources.metax") if settings.url else None
        self._read: tuple[int, Rows] = (0, {})
        pace = Pace(settings.smi_every_s, settings.tool_deadline_s, settings.tool_share)
        self._tool: Tool[Rows] = Tool(context, "collector.sources.metax.smi", settings.smi, MX_SMI, pace, _table)

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        present = self._presence.addresses()
        if not present and not self.settings.url and not self.settings.smi.startswith(FILE):
            return Sample()
        reasons: list[str] = []
        rows = self._from_page(reasons)
        for device, row in self._from_tool(reasons).items():
            rows[device] = {**row, **rows.get(device, {})}
        if present and self._page is None and not self._tool.there:
            reasons.append("no_tool")
        for row in rows.values():
            if row.get("fb_total_bytes") and "fb_used_bytes" in row:
                row["fb_used_ratio"] = row["fb_used_bytes"] / row["fb_total_bytes"]
        return Sample(GPU.block(rows), tuple(Gap(self.name, reason) for reason in dict.fromkeys(reasons)))

    def close(self) -> None:
        for feed in (self._page, self._tool):
            if feed is not None:
                feed.close()
        super().close()

    def _from_page(self, reasons: list[str]) -> Rows:
        if self._page is None:
            return {}
        try:
            reading = self._page.newest()
        except PageError as error:
            reasons.append(error.reason)
            return {}
        if reading.trouble:
            reasons.append(reading.trouble)
        if reading.version != self._read[0]:
            self._read = (reading.version, self._rows(reading.value, reading.changed_ns))
        return {device: dict(row) for device, row in self._read[1].items()}

    def _rows(self, page: Page, at_ns: int) -> Rows:
        rows = self._translator.rows(metax_text.in_degrees(page), at_ns)
        for device in metax_text.failed(page):
            rows.setdefault(device, {})["health_state"] = 2.0
        return rows

    def _from_tool(self, reasons: list[str]) -> Rows:
        if not self._tool.there:
            return {}
        try:
            reading = self._tool.newest()
        except PageError as error:
            reasons.append(f"smi_{error.reason}")
            return {}
        if reading.trouble:
            reasons.append(f"smi_{reading.trouble}")
        return reading.value


def _table(run: Run) -> Rows:
    return metax_text.parse_smi(run().decode("utf-8", "replace"))
