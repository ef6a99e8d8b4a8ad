"""All detectors over one frame, each on its own: what one breaks does not reach the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from msgspec.structs import replace

from detectors.base import Detector, Frame, registry
from streams.align import Aligner, AlignSettings
from streams.matrices import array_head, bin_of, map_head, pack, unpack
from streams.shedding import patient, thinned
from streams.warming import Warming
from trainwarden.config import Config
from trainwarden.policy import Family, Policy, lowest_reach
from trainwarden.records import Reach, Verdict, encode, stable_id
from trainwarden.registry import Registry
from trainwarden.selfmetrics import Metrics

log = logging.getLogger(__name__)

MAX_EVIDENCE = 8


@dataclass(frozen=True)
class Restored:
    """What a snapshot gave back: detectors that go on, and those that start cold (new, changed, or unreadable state)."""

    warm: tuple[str, ...]
    cold: tuple[str, ...]


class Pipeline:
    """Aligner and detectors: the computation whose input is raw records and cuts, and whose output is verdicts.

    Parameters
    ----------
    config
        ``[detectors.<name>]`` tables give settings; ``enabled = false`` leaves one out.
    detectors
        Registry to take them from; default: every file in the package.
    aligner
        What makes frames: of ticks, or (`streams.merge`) of summaries.
    only
        Which detectors of those this pipeline runs, by name.

    Raises
    ------
    ConfigError
        A detector's table has an unknown key or a wrong value.
    """

    def __init__(
        self,
        config: Config,
        detectors: Registry[Detector] | None = None,
        metrics: Metrics | None = None,
        aligner: Callable[[AlignSettings, Metrics], Aligner] = Aligner,
        only: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._aligner = aligner
        self._only = only
        self._config = config
        self._policy: Policy = config.policy
        self._found = detectors or registry()
        self._metrics = metrics or Metrics("pipeline")
        self._warming = Warming(self._metrics)
        self.disabled: dict[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Start cold."""
        self.aligner = self._aligner(AlignSettings.of(self._config), self._metrics)
        self.disabled.clear()
        self.detectors = {
            name: self._build(name, kind)
            for name, kind in self._found.all().items()
            if self._config.enabled("detectors", name) and self._only(name)
        }

    @property
    def code_version(self) -> str:
        """Changes with any detector's version or settings."""
        return stable_id("pipeline", *[f"{name}/{d.version}/{d.config_hash}" for name, d in self.detectors.items()])

    def cut(self, now_ns: int) -> list[Verdict]:
        """Close a frame and run it; no verdicts while there is nothing to look at."""
        frame = self.aligner.cut(now_ns)
        return [] if frame is None else self.run(frame)

    def run(self, frame: Frame, keep_every: int = 1) -> list[Verdict]:
        """Verdicts of all detectors on `frame`, by name of detector, with cluster and reach filled in. Those that follow levels and trends
        see one grid point in `keep_every`."""
        started_s, thin = perf_counter(), thinned(frame, keep_every)
        self._metrics.count("tw_ticks_shed_total", len(frame.ticks) - len(thin.ticks))
        asked = [name for name in self.detectors if name not in self.disabled]
        verdicts = [
            verdict for name in asked for verdict in self._ask(name, thin if patient(self.detectors[name]) else frame)
        ]
        self._warming.look(frame.now_ns, {name: d for name, d in self.detectors.items() if name not in self.disabled})
        self._metrics.observe_ms("tw_frame_ms", (perf_counter() - started_s) * 1000)
        return verdicts

    def snapshot(self) -> bytes:
        """State of aligner and detectors as of the last cut."""
        return b"".join(self.captured())

    def captured(self) -> tuple[bytes, ...]:
        """`snapshot` in parts, one for each detector: joining them would copy a cluster's state once more between two cuts."""
        asked = [(name, d) for name, d in self.detectors.items() if name not in self.disabled]
        begun = [
            map_head(2),
            pack("aligner"),
            *bin_of(self.aligner.snapshot()),
            pack("detectors"),
            map_head(len(asked)),
        ]
        found = [b"".join(begun)]
        for name, detector in asked:
            head = pack(name) + array_head(3) + pack(detector.version) + pack(detector.config_hash)
            size, state = bin_of(detector.snapshot())
            found += [head + size, state]
        return tuple(found)

    def restore(self, payload: bytes) -> Restored:
        """Go on where `snapshot` was taken. A detector of another version or other settings starts cold."""
        state = unpack(payload)
        self.reset()
        self.aligner.restore(state["aligner"])
        warm = tuple(name for name in self.detectors if self._restore_one(name, state["detectors"].get(name)))
        return Restored(warm, tuple(name for name in self.detectors if name not in warm))

    def _build(self, name: str, kind: type[Detector]) -> Detector:
        return kind(self._config.plugin("detectors", name, kind.Settings))

    def _restore_one(self, name: str, state: list[object] | None) -> bool:
        detector = self.detectors[name]
        if state is None or state[:2] != [detector.version, detector.config_hash]:
            return False
        payload = state[2]
        return isinstance(payload, bytes) and self._guarded(name, lambda: detector.restore(payload))

    def _guarded(self, name: str, restore: Callable[[], None]) -> bool:
        try:
            restore()
        except Exception as error:  # noqa: BLE001 - foreign code: state it cannot read means a cold start, nothing worse
            log.warning("detector %s cannot read its snapshot (%r): it starts cold", name, error)
            self._metrics.count("tw_detector_errors_total", detector=name)
            self.detectors[name] = self._build(name, type(self.detectors[name]))
            return False
        return True

    def _ask(self, name: str, frame: Frame) -> list[Verdict]:
        started_s = perf_counter()
        try:
            verdicts = [self._finish(verdict) for verdict in self.detectors[name].update(frame)]
            for verdict in verdicts:
                encode(verdict)  # one that cannot be written would break the worker later, again at each repetition
        except Exception as error:  # noqa: BLE001 - foreign code: one broken detector must not silence the others
            self._disable(name, error, frame)
            return []
        self._metrics.observe_ms("tw_detector_ms", (perf_counter() - started_s) * 1000, detector=name)
        for verdict in verdicts:
            self._metrics.count("tw_verdicts_total", detector=name, kind=verdict.kind)
        return verdicts

    def _disable(self, name: str, error: Exception, frame: Frame) -> None:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else "?"
        log.error(
            "detector %s is switched off until the worker restarts: %r at %s on the frame of %d; the others go on",
            name,
            error,
            line,
            frame.now_ns,
        )
        self.disabled[name] = f"{error!r} at {line}"
        self._metrics.count("tw_detector_errors_total", detector=name)

    def _finish(self, verdict: Verdict) -> Verdict:
        kind = self._policy.kind(verdict.kind)
        # silence about a node is no proof against it, whatever the operator's table says; and a detector may ask for less
        most = Reach.NOTIFY if kind.family is Family.TELEMETRY else Reach.ACT
        reach = lowest_reach([kind.reach, verdict.reach, most])
        return replace(verdict, cluster=self._config.cluster, reach=reach, evidence=verdict.evidence[:MAX_EVIDENCE])
