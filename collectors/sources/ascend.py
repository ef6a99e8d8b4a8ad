"""Huawei Ascend accelerators: the page of an npu-exporter, and Huawei's tools."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.accelerators import GPU
from collectors.base import Context, Family, Sample, Source
from collectors.network.roles import ROLES
from collectors.pages import ascend_faults, ascend_page, ascend_text
from collectors.pages.presence import ASCEND, Presence
from collectors.pages.reader import FILE, PageFeed, PageSettings, Reading
from collectors.pages.rows import Growth, Rows, Translator
from collectors.pages.text import Page, PageError
from collectors.pages.tool import Pace, Run, Tool
from collectors.sources.ethtool import PORT
from collectors.sources.nic import NIC
from trainwarden.clock import NS_PER_MS
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

NPU_SMI = ("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi", "/usr/local/Ascend/driver/tools/npu-smi")
HCCN_TOOL = ("/usr/local/Ascend/driver/tools/hccn_tool", "/usr/bin/hccn_tool")
COUNTS = {"roce_rx_err_pkt_num": "rx_errors_per_s", "roce_tx_err_pkt_num": "tx_errors_per_s"}


@dataclass
class Answer:
    """What was read of all chips: rows of chips, of their ports' traffic and of their optics, and the faults that stand."""

    chips: Rows
    ports: Rows
    lights: Rows
    faults: dict[str, tuple[str, ...]]


NOTHING = Answer({}, {}, {}, {})


class AscendSource(Source):
    """Rows of Ascend chips (``gpu<i>``) and of the network port that each of them has (``npu<i>``); quiet on a node without any.

    Where the address of an npu-exporter is set, its page is believed first; `npu-smi` and `hccn_tool` add what it does not say. A fault
    code is said as an event ``npu:<code>`` when it appears, with the level and remedy of Huawei's table.
    """

    name: ClassVar[str] = "ascend"
    families: ClassVar[tuple[Family, ...]] = (GPU, NIC, PORT)

    @dataclass(frozen=True)
    class Settings(PageSettings):
        """Keys of ``[collector.sources.ascend]``."""

        smi: str = option("auto", "npu-smi: auto, off, an absolute path, or file:/path of an answer that others write")
        hccn: str = option("auto", "hccn_tool, for optics and links of the chips' ports: as `smi`")
        smi_every_s: float = option(10.0, "cadence of npu-smi; stretched where it costs more than `tool_share`")
        hccn_every_s: float = option(60.0, "cadence of hccn_tool, three calls a chip; stretched alike")
        tool_deadline_s: float = option(8.0, "longest wait for one call of a tool")
        tool_share: float = option(0.002, "processor time that a tool may take, share of a core")
        fault_codes: str = option("", "faultCode.json of the device plugin, where its levels were changed")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._presence = Presence(context, ASCEND)
        self._translators = (
            Translator(ascend_page.GPU_RULES, ascend_page.chip_of, ascend_page.unknown),
            Translator(ascend_page.NIC_RULES, ascend_page.port_of, ascend_page.unknown),
            Translator(ascend_page.PORT_RULES, ascend_page.port_of, ascend_page.unknown),
        )
        wanted = ascend_page.OTHERS.union(*(translator.metrics for translator in self._translators))
        self._page = PageFeed(context, settings, wanted, "collector.sources.ascend") if settings.url else None
        self._read: tuple[int, Answer] = (0, NOTHING)
        self._smi, self._hccn = NpuSmi(context, settings), Hccn(context, settings)
        self._faults = Faults(context, settings.fault_codes)

    def sample(self, now_ns: int) -> Sample:
        present = self._presence.addresses()
        told = any((self.settings.url, self.settings.smi.startswith(FILE), self.settings.hccn.startswith(FILE)))
        if not present and not told:
            return Sample()
        reasons: list[str] = []
        self._hccn.chips = max(1, len(present))
        answers = [self._from_page(reasons, now_ns)]
        for tool, prefix in ((self._smi.tool, "smi"), (self._hccn.tool, "hccn")):
            answers.append(_newest(tool, prefix, reasons) if tool.there else NOTHING)
        if present and self._page is None and not self._smi.tool.there:
            reasons.append("no_tool")
        self._faults.note(answers)
        blocks = (
            *GPU.block(merged(answer.chips for answer in answers)),
            *NIC.block(merged(answer.ports for answer in answers)),
            *PORT.block(merged(answer.lights for answer in answers)),
        )
        return Sample(blocks, tuple(Gap(self.name, reason) for reason in dict.fromkeys(reasons)))

    def close(self) -> None:
        for feed in (self._page, self._smi.tool, self._hccn.tool):
            if feed is not None:
                feed.close()
        super().close()

    def _from_page(self, reasons: list[str], now_ns: int) -> Answer:
        if self._page is None:
            return NOTHING
        try:
            reading = self._page.newest()
            fresh_after_ms = now_ns / NS_PER_MS - self.settings.stale_s * 1000
            refuse_old(reading.value, fresh_after_ms)
        except PageError as error:
            reasons.append(error.reason)
            return NOTHING
        if reading.trouble:
            reasons.append(reading.trouble)
        if reading.version != self._read[0]:
            self._read = (reading.version, self._answer(reading, fresh_after_ms))
        return self._read[1]

    def _answer(self, reading: Reading[Page], fresh_after_ms: float) -> Answer:
        page = reading.value
        chips, ports, lights = (t.rows(page, reading.changed_ns, fresh_after_ms) for t in self._translators)
        for row in chips.values():
            ascend_page.fill(row)
        for device, state in ascend_page.health(page, fresh_after_ms).items():
            chips.setdefault(device, {})["health_state"] = state
        for device, row in ascend_page.light(page, fresh_after_ms).items():
            lights.setdefault(device, {}).update(row)
        for device, speed in ascend_page.speeds(page).items():
            ports.setdefault(device, {})["speed_mbps"] = speed
        for row in ports.values():
            row["role"] = ROLES["rail"]
        return Answer(
            chips, ports, {name: row for name, row in lights.items() if row}, page_faults(page, fresh_after_ms)
        )


