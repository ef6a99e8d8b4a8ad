"""Notices of the cloud: a machine that it will stop, move or take away, told as events before it happens."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from collectors.asking import Answer, Question
from collectors.base import Context, Sample, Source
from collectors.cloud.notices import MEANING, SEVERITY, Notice
from collectors.cloud.services import SERVICES, Fetch, Service, detected, http_fetch
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

NAMES = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure", "alibaba": "Alibaba Cloud"}


class _Standing(msgspec.Struct):
    """Notices that were told and are not over: id → (kind, not before)."""

    told: dict[str, tuple[str, str]] = {}


class CloudSource(Source):
    """An event ``cloud:<kind>`` for each notice, once, with its identity and the time before which nothing happens; told again when the
    cloud moves that time. When no notice of a kind is left, the same code with severity `info` takes it back. Quiet on machines of
    one's own: only a cloud that the firmware names, or the configuration, is asked.

    Every question runs in a thread of its own with a deadline. What was told stands in ``cloud.json`` and is not told again by the next
    agent.
    """

    name: ClassVar[str] = "cloud"
    every_ticks: ClassVar[int] = 5
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.cloud]``."""

        provider: str = option("auto", "aws, gcp, azure, alibaba; auto: the one that the firmware names; off")
        every_s: float = option(5.0, "how often it is asked about what may be minutes ahead")
        planned_every_s: float = option(60.0, "how often it is asked about what is planned")
        deadline_s: float = option(5.0, "an answer later than this is none")
        endpoint: str = option("", "host:port of the metadata service, where it is not the cloud's own address")

    def __init__(self, context: Context, settings: Any, fetch: Fetch = http_fetch) -> None:
        super().__init__(context, settings)
        self._service = self._chosen(fetch)
        self._question: Question[list[Notice]] = Question("cloud", context.clock, settings.every_s, self._ask)
        self._planned: tuple[int, list[Notice]] | None = None
        self._path = context.state_directory / "cloud.json"
        self._handled: Answer[list[Notice]] | None = None
        self._standing: _Standing | None = None
        self._keeps = False

    def start(self) -> None:
        self._keeps = True  # a single look for a person writes nothing

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        if self._service is None:
            return Sample()
        answer = self._question.newest()
        if answer is not None and answer is not self._handled:
            self._handled = answer
            self._take(self._service.name, answer.value)
        reason = self._reason()
        return Sample(gaps=(Gap(self.name, reason),) if reason else ())

    def explain(self) -> str:
        if self._service is None:
            return "no cloud: the firmware names none and the configuration neither"
        self._question.settle(self.settings.deadline_s)
        standing = self._standing.told if self._standing else {}
        trouble = f"; {self._question.error}" if self._question.error else ""
        return f"{NAMES[self._service.name]}: {len(standing)} notices stand{trouble}"

    def _chosen(self, fetch: Fetch) -> Service | None:
        name, context = self.settings.provider, self.context
        if name not in ("auto", "off", *SERVICES):
            raise ConfigError(
                f"collector.sources.cloud.provider: {name!r} is none of auto, off, {', '.join(sorted(SERVICES))}"
            )
        if name == "auto":
            name = detected(context.files) if context.files.root in ("", "/host") else ""
        if name in ("", "off"):
            return None
        host, colon, port = self.settings.endpoint.rpartition(":")
        if self.settings.endpoint and not (colon and host and port.isdecimal()):
            raise ConfigError(
                f"collector.sources.cloud.endpoint: {self.settings.endpoint!r} is no host:port such as 127.0.0.1:8080"
            )
        return SERVICES[name](fetch, self.settings.deadline_s, host, int(port or 0))

    def _ask(self) -> list[Notice]:
        """In the thread of the question."""
        assert self._service is not None
        found = self._service.urgent()
        now_ns = self.context.clock.monotonic_ns()
        if self._planned is None or now_ns - self._planned[0] >= self.settings.planned_every_s * NS_PER_S:
            self._planned = (now_ns, self._service.planned())
        return [*found, *self._planned[1]]

    def _reason(self) -> str:
        if self._question.error is not None:
            return "malformed" if isinstance(self._question.error, ValueError) else _reason_of(self._question.error)
        return "hung" if self._question.waiting_s > 150 else ""

    def _take(self, cloud: str, notices: list[Notice]) -> None:
        standing = self._standing or self._load()
        now = {n.notice_id: n for n in notices}
        for notice in now.values():
            known = standing.told.get(notice.notice_id)
            moved = known is not None and notice.not_before not in ("", known[1])
            if known is None or moved:
                self._tell(cloud, notice, moved)
        kept = {i: (n.kind, n.not_before or standing.told.get(i, ("", ""))[1]) for i, n in now.items()}
        for kind in sorted({kind for kind, _ in standing.told.values()} - {kind for kind, _ in kept.values()}):
            self._take_back(cloud, kind, [i for i, (k, _) in standing.told.items() if k == kind])
        changed = kept != standing.told
        self._standing = _Standing(kept)
        if changed and self._keeps:
            self._save(self._standing)

    def _tell(self, cloud: str, notice: Notice, moved: bool) -> None:
        when = f"not before {notice.not_before}" if notice.not_before else "at a time that it does not name"
        again = "now " if moved else ""
        said = " ".join(filter(None, (notice.what, notice.text)))
        line = f"{NAMES[cloud]} {MEANING[notice.kind]}, {again}{when}" + (f": {said}" if said else "")
        attributes = {
            "cloud": cloud, "notice": notice.notice_id, "not_before": notice.not_before, "what": notice.what,
        }  # fmt: skip
        event = LogEvent(source=self.name, severity=SEVERITY[notice.kind], code=f"cloud:{notice.kind}", line=line,
                         attributes={name: value for name, value in attributes.items() if value})  # fmt: skip
        self.context.outlet.log(event, urgent=SEVERITY[notice.kind] in ("critical", "error"))

    def _take_back(self, cloud: str, kind: str, ids: list[str]) -> None:
        line = f"{NAMES[cloud]}: no notice of {kind} is left ({', '.join(ids)})"
        attributes = {"cloud": cloud, "notice": ", ".join(ids)}
        event = LogEvent(source=self.name, severity="info", code=f"cloud:{kind}", line=line, attributes=attributes)
        self.context.outlet.log(event, urgent=False)

    def _load(self) -> _Standing:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Standing)
        except FileNotFoundError:
            return _Standing()
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be read (%s): notices may be told again", self._path, error)
            return _Standing()

    def _save(self, standing: _Standing) -> None:
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(standing))
            beside.replace(self._path)
        except OSError as error:
            logger.warning("%s cannot be written (%s): notices may be told again", self._path, error)


def _reason_of(error: Exception) -> str:
    return "timeout" if isinstance(error, TimeoutError) else "unreachable" if isinstance(error, OSError) else "error"
