"""What a person reads at the end of a demonstration."""

from __future__ import annotations

import json
import math
from pathlib import Path

from trainwarden.demo.judge import Outcome
from trainwarden.demo.scenario import Run

PLAIN_FILE = Path(__file__).with_name("plain_torchrun.json")
"""Measured by `benchmarks/plain_torchrun.py`: the same faults on the same job without Trainwarden."""

DEFAULT_GROUP_TIMEOUT_MIN = 30
"""Default time-out of a gloo process group in PyTorch (`torch.distributed.constants.default_pg_timeout`)."""


def table(run: Run) -> str:
    """The timeline, the answer, and the same without us."""
    outcome, injection = run.outcome, run.injection
    lines = [
        "",
        f"  fault            {injection.fault} on {injection.node}, rank {injection.rank}, step {injection.step}: {injection.sentence}",
    ]
    lines += [f"  {name:16} {_seconds(value)}" for name, value in outcome.seconds.items()]
    lines.append(f"  named            {outcome.named or 'nobody'} ({outcome.kind or 'nothing'})")
    lines.append(f"  done             {', '.join(outcome.actions) or 'nothing'}")
    lines.append(f"  steps lost       {outcome.steps_lost}")
    lines.append(f"  on-call          {len(run.receiver.received)} webhooks received")
    lines.append(f"  without us       {without_us(injection.fault, outcome)}")
    lines += [f"  WRONG            {failure}" for failure in outcome.failures]
    lines.append(f"  verdict          {'RIGHT' if outcome.passed else 'WRONG'}")
    return "\n".join(lines)


def without_us(fault: str, outcome: Outcome) -> str:
    """How long plain torchrun would have stood: measured where it can be, computed from this run where it goes on for ever."""
    if fault in ("kill", "freeze"):
        return _measured(fault)
    if outcome.kind == "link_down":
        return f"no step for the process-group time-out ({DEFAULT_GROUP_TIMEOUT_MIN} min), then restarts into the same dead link"
    if fault in ("slow", "slow-loader", "link") and not math.isnan(outcome.step_ms_in_fault):
        ratio = outcome.step_ms_in_fault / outcome.step_ms_before
        medians = f"median {outcome.step_ms_before:.0f} → {outcome.step_ms_in_fault:.0f} ms"
        return f"every step {ratio:.1f} x as long ({medians}) until somebody looks"
    if fault == "nan":
        return "trains on with NaN weights until somebody looks at the loss; everything since is lost"
    if fault == "xid-log":
        return "nobody reads the kernel log; the job dies when the GPU is next used"
    return "the same"


def _measured(fault: str) -> str:
    if not PLAIN_FILE.exists():
        return "not measured here: run benchmarks/plain_torchrun.py"
    found = json.loads(PLAIN_FILE.read_text())
    text = f"{found[fault]['resume_s']:.1f} s with plain torchrun (measured {found['measured_on']}, {found['machine']})"
    if fault == "freeze":
        text += f" at a process-group time-out of {found[fault]['group_timeout_s']:.0f} s; {DEFAULT_GROUP_TIMEOUT_MIN} min by default"
    return text


def _seconds(value: float) -> str:
    return "        -" if math.isnan(value) else f"{value:+8.2f} s"