class NpuSmi:
    """`npu-smi info`; a chip that is not well is asked for its fault codes too."""

    def __init__(self, context: Context, settings: Any) -> None:
        pace = Pace(settings.smi_every_s, settings.tool_deadline_s, settings.tool_share)
        self.tool: Tool[Answer] = Tool(
            context, "collector.sources.ascend.smi", settings.smi, NPU_SMI, pace, self._collect
        )  # fmt: skip

    def _collect(self, run: Run) -> Answer:
        text = run("info").decode("utf-8", "replace")
        chips = ascend_text.parse_info(text)
        faults: dict[str, tuple[str, ...]] = {}
        for chip in chips:
            if chip.row.get("health_state", 0.0) > 0:
                said = run("info", "-t", "health", "-i", str(chip.card), "-c", str(chip.chip)).decode(
                    "utf-8", "replace"
                )
                faults[f"gpu{chip.number}"] = ascend_text.parse_health(said)
        return Answer({f"gpu{chip.number}": chip.row for chip in chips}, {}, {}, faults)


class Hccn:
    """`hccn_tool` for the port of each chip: optics, errors, link."""

    def __init__(self, context: Context, settings: Any) -> None:
        pace = Pace(settings.hccn_every_s, settings.tool_deadline_s, settings.tool_share)
        self._clock = context.clock
        self._growth = Growth()
        self.chips = 1
        self.tool: Tool[Answer] = Tool(
            context, "collector.sources.ascend.hccn", settings.hccn, HCCN_TOOL, pace, self._collect
        )  # fmt: skip

    def _collect(self, run: Run) -> Answer:
        ports: Rows = {}
        lights: Rows = {}
        for number in range(self.chips):
            device, stat, link, optical = (
                f"npu{number}",
                *(
                    run("-i", str(number), what, "-g").decode("utf-8", "replace")
                    for what in ("-stat", "-link_stat", "-optical")
                ),
            )
            ports[device] = self._port(device, stat, link)
            light = ascend_text.parse_optical(optical)
            if light:
                lights[device] = light
        return Answer({}, ports, lights, {})

    def _port(self, device: str, stat: str, link: str) -> dict[str, float]:
        at_ns = self._clock.monotonic_ns()
        row = {"role": ROLES["rail"]}
        for name, count in ascend_text.parse_counts(stat).items():
            if name in COUNTS:
                row[COUNTS[name]] = self._growth.per_second((device, name), count, at_ns)
        ups, state = ascend_text.parse_link(link)
        if not math.isnan(ups):
            row["link_recovery_per_s"] = self._growth.per_second((device, "ups"), ups, at_ns)
        if not math.isnan(state):
            row |= {"up": state, "carrier": state}
        return row


