"""AMD Instinct accelerators: the driver's files each second, AMD's tools and the page of its exporter where they are there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.accelerators import GPU, GPU_INSTANCE, INSTANCE_SIGNALS
from collectors.base import Context, Family, Sample, Source
from collectors.pages import amd_page
from collectors.pages.amd_sysfs import Sysfs
from collectors.pages.amd_tools import PHYSICAL, Chip, chip_address, parse_list, parse_tool, told_apart
from collectors.pages.command import Command, found_tool
from collectors.pages.presence import AMD, Presence
from collectors.pages.reader import FILE, Feed, PageFeed, PageSettings, Reading, path_reader
from collectors.pages.rows import Growth, Rows, Translator
from collectors.pages.text import PageError
from trainwarden.errors import ConfigError
from trainwarden.records import Gap
from trainwarden.settings import option

TOOLS = ("/opt/rocm/bin/amd-smi", "/usr/bin/amd-smi", "/opt/rocm/bin/rocm-smi", "/usr/bin/rocm-smi")
ROCM_ARGUMENTS = (
    "-c",
    "-t",
    "-u",
    "-M",
    "-P",
    "--showreplaycount",
    "--showbus",
    "--showmemuse",
    "--showmeminfo",
    "vram",
    "--json",
)


class AmdSource(Source):
    """Rows of AMD chips, put together from what there is; on a node without any it is quiet.

    Each second the driver's files; every ten seconds or less often the tool (`amd-smi`, else `rocm-smi`), in a child process; and the
    page of a device-metrics-exporter where an address is set. Where several know a value, the driver's files are believed, then the
    page, then the tool.
    """

    name: ClassVar[str] = "amd"
    families: ClassVar[tuple[Family, ...]] = (GPU, GPU_INSTANCE)

    @dataclass(frozen=True)
    class Settings(PageSettings):
        """Keys of ``[collector.sources.amd]``."""

        smi: str = option(
            "auto", "amd-smi or rocm-smi: auto, off, an absolute path, or file:/path of an answer that others write"
        )
        smi_every_s: float = option(10.0, "cadence of the tool; stretched where it costs more than `smi_share`")
        smi_deadline_s: float = option(8.0, "longest wait for the tool")
        smi_share: float = option(0.002, "processor time that the tool may take, share of a core")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._presence = Presence(context, AMD)
        self._sysfs = Sysfs(context)
        self._tool = AmdTool(context, settings) if settings.smi != "off" else None
        self._translator = Translator(amd_page.rules(), amd_page.key_of, amd_page.blank)
        wanted = self._translator.metrics | amd_page.extra_metrics()
        self._page = PageFeed(context, settings, wanted, "collector.sources.amd") if settings.url else None
        self._page_rows: tuple[int, Rows] = (0, {})

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        present = self._presence.addresses()
        told = self.settings.url or self.settings.smi.startswith(FILE)
        if not present and not told:
            return Sample()
        reasons: list[str] = []
        own = self._sysfs.rows() if present else {}
        reasons += without_driver(present, own)
        rows: Rows = {f"{address}#0": row for address, row in own.items()}
        for more in (self._from_page(reasons), self._from_tool(reasons)):
            for key, row in more.items():
                rows[key] = {**row, **rows.get(key, {})}
        whole, parts = named(rows, sorted({*present, *own}))
        gaps = tuple(Gap(self.name, reason) for reason in dict.fromkeys(reasons))
        return Sample(GPU.block(whole) + GPU_INSTANCE.block(parts), gaps)

    def close(self) -> None:
        for feed in (self._page, self._tool):
            if feed is not None:
                feed.close()

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
        if reading.version != self._page_rows[0]:
            rows = self._translator.rows(reading.value, reading.changed_ns)
            for key, row in amd_page.extras(reading.value).items():
                rows.setdefault(key, {}).update(row)
            self._page_rows = (reading.version, rows)
        return self._page_rows[1]

    def _from_tool(self, reasons: list[str]) -> Rows:
        if self._tool is None or not self._tool.there:
            return {}
        try:
            reading = self._tool.newest()
        except PageError as error:
            if error.reason != "starting" or not self._presence.addresses():
                reasons.append(f"smi_{error.reason}")
            return {}
        if reading.trouble:
            reasons.append(f"smi_{reading.trouble}")
        return reading.value


class AmdTool:
    """`amd-smi` or `rocm-smi`, asked as often as its own cost allows."""

    def __init__(self, context: Context, settings: Any) -> None:
        self._settings = settings
        self._context = context
        self._command = Command(settings.smi_deadline_s)
        self._growth = Growth()
        self._listed: dict[int, tuple[str, int]] = {}
        inline = settings.smi.startswith(FILE)
        self._read_file = path_reader(context, settings.smi, "collector.sources.amd.smi") if inline else None
        self.path = "" if inline else self._found(settings.smi)
        self.there = inline or bool(self.path)
        self._feed: Feed[Rows] = Feed(
            context,
            "amd",
            self._ask,
            settings.smi_every_s,
            settings.smi_deadline_s,
            wake=self._command.stop,
            inline=inline,
        )

    def newest(self) -> Reading[Rows]:
        """Rows by key; raises `PageError`."""
        return self._feed.newest()

    def close(self) -> None:
        """End."""
        self._feed.close()

    def _found(self, setting: str) -> str:
        if setting == "auto":
            return found_tool(TOOLS) if self._context.files.live else ""
        if not setting.startswith("/"):
            raise ConfigError(
                f"collector.sources.amd.smi: {setting!r} is none of auto, off, /path/of/the/tool, file:/path"
            )
        return setting

    def _ask(self) -> tuple[Rows, object]:
        at_ns = self._context.clock.monotonic_ns()
        chips = parse_tool(self._read_file() if self._read_file else self._run())
        if self._listed.keys() != {chip.number for chip in chips}:
            self._listed = {}  # chips were parted or put together again: what was listed is of other ones
        for chip in chips:
            address, partition = self._listed.get(chip.number, (chip.address, chip.partition))
            chip.address, chip.partition = address, chip.partition if chip.part_only else partition
        told_apart(chips)
        rows: Rows = {}
        for chip in chips:
            key = key_of(chip)
            rows[key] = {**self._row(chip, at_ns), **rows.get(key, {})}
        self._growth.keep(rows)
        return rows, at_ns

    def _row(self, chip: Chip, at_ns: int) -> dict[str, float]:
        rates = {
            name: self._growth.per_second((key_of(chip), name), count, at_ns) for name, count in chip.counts.items()
        }
        return {**chip.row, **rates}

    def _run(self) -> bytes:
        amd_smi = self.path.endswith("amd-smi")
        cpu_s = 0.0
        if amd_smi and not self._listed:
            answer = self._command.run([self.path, "list", "--json"])
            self._listed, cpu_s = parse_list(answer.output), answer.cpu_s
        answer = self._command.run([self.path, *(("metric", "--json") if amd_smi else ROCM_ARGUMENTS)])
        affordable_s = (answer.cpu_s + cpu_s) / max(self._settings.smi_share, 1e-6)
        self._feed.every_s = max(self._settings.smi_every_s, affordable_s)
        return answer.output


def key_of(chip: Chip) -> str:
    """``<address or number>#<partition>``; the first part alone, not the chip, is ``#part0``."""
    alone = chip.part_only and chip.partition == 0
    return f"{chip.address or chip.number}#{'part0' if alone else chip.partition}"


