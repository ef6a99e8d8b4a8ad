"""What the cluster may spend on false incidents, held where incidents are opened.

Detectors state how often they are wrong per node and day; over a thousand nodes that adds up to more than anybody wants to be called
for. So each family of detectors has a purse (`detectors.risk.Spending`): an incident that rests on statistics alone takes one coin out,
and gets it back when it proves true. With an empty purse an opinion is kept back: it stays a verdict, is stored and counted, and opens
its incident when it finds an ally (a verdict of another family about the same culprit), or once it has stood for `patience_s`. A fault
that lasts is therefore told late at worst, never swallowed; what goes away by itself is what gets lost. So an hour of a noisy day costs
the operator `burst` calls and not hundreds.

Never kept back: facts (codes, states, processes that ended, jobs that stand still, numbers that are not finite) and what comes with a
disturbance that was paid for: the same job, at the same time. What came so opens the door for nobody else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from detectors.base import registry
from detectors.risk import DETECTOR_SHARES, Spending, family_budget
from trainwarden.clock import NS_PER_S
from trainwarden.config import RiskConfig
from trainwarden.policy import Family, Policy
from trainwarden.records import Incident, IncidentStatus, Verdict
from trainwarden.selfmetrics import Metrics

KEPT_BACK = 4096
FACTS = frozenset({Family.FAIL_STOP, Family.CORRUPTION})
GUESSES = frozenset({"loss_spike"})
"""Kinds of those families that are statistics all the same."""
STATISTICAL = frozenset(DETECTOR_SHARES) - {"rules"}
WITNESSES = frozenset(DETECTOR_SHARES) - {"relation"}
"""Families that can confirm each other. That telemetry is odd proves no fault, and `relation` judges by what the others have seen too."""
Key = tuple[str, str, str]
"""Job, kind, culprit."""


@dataclass
class Waiting:
    """An opinion that is kept back; `since_ns` is when it was first said, `support_ns` when last."""

    verdict: Verdict
    since_ns: int
    support_ns: int


def families_of_detectors() -> dict[str, str]:
    """Family (the package) of every detector by name."""
    return {name: kind.__module__.split(".")[1] for name, kind in registry().all().items()}


class Budget:
    """The purses, and what is kept back.

    Parameters
    ----------
    families
        Family of each detector; the installed ones by default.
    """

    def __init__(
        self, settings: RiskConfig, policy: Policy, metrics: Metrics, families: Mapping[str, str] | None = None
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._metrics = metrics
        self._families = families_of_detectors() if families is None else dict(families)
        self._purses = {
            family: Spending(family_budget(family, settings.false_incidents_per_day), settings.burst)
            for family in sorted(STATISTICAL)
        }
        self._waiting: OrderedDict[Key, Waiting] = OrderedDict()

    def family(self, verdict: Verdict) -> str:
        """The purse that an incident of this verdict alone would cost; empty for facts."""
        family = self._families.get(verdict.detector, "")
        return "" if self._is_fact(verdict.kind) or family not in STATISTICAL else family

    def admits(self, verdict: Verdict, key: Key, allies: Iterable[Verdict], now_ns: int) -> tuple[bool, str]:
        """Whether the verdict may open an incident now, and the purse that pays for it (empty: free).

        Parameters
        ----------
        allies
            What else was said lately about the same culprit.
        """
        family = self.family(verdict)
        if not family or self.independent([verdict.detector, *(ally.detector for ally in allies)]):
            self._waiting.pop(key, None)
            return True, ""
        if self._has_stood(key, now_ns):
            del self._waiting[key]
            return True, ""  # its purse was empty: what was not paid is not given back
        if self._purses[family].admit(now_ns):
            self._waiting.pop(key, None)
            return True, family
        self._keep_back(verdict, key, now_ns)
        return False, ""

    def independent(self, detectors: Iterable[str]) -> bool:
        """Whether these are of more than one family that looks at nodes and jobs by evidence of its own."""
        return len({family for name in detectors if (family := self._families.get(name, "")) in WITNESSES}) > 1

    def proved(self, family: str) -> None:
        """An incident that a purse paid for was true."""
        if family in self._purses:
            self._purses[family].confirm()

    def take_back(self, kind: str, culprit: str, jobs: Iterable[str]) -> None:
        """A detector no longer thinks so."""
        for job in jobs:
            self._waiting.pop((job, kind, culprit), None)

    def jobs_waiting(self) -> set[str]:
        """Jobs that something kept back is about."""
        return {job for job, _, _ in self._waiting}

    def recall(self, incident: Incident) -> str:
        """Account again for an incident of an earlier life; returns the purse that paid for it, empty when none did or none is owed."""
        family = self._family_of_kind(incident.kind)
        if not family or incident.status is IncidentStatus.SUPERSEDED or incident.close_reason == "verified":
            return ""
        self._purses[family].admit(incident.timeline.verdict_at_ns)
        return family

    def _is_fact(self, kind: str) -> bool:
        return self._policy.kind(kind).family in FACTS and kind not in GUESSES

    def _family_of_kind(self, kind: str) -> str:
        if self._is_fact(kind):
            return ""
        speakers = {self._families.get(name, "") for name, plugin in registry().all().items() if kind in plugin.kinds}
        likely = sorted(speakers & STATISTICAL, key=lambda family: (-DETECTOR_SHARES[family], family))
        return likely[0] if likely and not speakers - STATISTICAL else ""

    def _has_stood(self, key: Key, now_ns: int) -> bool:
        waiting = self._waiting.get(key)
        if waiting is None:
            return False
        patience_ns = self._settings.patience_s * NS_PER_S
        return now_ns - waiting.since_ns >= patience_ns > now_ns - waiting.support_ns

    def _keep_back(self, verdict: Verdict, key: Key, now_ns: int) -> None:
        """A silence longer than the patience ends the waiting: what comes then is a new opinion."""
        before = self._waiting.get(key)
        goes_on = before is not None and now_ns - before.support_ns < self._settings.patience_s * NS_PER_S
        since_ns = before.since_ns if before is not None and goes_on else now_ns
        if not goes_on:
            self._metrics.count("tw_verdicts_kept_back_total", detector=verdict.detector)
        self._waiting[key] = Waiting(verdict, since_ns, now_ns)
        while len(self._waiting) > KEPT_BACK:
            self._waiting.popitem(last=False)
