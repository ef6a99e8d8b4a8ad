"""The source over the child: what arrived since the last tick, as blocks, gaps and events. NVIDIA and its look-alikes share it."""

from __future__ import annotations

import logging
import os
import struct
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors import patterns
from collectors.accelerators import GPU, GPU_INSTANCE, INSTANCE_SIGNALS, NAMES, ROW_BYTES, column
from collectors.base import Context, Family, Sample, Source
from collectors.nvidia import wire
from collectors.nvidia.decode import pci_address
from collectors.nvidia.parent import Keeper
from trainwarden.clock import NS_PER_S
from trainwarden.records import Block, Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

PART_BYTES = 4 * len(INSTANCE_SIGNALS)
LOOK_NS = 300 * NS_PER_S
FRESH_NS = (50_000_000, 350_000_000)
FRESH_AIM_NS = 200_000_000
SHIFT_EVERY_NS = 10 * NS_PER_S
DISPLAY_CLASS, ACCELERATOR_CLASS = 0x03, 0x12
SEVERITIES = {
    "gpu_lost": "critical", "gpu_hung": "critical", "gpu_reset_required": "error", "gpu_back": "info", "gpu_answers": "info",
    "gpu_ecc_storm": "warning", "gpu_dram_retirement": "warning", "gpu_dram_retirement_failed": "critical", "gpu_poison": "error",
    "gpu_poison_fatal": "critical", "gpu_unavailable": "critical", "gpu_recovery_action": "error",
}  # fmt: skip
MEANINGS = {
    "gpu_lost": "fell off the bus: the driver has lost it", "gpu_hung": "does not answer the driver: a call has not come back",
    "gpu_reset_required": "says that it has to be reset", "gpu_back": "answers again after it was lost",
    "gpu_answers": "answers again after a call that did not come back",
}  # fmt: skip
TROUBLES = {
    "driver_hung": ("gpu_driver_hung", "critical", 0), "helper_silent": ("gpu_driver_hung", "critical", 0),
    "no_driver": ("gpu_unreadable", "error", 60), "no_library": ("gpu_unreadable", "error", 60),
    "permission": ("gpu_unreadable", "error", 60), "helper_restarting": ("gpu_unreadable", "error", 60),
}  # fmt: skip
"""Gaps that are news themselves: their code, severity, and for how many seconds they have to last."""
_FLOAT = struct.Struct("<f")
_XID_LAST, _XID_COUNT = 4 * column("xid_last"), 4 * column("xid_count")


@dataclass(frozen=True)
class NvmlSettings:
    """Keys that every source over an NVML-like library has."""

    library: str = option("libnvidia-ml.so.1", "the driver library: a name that the loader finds, or a path")
    symbol_prefix: str = option("nvml", "what the library's functions begin with")
    every_s: float = option(1.0, "cadence of clocks, power, temperature, utilisation")
    medium_s: float = option(10.0, "cadence of memory, counters, errors and activity")
    slow_s: float = option(60.0, "cadence of remapped rows, links, fabric, limits, processes")
    activity: bool = option(
        True, "read the activity of multiprocessors, tensor cores and memory (GPM, Hopper and later)"
    )
    events: bool = option(True, "have the driver report Xids and their kin at once")


