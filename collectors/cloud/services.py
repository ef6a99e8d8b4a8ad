"""The metadata services: who they are, what they are asked, and the one way to ask them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from collectors.cloud import notices
from collectors.cloud.notices import Notice
from collectors.files import Files

MAX_BYTES = 256 * 1024
TOKEN_S = 3600
AZURE_FIRST_ANSWER_S = 130.0
DMI = "/sys/class/dmi/id/"


@dataclass(frozen=True)
class Request:
    """What is asked; `deadline_s` is over all of it."""

    method: str
    host: str
    port: int
    target: str
    headers: Mapping[str, str]
    deadline_s: float


@dataclass(frozen=True)
class Reply:
    """What was answered."""

    status: int
    body: bytes


Fetch = Callable[[Request], Reply]
"""May raise `OSError`."""


def http_fetch(request: Request) -> Reply:
    """Ask by HTTP: no proxy, no redirect, at most 256 KiB."""
    import http.client  # three megabytes of memory that only machines of a cloud need

    end_s = time.monotonic() + request.deadline_s
    connection = http.client.HTTPConnection(request.host, request.port, timeout=request.deadline_s)
    try:
        connection.request(request.method, request.target, headers=dict(request.headers))
        answer = connection.getresponse()
        body = bytearray()
        while len(body) <= MAX_BYTES and (chunk := answer.read1(65536)):
            body += chunk
            if time.monotonic() > end_s:
                raise TimeoutError(f"no whole answer within {request.deadline_s:g} s")
    except http.client.HTTPException as error:
        raise OSError(f"{request.host} does not speak HTTP ({type(error).__name__})") from None
    finally:
        connection.close()
    if len(body) > MAX_BYTES:
        raise OSError(f"{request.host} answers with more than {MAX_BYTES} bytes")
    return Reply(answer.status, bytes(body))


class Service(ABC):
    """One cloud's metadata service.

    Attributes
    ----------
    marks
        File of the firmware's own words below ``/sys/class/dmi/id`` → how it begins on a machine of this cloud.
    """

    name: ClassVar[str]
    host: ClassVar[str] = "169.254.169.254"
    port: ClassVar[int] = 80
    marks: ClassVar[Mapping[str, str]]
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, fetch: Fetch, deadline_s: float, host: str = "", port: int = 0) -> None:
        self._fetch = fetch
        self._deadline_s = deadline_s
        self._host, self._port = host or self.host, port or self.port

    @abstractmethod
    def urgent(self) -> list[Notice]:
        """What may be minutes ahead. Raises `OSError`, and `ValueError` for an answer of another shape."""

    def planned(self) -> list[Notice]:
        """What is days ahead."""
        return []

    def ask(self, target: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Reply:
        """One question."""
        said = self.headers if headers is None else headers
        return self._fetch(Request(method, self._host, self._port, target, said, self._deadline_s))

    def read(self, target: str, parse: Callable[[bytes], list[Notice]]) -> list[Notice]:
        """What `parse` finds in an answer; nothing where the service says that there is nothing."""
        return self.parsed(self.ask(target), target, parse)

    def parsed(self, reply: Reply, target: str, parse: Callable[[bytes], list[Notice]]) -> list[Notice]:
        """The same of an answer that is there."""
        if reply.status == 404:
            return []
        if reply.status != 200:
            raise OSError(f"{self.name} answers {reply.status} to GET {target}")
        return parse(reply.body)


class Tokens(Service):
    """A service that wants a token which it gives to whoever asks from the machine itself."""

    token_target: ClassVar[str] = "/latest/api/token"
    prefix: ClassVar[str]

    def __init__(self, fetch: Fetch, deadline_s: float, host: str = "", port: int = 0) -> None:
        super().__init__(fetch, deadline_s, host, port)
        self._token = ""

    def read(self, target: str, parse: Callable[[bytes], list[Notice]]) -> list[Notice]:
        reply = self.ask(target, headers=self._said())
        if reply.status == 401:
            self._token = self._new_token()
            reply = self.ask(target, headers=self._said())
        return self.parsed(reply, target, parse)

    def _said(self) -> Mapping[str, str]:
        self._token = self._token or self._new_token()
        return {f"{self.prefix}-token": self._token} if self._token else {}

    def _new_token(self) -> str:
        """A token; empty where the service is of the old kind, which wants none."""
        reply = self.ask(self.token_target, "PUT", {f"{self.prefix}-token-ttl-seconds": str(TOKEN_S)})
        return reply.body.decode("ascii", "replace").strip()[:1024] if reply.status == 200 else ""


class Aws(Tokens):
    """Amazon EC2, by version 2 of its service."""

    name: ClassVar[str] = "aws"
    marks: ClassVar[Mapping[str, str]] = {"sys_vendor": "Amazon EC2", "board_vendor": "Amazon EC2"}
    prefix: ClassVar[str] = "X-aws-ec2-metadata"

    def urgent(self) -> list[Notice]:
        return [
            *self.read("/latest/meta-data/spot/instance-action", notices.aws_spot),
            *self.read("/latest/meta-data/events/recommendations/rebalance", notices.aws_rebalance),
        ]

    def planned(self) -> list[Notice]:
        return self.read("/latest/meta-data/events/maintenance/scheduled", notices.aws_scheduled)


class Gcp(Service):
    """Google Compute Engine."""

    name: ClassVar[str] = "gcp"
    marks: ClassVar[Mapping[str, str]] = {"product_name": "Google Compute Engine"}
    headers: ClassVar[Mapping[str, str]] = {"Metadata-Flavor": "Google"}
    root: ClassVar[str] = "/computeMetadata/v1/instance"

    def urgent(self) -> list[Notice]:
        return [
            *self.read(f"{self.root}/maintenance-event", notices.gcp_event),
            *self.read(f"{self.root}/preempted", notices.gcp_preempted),
        ]

    def planned(self) -> list[Notice]:
        reply = self.ask(f"{self.root}/upcoming-maintenance?alt=json")
        # "no notifications have been received yet" comes with 503 on machine types that have no such notices
        return [] if reply.status == 503 else self.parsed(reply, "upcoming-maintenance", notices.gcp_upcoming)


class Azure(Service):
    """Microsoft Azure. Its service of events is switched on by the first question, which may take two minutes."""

    name: ClassVar[str] = "azure"
    marks: ClassVar[Mapping[str, str]] = {"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}
    headers: ClassVar[Mapping[str, str]] = {"Metadata": "true"}

    def __init__(self, fetch: Fetch, deadline_s: float, host: str = "", port: int = 0) -> None:
        super().__init__(fetch, max(deadline_s, AZURE_FIRST_ANSWER_S), host, port)
        self._later_deadline_s = deadline_s
        self._name: str | None = None

    def urgent(self) -> list[Notice]:
        if self._name is None:
            reply = self.ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
            self._name = reply.body.decode("utf-8", "replace").strip() if reply.status == 200 else ""
        found = self.read("/metadata/scheduledevents?api-version=2020-07-01", self._events)
        self._deadline_s = self._later_deadline_s
        return found

    def _events(self, body: bytes) -> list[Notice]:
        return notices.azure_events(body, self._name or "")


class Alibaba(Tokens):
    """Alibaba Cloud ECS. The shape of its events is that of its documentation: no answer of the service was to be had."""

    name: ClassVar[str] = "alibaba"
    host: ClassVar[str] = "100.100.100.200"
    marks: ClassVar[Mapping[str, str]] = {"sys_vendor": "Alibaba Cloud", "product_name": "Alibaba Cloud"}
    prefix: ClassVar[str] = "X-aliyun-ecs-metadata"

    def urgent(self) -> list[Notice]:
        return self.read("/latest/meta-data/instance/spot/termination-time", notices.alibaba_spot)

    def planned(self) -> list[Notice]:
        return self.read("/latest/maintenance/active-system-events", notices.alibaba_events)


SERVICES: dict[str, type[Service]] = {kind.name: kind for kind in (Aws, Gcp, Azure, Alibaba)}


def detected(files: Files) -> str:
    """The cloud that the firmware names; empty for a machine of one's own."""
    for name, kind in SERVICES.items():
        if any(files.text(DMI + file).startswith(begin) for file, begin in kind.marks.items()):
            return name
    return ""
