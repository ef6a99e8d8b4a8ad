"""What may follow from a verdict: the one place that maps kinds of fault to reach, remedy and severity.

The operator owns it: `[policy]` in the configuration overrides each entry. Detectors name a *kind*; they never decide what is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from trainwarden.errors import ConfigError
from trainwarden.records import Mode, Reach, Verb, stable_id
from trainwarden.settings import parse_duration_ms


class Family(StrEnum):
    """How a fault hurts a synchronous job."""

    FAIL_STOP = "fail_stop"
    FAIL_SLOW = "fail_slow"
    CORRUPTION = "corruption"
    WARNING = "warning"
    TELEMETRY = "telemetry"


_RESTART = (Verb.RESTART,)
_REMOVE = (Verb.SAVE, Verb.ISOLATE, Verb.RESTART)
_REMOVE_UNSAVED = (Verb.ISOLATE, Verb.RESTART)


@dataclass(frozen=True)
class FaultKind:
    """One entry of the taxonomy.

    Attributes
    ----------
    remedy
        Verbs in order. `remedy_on_recurrence` replaces it when the same culprit was hit by the same kind within
        `recurrence_window_s`.
    confirm_s
        How long the fault must have stood since its estimated onset before anything is done about it. Naming costs nothing, a
        node costs a lot: a passing neighbour on the same processor is named, and gone before this is over.
    rank
        Strength when kinds compete for one incident: a killed process explains a hang, not the reverse.
    """

    name: str
    family: Family
    help: str
    reach: Reach = Reach.NOTIFY
    remedy: tuple[Verb, ...] = ()
    remedy_on_recurrence: tuple[Verb, ...] = ()
    severity: str = "warning"
    rank: int = 0
    recurrence_window_s: float = 3600.0
    confirm_s: float = 0.0


_KINDS = (
    FaultKind("rank_killed", Family.FAIL_STOP, "a training process ended by a signal or error of its own", Reach.ACT,
              _RESTART, _REMOVE_UNSAVED, "critical", 90),
    FaultKind("rank_frozen", Family.FAIL_STOP, "a training process is stopped or makes no progress while others wait for it",
              Reach.ACT, _RESTART, _REMOVE_UNSAVED, "critical", 80),
    FaultKind("node_lost", Family.FAIL_STOP, "a node and its telemetry are gone while the job stands", Reach.ACT,
              _REMOVE_UNSAVED, _REMOVE_UNSAVED, "critical", 85),
    FaultKind("job_hang", Family.FAIL_STOP, "no rank makes progress and no culprit stands out", Reach.NOTIFY,
              _RESTART, _RESTART, "critical", 40),
    FaultKind("fatal_code", Family.FAIL_STOP, "the driver or kernel reported a code that means broken hardware", Reach.ACT,
              _REMOVE, _REMOVE, "critical", 95),
    FaultKind("link_down", Family.FAIL_STOP, "a node's link carries nothing", Reach.ACT, _REMOVE, _REMOVE, "critical", 88),
    FaultKind("link_slow", Family.FAIL_SLOW, "probes to and from a node are slow or lost", Reach.ACT, _REMOVE, _REMOVE, "major", 75,
              confirm_s=8.0),
    FaultKind("fabric_slow", Family.FAIL_SLOW, "probes are slow everywhere: nobody is to blame", Reach.NOTIFY, (), (), "major", 78),
    FaultKind("compute_slow", Family.FAIL_SLOW, "one rank computes longer than its peers, who wait for it", Reach.ACT,
              _REMOVE, _REMOVE, "major", 70, confirm_s=15.0),
    FaultKind("data_slow", Family.FAIL_SLOW, "one rank waits for its input data", Reach.NOTIFY, (Verb.REBALANCE,),
              (Verb.REBALANCE,), "major", 72),
    FaultKind("job_slow", Family.FAIL_SLOW, "all ranks are slower alike: imbalance or a shared cause", Reach.NOTIFY, (), (), "warning", 20),
    FaultKind("non_finite", Family.CORRUPTION, "loss or gradients are not finite", Reach.ACT, _RESTART, _REMOVE_UNSAVED, "critical", 82),
    FaultKind("silent_corruption", Family.CORRUPTION, "one replica's parameters differ from the others'", Reach.ACT,
              _REMOVE_UNSAVED, _REMOVE_UNSAVED, "critical", 83),
    FaultKind("imbalance", Family.FAIL_SLOW, "work is divided unequally by design (stages, sequences): no node is bad", Reach.NOTIFY,
              (Verb.REBALANCE,), (Verb.REBALANCE,), "warning", 45),
    FaultKind("checkpoint_stall", Family.FAIL_SLOW, "saves hold the job up longer than they used to", Reach.NOTIFY, (), (), "major", 35),
    FaultKind("subnet_slow", Family.FAIL_SLOW, "probes are slow below one leaf or along one rail: a shared part, no node", Reach.NOTIFY,
              (), (), "critical", 79),
    FaultKind("shared_slow", Family.FAIL_SLOW, "nodes of one rack, power unit or cooling zone slow down together: a shared cause, no node",
              Reach.NOTIFY, (), (), "major", 77),
    FaultKind("loss_spike", Family.CORRUPTION, "loss or gradient norm jumped on all replicas alike", Reach.NOTIFY, (), (), "major", 28),
    FaultKind("device_state", Family.WARNING, "a device reports a state that costs speed or foretells a failure", Reach.NOTIFY, (), (),
              "major", 32),
    FaultKind("recurring_code", Family.WARNING, "harmless codes of one node come back too often", Reach.NOTIFY, (), (), "major", 33),
    FaultKind("foretold", Family.WARNING, "a trend that ends in a failure within hours", Reach.NOTIFY, (), (), "warning", 27),
    FaultKind("unusual", Family.WARNING, "the metrics of a node no longer fit together", Reach.CORRELATE, (), (), "warning", 11),
    FaultKind("stale_series", Family.TELEMETRY, "a series stands still or jumps back: its source is broken, not the node", Reach.CORRELATE,
              (), (), "warning", 9),
    FaultKind("save_failed", Family.WARNING, "checkpoints are not written", Reach.NOTIFY, (), (), "major", 30),
    FaultKind("suspect_code", Family.WARNING, "a code of the driver or kernel that is worth a look", Reach.NOTIFY, (), (), "warning", 25),
    FaultKind("link_rerouted", Family.WARNING, "a node moved its traffic off a dead or degraded link by itself: the job goes on",
              Reach.NOTIFY, (), (), "major", 26),
    FaultKind("threshold", Family.WARNING, "a series left the band that history and load explain", Reach.CORRELATE, (), (), "warning", 10),
    FaultKind("telemetry_lost", Family.TELEMETRY, "a node's telemetry stopped: its health is unknown", Reach.NOTIFY, (), (), "warning", 15),
    FaultKind("clock_skew", Family.TELEMETRY, "a node's clock is off", Reach.NOTIFY, (), (), "warning", 12),
    FaultKind("pipeline_late", Family.TELEMETRY, "Trainwarden itself is behind: what it says, or what the store holds, is old",
              Reach.NOTIFY, (), (), "major", 14),
    FaultKind("records_refused", Family.TELEMETRY, "many records arrive that nobody can read", Reach.NOTIFY, (), (), "warning", 13),
    FaultKind("detector_off", Family.TELEMETRY, "a detector broke and is switched off: what it looks for is not seen", Reach.NOTIFY,
              (), (), "major", 13),
)  # fmt: skip

KINDS: dict[str, FaultKind] = {kind.name: kind for kind in _KINDS}

_REACH_ORDER = tuple(Reach)
_MODE_ORDER = tuple(Mode)


def reach_at_least(reach: Reach, needed: Reach) -> bool:
    """Whether `reach` includes `needed`."""
    return _REACH_ORDER.index(reach) >= _REACH_ORDER.index(needed)


def highest_reach(reaches: list[Reach]) -> Reach:
    """The farthest of several; store when there is none."""
    return max(reaches, key=_REACH_ORDER.index, default=Reach.STORE)


def lowest_reach(reaches: list[Reach]) -> Reach:
    """The nearest of several."""
    return min(reaches, key=_REACH_ORDER.index)


def strictest(*modes: Mode) -> Mode:
    """The most careful of several modes.

    Examples
    --------
    >>> strictest(Mode.AUTO, Mode.RECOMMEND).value
    'recommend'
    """
    return min(modes, key=_MODE_ORDER.index)


@dataclass(frozen=True)
class Policy:
    """The operator's will, resolved.

    Attributes
    ----------
    mode
        Ceiling for everything.
    verb_modes, job_modes
        Stricter modes for single verbs and jobs.
    kinds
        The taxonomy with the operator's overrides.
    """

    mode: Mode = Mode.RECOMMEND
    verb_modes: Mapping[Verb, Mode] = field(default_factory=dict)
    job_modes: Mapping[str, Mode] = field(default_factory=dict)
    kinds: Mapping[str, FaultKind] = field(default_factory=lambda: KINDS)

    @property
    def revision(self) -> str:
        """Changes whenever anything in the policy does; stands on every plan."""
        return stable_id(
            "policy",
            self.mode,
            sorted(self.verb_modes.items()),
            sorted(self.job_modes.items()),
            sorted(self.kinds.items()),
        )

    def kind(self, name: str) -> FaultKind:
        """Entry of a kind; an unknown kind (newer detector) is stored and correlated, never acted on."""
        return self.kinds.get(name) or FaultKind(name, Family.WARNING, "unknown kind", Reach.CORRELATE)

    def mode_of(self, job: str, verbs: tuple[Verb, ...]) -> Mode:
        """Strictest mode of a plan with these verbs on this job."""
        return strictest(
            self.mode, self.job_modes.get(job, Mode.AUTO), *(self.verb_modes.get(verb, Mode.AUTO) for verb in verbs)
        )


def override_kind(kind: FaultKind, changes: Mapping[str, object]) -> FaultKind:
    """`kind` with the operator's `changes` (keys reach, remedy, remedy_on_recurrence, severity, confirm_s)."""
    known = {"reach", "remedy", "remedy_on_recurrence", "severity", "confirm_s"}
    if unknown := set(changes) - known:
        raise ConfigError(
            f"policy.kinds.{kind.name}: unknown key {sorted(unknown)[0]!r}, expected one of {', '.join(sorted(known))}"
        )
    converted: dict[str, object] = {}
    for key, value in changes.items():
        converted[key] = _convert(kind.name, key, value)
    return replace(kind, **converted)  # type: ignore[arg-type]


def _convert(kind: str, key: str, value: object) -> object:
    try:
        if key == "reach":
            return Reach(str(value))
        if key == "confirm_s":
            return parse_duration_ms(value, f"policy.kinds.{kind}.{key}", "s") / 1000
        if key.startswith("remedy"):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{value!r} is not a list of verbs")
            return tuple(Verb(str(verb)) for verb in value)
    except ValueError as error:
        raise ConfigError(f"policy.kinds.{kind}.{key}: {error}") from None
    return str(value)