class NvmlSource(Source):
    """Reads GPUs through a child process, so that a driver that hangs costs a GPU's numbers and not the agent.

    Without a device of the vendor on the PCI bus nothing is started and nothing said. Self-metrics: ``tw_source_ms`` of
    ``<name>_driver`` is what the driver says the field values took it, ``tw_process_cpu_seconds`` with ``helper`` is the child's.
    """

    families: ClassVar[tuple[Family, ...]] = (GPU, GPU_INSTANCE)
    vendor: ClassVar[int] = 0x10DE

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._keeper = Keeper(context.clock, self._options(), silent_s=3 * settings.every_s + 2)
        self._looked_ns: int | None = None
        self._present = False
        self._inventory: dict[str, Any] = {}
        self._gpus: tuple[str, ...] = ()
        self._parts: tuple[str, ...] = ()
        self._frame: wire.Frame | None = None
        self._frame_ns = 0
        self._shifted_ns = 0
        self._restarts = 0
        self._bad = 0
        self._trouble = ""
        self._trouble_ns = 0
        self._trouble_told = False
        self._table: patterns.PatternTable | None = None

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        if not self._devices_present():
            return Sample()
        for message in self._keeper.poll():
            self._take(message)
        self._note_restart()
        for event in self.context.facts.xids.due(self.context.clock.monotonic_ns()):
            self.context.outlet.log(event, urgent=event.severity == "critical")
        sample = self._sample()
        self._note_trouble(sample.gaps[0].reason if sample.gaps and not sample.blocks else "")
        return sample

    def close(self) -> None:
        self._keeper.close()

    def support(self) -> dict[str, dict[str, str]]:
        """For each GPU the columns that it does not give, and why: for ``--explain``.

        The reasons: not_supported, permission, old_library, mig (only parts of the GPU tell it), vgpu (only the host tells it),
        no_links (the board has no bridge).
        """
        return {gpu["name"]: dict(gpu["support"]) for gpu in self._inventory.get("gpus", ())}

    def inventory(self) -> dict[str, Any]:
        """Driver, GPUs (name, uuid, pci, model, serial, vbios, virtual) and their parts, as last heard."""
        return self._inventory

    def child_pid(self) -> int:
        """Process id of the child, 0 without one: for measurements."""
        return self._keeper.pid

    # --- the child ----------------------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        wanted = self.settings
        return {
            "library": wanted.library, "prefix": wanted.symbol_prefix, "every_s": wanted.every_s, "medium_s": wanted.medium_s,
            "slow_s": wanted.slow_s, "gpm": wanted.activity, "events": wanted.events, "columns": NAMES,
            "part_columns": INSTANCE_SIGNALS, "names": {}, "processors": sorted(os.sched_getaffinity(os.getpid())),
        }  # fmt: skip

    def _devices_present(self) -> bool:
        """Whether the PCI bus has a device of the vendor; looked at every five minutes until it has."""
        now_ns = self.context.clock.monotonic_ns()
        if not self._present and (self._looked_ns is None or now_ns - self._looked_ns >= LOOK_NS):
            self._looked_ns = now_ns
            root = "/sys/bus/pci/devices"
            self._present = any(self._is_ours(f"{root}/{name}") for name in self.context.files.names(root))
        return self._present

    def _is_ours(self, path: str) -> bool:
        text = self.context.files.text
        try:
            ours = int(text(f"{path}/vendor"), 16) == self.vendor
            return ours and int(text(f"{path}/class"), 16) >> 16 in (DISPLAY_CLASS, ACCELERATOR_CLASS)
        except ValueError:
            return False
        finally:
            self.context.files.forget(path)

    def _take(self, message: bytes) -> None:
        """One message; one that is none of ours is counted, and said once."""
        try:
            if message[:1] == wire.ROWS:
                self._take_frame(wire.frame_of(message, ROW_BYTES, PART_BYTES))
            elif message[:1] == wire.INVENTORY:
                self._take_inventory(wire.facts_of(message))
            elif message[:1] == wire.EVENT:
                self._take_event(wire.facts_of(message))
            else:
                raise wire.WireError(f"a message that begins with {message[:1]!r}")
        except (wire.WireError, KeyError, TypeError, ValueError) as error:
            self._bad += 1
            log = logger.warning if self._bad == 1 else logger.debug
            log("source %s: the GPU helper sent %s (%d such so far)", self.name, error, self._bad)

    def _take_frame(self, frame: wire.Frame) -> None:
        now_ns = self.context.clock.monotonic_ns()
        if frame.status == wire.RUNNING and frame.generation != self._inventory.get("generation"):
            return
        self._frame, self._frame_ns = frame, now_ns
        metrics = self.context.metrics
        metrics.observe_ms("tw_source_ms", frame.took_us / 1000, source=f"{self.name}_driver")
        metrics.set("tw_process_cpu_seconds", frame.cpu_ms / 1000, helper=self.name)
        age_ns = now_ns - frame.at_ns
        apart = not FRESH_NS[0] <= age_ns <= FRESH_NS[1] and 0 <= age_ns < 2 * self.settings.every_s * NS_PER_S
        if apart and now_ns - self._shifted_ns > SHIFT_EVERY_NS:
            self._shifted_ns = now_ns
            self._keeper.shift(age_ns - FRESH_AIM_NS)

    def _take_inventory(self, facts: dict[str, Any]) -> None:
        gpus, parts = tuple(gpu["name"] for gpu in facts["gpus"]), tuple(part["name"] for part in facts["parts"])
        self._inventory, self._gpus, self._parts = facts, gpus, parts
        self._frame = None
        self._keeper.remember(facts["names"])

    def _note_restart(self) -> None:
        if self._keeper.restarts == self._restarts:
            return
        self._restarts, self._frame = self._keeper.restarts, self._frame if self._down() else None

    def _down(self) -> bool:
        """Whether the child told why it cannot work before it went."""
        return self._frame is not None and self._frame.status in (wire.NO_LIBRARY, wire.OLD_DRIVER)

    def _note_trouble(self, reason: str) -> None:
        """A node whose GPUs exist and cannot be read is no quiet node: said once, until they can be."""
        now_ns = self.context.clock.monotonic_ns()
        if reason != self._trouble:
            self._trouble, self._trouble_ns, self._trouble_told = reason, now_ns, False
        code, severity, lasts_s = TROUBLES.get(reason, ("", "", 0))
        if not code or self._trouble_told or now_ns - self._trouble_ns < lasts_s * NS_PER_S:
            return
        self._trouble_told = True
        line = f"source {self.name}: the GPUs of this node cannot be read: {reason}"
        event = LogEvent(
            source=self.name, severity=severity, code=code, line=line, template_id=code, attributes={"reason": reason}
        )
        self.context.outlet.log(event, urgent=severity == "critical")

    # --- what it says -------------------------------------------------------------------------------------------------------------

    def _sample(self) -> Sample:
        frame = self._frame
        if self._keeper.silent:
            return Sample(gaps=(Gap(self.name, "helper_silent"),))
        if frame is None:
            return Sample(gaps=(Gap(self.name, "starting" if not self._restarts else "helper_restarting"),))
        if frame.status != wire.RUNNING:
            return Sample(gaps=(Gap(self.name, wire.REASONS.get(frame.status, "error")),))
        if self.context.clock.monotonic_ns() - self._frame_ns > 2.5 * self.settings.every_s * NS_PER_S:
            return Sample(gaps=(Gap(self.name, "stale"),))
        gaps = tuple(
            Gap(self.name, f"hung:{name}") for index, name in enumerate(self._gpus[:64]) if frame.hung >> index & 1
        )
        return Sample(self._blocks(frame), gaps)

    def _blocks(self, frame: wire.Frame) -> tuple[Block, ...]:
        rows, parts = bytearray(frame.rows[: frame.gpus * ROW_BYTES]), frame.rows[frame.gpus * ROW_BYTES :]
        blocks = []
        if self._gpus:
            for index, gpu in enumerate(self._inventory["gpus"]):
                self._write_xids(rows, index * ROW_BYTES, gpu)
            blocks.append(Block(GPU.name, GPU.catalog_id, self._gpus, bytes(rows)))
        if self._parts:
            blocks.append(Block(GPU_INSTANCE.name, GPU_INSTANCE.catalog_id, self._parts, parts))
        return tuple(blocks)

    def _write_xids(self, rows: bytearray, at: int, gpu: dict[str, Any]) -> None:
        """The Xids that either source saw. Without any the child's word stands: 0 where it would hear of one, else nothing."""
        xids = self.context.facts.xids
        if xids.count(gpu["pci"]):
            _FLOAT.pack_into(rows, at + _XID_LAST, xids.last(gpu["pci"]))
            _FLOAT.pack_into(rows, at + _XID_COUNT, xids.count(gpu["pci"]))

    def _take_event(self, facts: dict[str, Any]) -> None:
        code, pci = str(facts["code"]), pci_address(str(facts.get("pci", "")))
        attributes = {key: str(facts[key]) for key in ("gpu", "uuid", "xid", "instance", "waited_s", "data", "kind", "dropped_before")
                      if facts.get(key)}  # fmt: skip
        attributes["pci"] = pci
        if code.startswith("xid:"):
            event = self._xid_event(code, pci, attributes)
            self.context.facts.xids.by_library(pci, event, self.context.clock.monotonic_ns())
            return
        severity = SEVERITIES.get(code, "warning")
        line = f"{attributes.get('gpu', 'a GPU')} ({pci}) {MEANINGS.get(code, code)}"
        event = LogEvent(
            source=self.name, severity=severity, code=code, line=line, template_id=code, attributes=attributes
        )
        self.context.outlet.log(event, urgent=severity == "critical")

    def _xid_event(self, code: str, pci: str, attributes: dict[str, str]) -> LogEvent:
        """The event that the kernel's line would have made: same code, and its severity by the same table."""
        line = f"NVRM: Xid (PCI:{pci.rpartition('.')[0]}): {attributes['xid']}, reported by the driver library"
        if self._table is None:
            self._table = patterns.load()
        hit = self._table.match(line)
        severity = hit.severity if hit is not None else "warning"
        return LogEvent(
            source=self.name, severity=severity, code=code, line=line, template_id="xid", attributes=attributes
        )