def without_driver(present: Iterable[str], own: Iterable[str]) -> list[str]:
    """Reasons for chips on the bus that the driver does not show: one word when it shows none, else each address.

    Examples
    --------
    >>> without_driver(["0000:05:00.0", "0000:26:00.0"], ["0000:05:00.0"])
    ['driver:0000:26:00.0']
    """
    shown = {chip_address(address) for address in own}
    missing = sorted(address for address in present if chip_address(address) not in shown)
    return [f"driver:{address}" for address in missing] if shown else ["driver"][: len(missing)]


def named(rows: Rows, addresses: list[str]) -> tuple[Rows, Rows]:
    """Rows of whole chips and of parts, by device.

    Chips are numbered in the order of their PCI addresses, as AMD's tools do; a key that is a number stays that number. Sensors belong
    to the first part: the others report 0 or what the first does. So does memory where a part claims that of the whole chip.
    """
    numbers = {chip_address(address): i for i, address in enumerate(addresses)}
    known = {chip_address(key.partition("#")[0]) for key in rows if ":" in key}
    for address in sorted(known - numbers.keys()):
        numbers[address] = len(numbers)
    whole: Rows = {}
    parts: Rows = {}
    for key, row in rows.items():
        place, _, partition = key.partition("#")
        number = numbers[chip_address(place)] if ":" in place else int(place)
        full = with_share(row)
        if partition == "0":
            whole[f"gpu{number}"] = {**full, **whole.get(f"gpu{number}", {})}
        elif ":" in place or partition.startswith("part"):
            device = f"gpu{number}/part{partition.removeprefix('part')}"
            parts[device] = {**{k: v for k, v in full.items() if k in INSTANCE_SIGNALS}, **parts.get(device, {})}
        else:
            # the page does not say whose part this is: it stays a chip of its own, as the tool counts, without sensors
            whole.setdefault(f"gpu{number}", {}).update({k: v for k, v in full.items() if k not in PHYSICAL})
    for device, row in parts.items():
        all_of_it = whole.get(device.partition("/")[0], {}).get("fb_total_bytes")
        if row.get("fb_total_bytes") == all_of_it and all_of_it is not None:
            parts[device] = {k: v for k, v in row.items() if not k.startswith("fb_")}
    return dict(sorted(whole.items(), key=lambda item: int(item[0][3:]))), dict(sorted(parts.items()))


def with_share(row: dict[str, float]) -> dict[str, float]:
    """The row with `fb_used_ratio` where used and total are known."""
    used, total = row.get("fb_used_bytes"), row.get("fb_total_bytes")
    if used is None or not total or "fb_used_ratio" in row:
        return row
    return {**row, "fb_used_ratio": used / total}
