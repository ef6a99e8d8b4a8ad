"""For a person at one node: what each source finds here, what it does not and why, and what of it looks wrong."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from collectors.agent import Look, families_of
from collectors.base import registry
from collectors.reasons import meaning
from trainwarden.records import Block

FACTS_SHOWN = 12
HARMLESS = ("not_started", "no_rail_address", "missing")
"""Gaps that a look from outside a running agent always has, or that only mean that the thing is not here."""


@dataclass(frozen=True)
class Explanation:
    """One source: `on` is false when the configuration switches it off."""

    source: str
    on: bool
    found: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    text: str = ""
    cost_ms: float = 0.0

    def lines(self) -> Iterator[str]:
        """What to print."""
        state = f"on   {self.cost_ms:6.2f} ms" if self.on else "off          "
        yield f"{self.source:12} {state}  {'; '.join(self.found) or ('nothing' if self.on else 'switched off')}"
        for gap in self.gaps:
            yield f"{'':27} - {gap}: {meaning(gap) or 'see docs/collectors.md'}"
        if self.text:
            yield f"{'':27} - {self.text}"


def explanations(seen: Look) -> list[Explanation]:
    """Every source of the registry, in its order."""
    here = {source.name: source for source in seen.sources}
    found = []
    for name in registry().all():
        source = here.get(name)
        if source is None:
            found.append(Explanation(name, on=False))
            continue
        parts = tuple(_amount(block) for block in seen.samples[name].blocks)
        gaps = tuple(dict.fromkeys(gap.reason for gap in seen.samples[name].gaps))
        found.append(Explanation(name, True, parts, gaps, source.explain(), seen.cost_ms[name]))
    return found


def _amount(block: Block) -> str:
    rows = block.rows()
    total = sum(len(values) for _, values in rows)
    present = sum(not math.isnan(value) for _, values in rows for value in values)
    shown = " ".join(device for device, _ in rows[:8]) + (" ..." if len(rows) > 8 else "")
    return f"{block.family}: {shown} ({present} of {total} values)"


# --- what looks wrong ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A value of a column that a healthy node does not have. `when` is asked with the value and its whole row."""

    family: str
    column: str
    when: Callable[[float, Mapping[str, float | None]], bool]
    sentence: str


def _above(limit: float) -> Callable[[float, Mapping[str, float | None]], bool]:
    return lambda value, _: value > limit


def _below(limit: float) -> Callable[[float, Mapping[str, float | None]], bool]:
    return lambda value, _: value < limit


def _on_rail(value: float, row: Mapping[str, float | None]) -> bool:
    """An interface of the training network without carrier; others may be unused."""
    return value == 0.0 and row.get("role") == 1.0


RULES = (
    Rule("host", "mem_available_ratio", _below(0.03), "almost no memory is left: something will be killed"),
    Rule("host", "psi_memory_full_ratio", _above(0.1), "all tasks wait for memory a tenth of the time"),
    Rule("host", "psi_io_full_ratio", _above(0.5), "all tasks wait for disks half of the time"),
    Rule("host", "cpu_steal_ratio", _above(0.05), "the hypervisor takes processor time away"),
    Rule("host", "run_dir_free_bytes", _below(1e9), "less than 1 GB is left where the agent spools"),
    Rule("host", "clock_offset_ms", lambda value, _: abs(value) > 50, "the clock is off: order across nodes cannot be told"),
    Rule("nic", "carrier", _on_rail, "an interface of the training network has no carrier"),
    Rule("nic", "rx_errors_per_s", _above(1.0), "frames arrive damaged: cable, optics or switch port"),
    Rule("nic", "symbol_errors_per_s", _above(10.0), "symbol errors: cable or optics"),
    Rule("nic", "saturated_count", _above(0.0), "counters stand at their maximum: rates from them are too low; clear them"),
    Rule("process", "alive", _below(1.0), "a training process is gone"),
    Rule("process", "throttled_ratio", _above(0.2), "a CPU limit holds a training process back"),
    Rule("gpu", "temp_c", _above(87.0), "the GPU is hot"),
    Rule("gpu", "ecc_uncorrectable_count", _above(0.0), "uncorrectable memory errors since boot"),
    Rule("gpu", "row_remap_failure", _above(0.0), "no spare memory rows are left: replace the GPU"),
    Rule("gpu", "row_remap_pending", _above(0.0), "a row remap waits for a reset of the GPU"),
    Rule("gpu", "xid_last", _above(0.0), "an Xid was reported since boot: see its entry in detectors/rules/codes.csv"),
    Rule("gpu", "power_violation_ratio", _above(0.1), "power holds the clocks back"),
    Rule("gpu", "thermal_violation_ratio", _above(0.05), "heat holds the clocks back"),
    Rule("gpu", "pcie_replay_per_s", _above(1.0), "PCIe transfers are repeated"),
    Rule("board", "dimm_uncorrectable_count", _above(0.0), "uncorrectable errors in main memory"),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong."""

    where: str
    what: str


def findings(seen: Look) -> list[Finding]:
    """What looks wrong in the samples, in the gaps, and between the sources of the topology."""
    values = families_of(seen)
    found = [
        Finding(f"{rule.family} {device}", f"{rule.column} is {value:g}: {rule.sentence}")
        for rule in RULES
        for device, row in values.get(rule.family, {}).items()
        if (value := row.get(rule.column)) is not None and rule.when(value, row)
    ]
    for name, sample in seen.samples.items():
        for gap in dict.fromkeys(gap.reason for gap in sample.gaps):
            if gap not in HARMLESS:
                found.append(Finding(f"source {name}", f"{gap}: {meaning(gap) or 'see docs/collectors.md'}"))
    return [*found, *(Finding("topology", conflict.sentence()) for conflict in seen.context.facts.board.conflicts())]


def screen(seen: Look) -> str:
    """One screen for a person: the node, what is on it, what looks wrong."""
    wrong = findings(seen)
    parts = [f"node {seen.node}: {os.cpu_count()} processors, {seen.context.facts.gpus} accelerators"]
    parts += [f"  {part}" for explained in explanations(seen) if explained.found for part in explained.found]
    facts = seen.context.facts.board.merged("node")
    shown = sorted(facts.items(), key=lambda item: item[1].standing)[:FACTS_SHOWN]
    parts += [f"  {key}: {claim.value[:120]} ({claim.origin}, {claim.source})" for key, claim in shown]
    parts += [f"  and {len(facts) - len(shown)} more facts, in collect --once"] if len(facts) > len(shown) else []
    silent = [explained.source for explained in explanations(seen) if explained.on and not explained.found]
    parts.append(f"  nothing here for: {', '.join(silent) or 'no source'}")
    parts += [f"! {finding.where}: {finding.what}" for finding in wrong] or ["nothing looks wrong"]
    return "\n".join(parts)
