"""Kubernetes: place of the node after its labels, and pod, devices and job object of each training job."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from collectors.base import Context, Sample, Source, registry
from collectors.topology.apiserver import ApiServer
from collectors.topology.background import Answer, read_text
from collectors.topology.kubernetes import (
    NODE_LABELS,
    OPT_OUT_LABEL,
    Pod,
    chosen,
    labels_of_node,
    parse_checkpoint,
    parse_downward,
    pods_of_list,
)
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

FILE_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Cluster:
    """What is known of this node's place and pods. `problems` are gap reasons with their sentence."""

    labels: Mapping[str, str] = field(default_factory=dict)
    pods: Mapping[str, Pod] = field(default_factory=dict)
    devices: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = False
    """Whether the labels are those of the node: an answer that did not come takes no label away."""


def end_this_agent() -> None:
    """As the kubelet would: it begins anew with what the label says."""
    os.kill(os.getpid(), signal.SIGTERM)


class KubernetesSource(Source):
    """Three places, each of which may be missing: files of the downward API, the kubelet's device checkpoint, and the API server.

    A rank belongs to the pod in its ``/proc/<pid>/cgroup``. Without the API server the pod's name is what its own environment says
    (``POD_NAME``, ``POD_NAMESPACE``), and node labels are those that the downward API passes on (zone and region). No gRPC is spoken: the
    checkpoint holds what the pod-resources socket tells.

    When the labels ``trainwarden.io/collect`` or ``trainwarden.io/collect.<source>`` of the node no longer say what they said when the
    agent began, an event ``opt_out`` tells it and the agent ends, so that the next one begins with other sources.
    """

    name: ClassVar[str] = "kubernetes"
    every_ticks: ClassVar[int] = 5
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.kubernetes]``."""

        podinfo: str = option("/etc/podinfo", "directory of the downward API: files `labels` and `node-labels`")
        checkpoint: str = option(
            "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
            "which pod holds which device; under collector.root",
        )
        api: bool = option(True, "ask the API server for this node's labels and pods, where there is a service account")
        node: str = option("", "name of this node in Kubernetes; default: $NODE_NAME, else the collector's")
        timeout_s: float = option(5.0, "an answer of the API server later than this is none")
        every_s: float = option(60.0, "how often all three are read")
        opted_out: list[str] = option(
            [], "sources that a label of the node switched off when the agent began; it fills this in"
        )

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._api = (
            ApiServer.of_pod(settings.timeout_s) if settings.api and context.files.root in ("", "/host") else None
        )
        self._answer: Answer[Cluster] = Answer("kubernetes", context.clock, settings.every_s, self._read)
        self._told = 0
        self._jobs: dict[str, dict[str, str]] = {}
        self.end: Callable[[], None] = end_this_agent
        self._runs = False
        self._present = self._api is not None or os.path.isdir(settings.podinfo) or os.path.exists(self._checkpoint)

    def start(self) -> None:
        self._runs = True  # a single look for a person ends nobody

    @property
    def node(self) -> str:
        """This node's name in Kubernetes."""
        return str(self.settings.node or os.environ.get("NODE_NAME") or self.context.node)

    @property
    def _checkpoint(self) -> str:
        return self.context.files.path(self.settings.checkpoint)

    def sample(self, now_ns: int) -> Sample:
        if not self._present:
            return Sample()
        found = self._answer.refresh() or Cluster()
        if self._answer.count != self._told:
            self._told = self._answer.count
            self._tell_node(found, now_ns)
            self._heed(found)
        self._tell_jobs(found, now_ns)
        reasons = ["hung"] if self._answer.overdue else [self._answer.reason, *found.problems]
        return Sample(gaps=tuple(Gap(self.name, reason) for reason in reasons if reason))

    def explain(self) -> str:
        if not self._present:
            return "no Kubernetes here: no service account, no downward API files, no kubelet checkpoint"
        self._answer.settle(self.settings.timeout_s)
        found = self._answer.last or Cluster()
        wrong = "".join(f"; {sentence}" for sentence in found.problems.values())
        return (
            f"node {self.node}: {chosen(found.labels, NODE_LABELS) or 'no place in its labels'}; {len(found.pods)} pods, "
            + (f"{len(found.devices)} with devices{wrong}")
        )

    def _read(self) -> Cluster:
        problems: dict[str, str] = {}
        labels = {**self._downward(problems)}
        devices = self._devices(problems)
        pods: dict[str, Pod] = {}
        labelled = False
        if self._api is not None:
            try:
                labels |= labels_of_node(self._api.node(self.node))
                labelled = True
                pods = pods_of_list(self._api.pods(self.node))
            except (OSError, ValueError) as error:
                problems["api_permission" if isinstance(error, PermissionError) else "api_unreachable"] = str(error)
        return Cluster(labels, pods, devices, problems, labelled)

    def _downward(self, problems: dict[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in ("labels", "node-labels"):
            path = os.path.join(self.settings.podinfo, name)
            try:
                found |= parse_downward(read_text(path, FILE_BYTES))
            except FileNotFoundError:
                continue  # only what the manifest asks for is there
            except (OSError, ValueError) as error:
                problems["podinfo"] = f"{path}: {error}"
        return found

    def _devices(self, problems: dict[str, str]) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        try:
            return parse_checkpoint(read_text(self._checkpoint, FILE_BYTES))
        except FileNotFoundError:
            return {}
        except OSError as error:
            problems["checkpoint_permission"] = (
                f"{self._checkpoint}: {error.strerror}: mount /var/lib/kubelet/device-plugins read-only"
            )
        except ValueError as error:
            problems["checkpoint_malformed"] = f"{self._checkpoint}: {error}"
        return {}

    def _heed(self, found: Cluster) -> None:
        """Compare the label with what it was when the agent began."""
        from collectors.optout import read_labels, save  # it knows all sources, this one too

        before = sorted(self.settings.opted_out)
        now = sorted(read_labels(found.labels, registry().all()).sources)
        if not (found.labelled and self._runs) or now == before:
            return
        line = f"label {OPT_OUT_LABEL} of this node: off are now {', '.join(now) or 'no sources'}; before: {', '.join(before) or 'none'}"
        attributes = {"off": ",".join(now), "before": ",".join(before)}
        self.context.outlet.log(
            LogEvent(source=self.name, severity="info", code="opt_out", line=line, attributes=attributes), urgent=True
        )
        save(self.context.state_directory, now)
        logger.info("%s: this agent ends, the next one heeds it", line)
        self._runs = False  # said once
        self.end()

    def _tell_node(self, found: Cluster, now_ns: int) -> None:
        facts = self.context.facts
        before = facts.board.merged("node")
        facts.board.tell("node", self.name, "scheduler", chosen(found.labels, NODE_LABELS), now_ns)
        facts.pod_devices = {uid: sum(map(len, by_name.values())) for uid, by_name in found.devices.items()}
        if facts.board.merged("node") != before:
            self.context.outlet.topology_changed()

    def _tell_jobs(self, found: Cluster, now_ns: int) -> None:
        layouts = self.context.ranks.layouts()
        if not layouts and not self._jobs:
            return
        processes = self.context.facts.processes
        processes.want([s for states in layouts.values() for s in states], self.context.files, self.context.clock)
        now: dict[str, dict[str, str]] = {}
        for job, states in layouts.items():
            launches = [
                launch for state in states if (launch := processes.of(state.pid)) is not None and launch.pod_uid
            ]
            pods = {
                launch.pod_uid: found.pods.get(launch.pod_uid) or _named(launch.pod_uid, launch.environment)
                for launch in launches
            }
            now[job] = _joined([_attributes(pod, found) for pod in pods.values()])
        if now != self._jobs:
            for job, attributes in now.items():
                self.context.facts.board.tell(f"job:{job}", self.name, "scheduler", attributes, now_ns)
            self._jobs = now
            self.context.outlet.topology_changed()


def _named(uid: str, environment: Mapping[str, str]) -> Pod:
    """A pod as its own environment describes it; in a pod, the host name is its name."""
    index = environment.get("JOB_COMPLETION_INDEX", "")
    labels = {"batch.kubernetes.io/job-completion-index": index} if index else {}
    return Pod(
        uid,
        environment.get("POD_NAME") or environment.get("HOSTNAME", ""),
        environment.get("POD_NAMESPACE", ""),
        labels,
    )


def _attributes(pod: Pod, found: Cluster) -> dict[str, str]:
    held = [name for names in found.devices.get(pod.uid, {}).values() for name in names]
    return {**pod.attributes(), "k8s_pod_uid": pod.uid, **({"k8s_devices": ",".join(held)} if held else {})}


def _joined(pods: list[dict[str, str]]) -> dict[str, str]:
    """Attributes of the pods of one job on this node: different values side by side."""
    keys = sorted({key for pod in pods for key in pod})
    return {key: " ".join(dict.fromkeys(pod[key] for pod in pods if key in pod)) for key in keys}