class Faults:
    """Says each fault code once while it stands. What stands when the agent starts is said too: it is a state, not a memory."""

    def __init__(self, context: Context, path: str) -> None:
        self._context = context
        key = "collector.sources.ascend.fault_codes"
        self._levels: Mapping[str, str] = (
            ascend_faults.parse_levels(context.files.text(path), key) if path else ascend_faults.shipped()
        )
        self._standing: set[tuple[str, str]] = set()

    def note(self, answers: Iterable[Answer]) -> None:
        """Compare with what stood before."""
        standing = {(device, code) for answer in answers for device, codes in answer.faults.items() for code in codes}
        for device, code in sorted(standing - self._standing):
            level = self._levels.get(code, "")
            severity, remedy = ascend_faults.LEVELS.get(level, ascend_faults.UNKNOWN)
            event = LogEvent(
                source="ascend", severity=severity, code=f"npu:{code}",
                line=f"{device}: fault code {code}, level {level or 'unknown'}; remedy: {remedy}",
                attributes={"gpu": device, "level": level or "unknown", "remedy": remedy},
            )  # fmt: skip
            self._context.outlet.log(event, urgent=severity in ("error", "critical"))
        self._standing = standing


def _newest(tool: Tool[Answer], prefix: str, reasons: list[str]) -> Answer:
    try:
        reading = tool.newest()
    except PageError as error:
        reasons.append(f"{prefix}_{error.reason}")
        return NOTHING
    if reading.trouble:
        reasons.append(f"{prefix}_{reading.trouble}")
    return reading.value


def page_faults(page: Page, fresh_after_ms: float) -> dict[str, tuple[str, ...]]:
    """Fault codes by chip, in the order of the page."""
    found: dict[str, list[str]] = {}
    for name in ascend_page.CODES:
        for point in page.points.get(name, ()):
            device = ascend_page.chip_of(point.labels)
            code = ascend_faults.code_of(point.value) if math.isfinite(point.value) else ""
            fresh = point.at_ms is None or point.at_ms >= fresh_after_ms
            if device and code and fresh and code not in found.setdefault(device, []):
                found[device].append(code)
    return {device: tuple(codes) for device, codes in found.items()}


def refuse_old(page: Page, fresh_after_ms: float) -> None:
    """Raises `PageError` when every sample carries a time and all are too old: the exporter serves what it once read."""
    times = [point.at_ms for points in page.points.values() for point in points]
    newest = max((at_ms for at_ms in times if at_ms is not None), default=None)
    if newest is not None and None not in times and newest < fresh_after_ms:
        raise PageError(
            "stale", f"the newest sample of the page is {(fresh_after_ms - newest) / 1000:.0f} s older than allowed"
        )


def merged(sources: Iterable[Rows]) -> Rows:
    """Rows of several answers in one; what comes first is believed."""
    found: Rows = {}
    for rows in sources:
        for device, row in rows.items():
            found[device] = {**row, **found.get(device, {})}
    return dict(sorted(found.items(), key=lambda item: int(item[0][3:])))
