"""NVIDIA GPUs by the page of a dcgm-exporter that runs on the node already."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.accelerators import GPU, GPU_INSTANCE, INSTANCE_SIGNALS
from collectors.base import Context, Family, Sample, Source
from collectors.pages import dcgm_names
from collectors.pages.reader import PageFeed, PageSettings, Reading
from collectors.pages.rows import Rows, Translator, number_label
from collectors.pages.text import Labels, Page, PageError
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option


class DcgmSource(Source):
    """Rows from a dcgm-exporter page; off until its address is set.

    For nodes where the exporter owns the profiling counters, or where NVML cannot be reached from the agent's container. It sees what
    the exporter publishes, as often as that collects (30 s unless told otherwise). Switch the source that asks NVML off on such nodes:
    both would report the same devices.
    """

    name: ClassVar[str] = "dcgm"
    families: ClassVar[tuple[Family, ...]] = (GPU, GPU_INSTANCE)

    @dataclass(frozen=True)
    class Settings(PageSettings):
        """Keys of ``[collector.sources.dcgm]``."""

        xid_events: bool = option(True, "say each new Xid as a log event, unless the kernel log told it already")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._translator = Translator(dcgm_names.rules(), device_of, dcgm_names.blank)
        self._xids = Xids(context, settings.xid_events)
        wanted = self._translator.metrics | {*dcgm_names.XID, dcgm_names.XID_WINDOW, dcgm_names.HEALTH}
        self._page = PageFeed(context, settings, wanted, "collector.sources.dcgm") if settings.url else None
        self._version = 0
        self._rows: Rows = {}

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        if self._page is None:
            return Sample()
        reading = self._page.newest()
        if reading.version != self._version:
            self._rows = self._read(reading)
            self._version = reading.version
        whole = {device: row for device, row in self._rows.items() if "/" not in device}
        parts = {device: row for device, row in self._rows.items() if "/" in device}
        gaps = (Gap(self.name, reading.trouble),) if reading.trouble else ()
        return Sample(GPU.block(whole) + GPU_INSTANCE.block(parts), gaps)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()

    def _read(self, reading: Reading[Page]) -> Rows:
        page = reading.value
        one_host(page)
        rows = self._translator.rows(page, reading.changed_ns, scales=dcgm_names.scales(page))
        rows = with_parents(rows)
        for row in rows.values():
            fill_memory(row)
        for device, state in health(page).items():
            rows.setdefault(device, {})["health_state"] = state
        self._xids.note(page, rows)
        return rows


class Xids:
    """Turns the exporter's gauge, which keeps the last Xid for ever, into events.

    What stood there when the agent started is no event. A repeat of the same Xid does not move the gauge; exporters that publish a count
    per Xid over a window (``DCGM_EXP_XID_ERRORS_COUNT``) show repeats too, and then that count is believed and not the gauge.
    """

    def __init__(self, context: Context, speak: bool) -> None:
        self._context = context
        self._speak = speak
        self._last: dict[str, int] = {}
        self._window: dict[tuple[str, int], float] = {}
        self._known: set[str] = set()
        self._counts: Counter[str] = Counter()

    def note(self, page: Page, rows: Rows) -> None:
        """Compare with the page before, say what is new, and fill the columns."""
        counted = self._by_window(page)
        for device, xid, labels in _gauges(page):
            if device not in counted and self._last.get(device, xid) != xid and xid:
                self._event(device, xid, 1, labels)
            self._last[device] = xid
            rows.setdefault(device, {})["xid_last"] = float(xid)
        for device, row in rows.items():
            if "xid_last" in row or device in counted:
                row["xid_count"] = float(self._counts[device])

    def _by_window(self, page: Page) -> set[str]:
        """Devices that have a count per Xid; one that falls is a window that moved on."""
        found: dict[tuple[str, int], float] = {}
        devices: set[str] = set()
        for point in page.points.get(dcgm_names.XID_WINDOW, ()):
            device, xid = chip_of(point.labels), number_label(point.labels, "xid")
            if not device or not xid or (device, int(xid)) in found or dcgm_names.blank(point.value):
                continue
            devices.add(device)
            found[device, int(xid)] = point.value
            more = point.value - self._window.get((device, int(xid)), 0.0)
            if more > 0 and int(xid) and device in self._known:
                self._event(device, int(xid), int(more), point.labels)
        self._window = found
        self._known |= {chip_of(point.labels) for points in page.points.values() for point in points}
        return devices

    def _event(self, device: str, xid: int, times: int, labels: Labels) -> None:
        self._counts[device] += times
        pci = bus_address(labels.get("pci_bus_id", ""))
        board = self._context.facts.xids
        if not self._speak or (board.count(pci) and board.last(pci) == xid):
            return  # the kernel log told it, with its text, when it happened
        told = {"gpu": device, "pci": pci, "uuid": labels.get("UUID", "")}
        event = LogEvent(
            source="dcgm", severity="error", code=f"xid:{xid}", line=f"{device}: Xid {xid}, by the dcgm-exporter page",
            attributes={name: value for name, value in told.items() if value}, repeat=times,
        )  # fmt: skip
        self._context.outlet.log(event, urgent=True)


def device_of(labels: Labels) -> str:
    """``gpu0``, or ``gpu0/gi7`` for a MIG instance; empty for a series without a GPU."""
    chip, instance = chip_of(labels), number_label(labels, "GPU_I_ID")
    return f"{chip}/gi{instance}" if chip and instance else chip


def chip_of(labels: Labels) -> str:
    """``gpu0``; empty for a series without a GPU (NVSwitches, CPUs)."""
    number = number_label(labels, "gpu")
    return f"gpu{number}" if number else ""


def bus_address(text: str) -> str:
    """PCI address as the kernel spells it; empty for what is none.

    Examples
    --------
    >>> bus_address("00000000:3B:00.0"), bus_address("3b:00.0"), bus_address("GPU-1")
    ('0000:3b:00.0', '0000:3b:00.0', '')
    """
    *domain, bus, slot = ["", *text.lower().rsplit(":", 2)][-3:]
    return f"{''.join(domain)[-4:].rjust(4, '0')}:{bus}:{slot}" if bus and slot else ""


def one_host(page: Page) -> None:
    """Raises `PageError` when the page tells of several machines: their GPUs would be taken for one another."""
    hosts = {p.labels.get("Hostname", "") for points in page.points.values() for p in points} - {""}
    if len(hosts) > 1:
        raise PageError("several_hosts", f"the page tells of {len(hosts)} hosts: this agent needs that of its own node")


def with_parents(rows: Rows) -> Rows:
    """Move what only a whole chip has (power, temperature) from its MIG instances to the chip: the exporter repeats it for each."""
    sorted_out: Rows = {}
    for device, row in rows.items():
        chip = device.partition("/")[0]
        if chip == device:
            sorted_out.setdefault(device, {}).update(row)
            continue
        keep = set(INSTANCE_SIGNALS) | {"fb_free_bytes"}
        sorted_out[device] = {name: value for name, value in row.items() if name in keep}
        parent = sorted_out.setdefault(chip, {})
        for name, value in row.items():
            if name not in keep:
                parent.setdefault(name, value)
    return sorted_out


def fill_memory(row: dict[str, float]) -> None:
    """Total and share from used, free and reserved, where the page has no field for them; free leaves the page's own helper column."""
    used, free = row.get("fb_used_bytes"), row.pop("fb_free_bytes", None)
    if used is None or free is None:
        return
    row.setdefault("fb_total_bytes", used + free + row.get("fb_reserved_bytes", 0.0))
    if used + free > 0:
        row.setdefault("fb_used_ratio", used / (used + free))


def health(page: Page) -> dict[str, float]:
    """The worst of the exporter's health watches by chip: 0 well, 1 degraded, 2 failed."""
    found: dict[str, float] = {}
    for point in page.points.get(dcgm_names.HEALTH, ()):
        level = next((level for limit, level in dcgm_names.HEALTH_LEVELS if point.value >= limit), None)
        device = chip_of(point.labels)
        if device and level is not None and not dcgm_names.blank(point.value):
            found[device] = max(level, found.get(device, 0.0))
    return found


def _gauges(page: Page) -> list[tuple[str, int, Labels]]:
    """(chip, newest Xid, labels) of every chip, once."""
    found: dict[str, tuple[str, int, Labels]] = {}
    for name in dcgm_names.XID:
        for point in page.points.get(name, ()):
            device, value = chip_of(point.labels), point.value
            if device and 0 <= value < 10000 and not dcgm_names.blank(value):
                found.setdefault(device, (device, int(value), point.labels))
    return list(found.values())
