"""Kubernetes' words: labels of nodes and pods, the downward API's files, the kubelet's device checkpoint, and cgroup paths."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collectors.topology.ibnet import FormatError

NODE_LABELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("leaf", ("network.topology.nvidia.com/leaf", "network.topology.kubernetes.io/leaf", "topology.k8s.aws/network-node-layer-3",
              "cloud.google.com/gce-topology-subblock")),
    ("spine", ("network.topology.nvidia.com/spine", "network.topology.kubernetes.io/spine", "topology.k8s.aws/network-node-layer-2",
               "cloud.google.com/gce-topology-block")),
    ("core", ("network.topology.nvidia.com/core", "network.topology.kubernetes.io/core", "network.topology.kubernetes.io/datacenter",
              "topology.k8s.aws/network-node-layer-1")),
    ("block", ("network.topology.nvidia.com/accelerator", "network.topology.kubernetes.io/accelerator", "cloud.provider.com/topology-block",
               "nvidia.com/gpu.clique")),
    ("rack", ("topology.kubernetes.io/rack", "cloud.provider.com/topology-rack")),
    ("zone", ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")),
    ("region", ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")),
    ("instance_type", ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")),
    ("gpu_product", ("nvidia.com/gpu.product",)),
)  # fmt: skip
"""Attribute ← labels, the first that a node has: NVIDIA topograph, AWS, Google, Kueue, and the well-known ones."""

POD_LABELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("k8s_job", ("jobset.sigs.k8s.io/jobset-name", "training.kubeflow.org/job-name", "trainer.kubeflow.org/trainjob-name",
                 "volcano.sh/job-name", "ray.io/cluster", "leaderworkerset.sigs.k8s.io/name", "batch.kubernetes.io/job-name", "job-name")),
    ("k8s_role", ("jobset.sigs.k8s.io/replicatedjob-name", "training.kubeflow.org/replica-type", "volcano.sh/task-spec",
                  "ray.io/node-type")),
    ("k8s_index", ("jobset.sigs.k8s.io/job-index", "training.kubeflow.org/replica-index", "volcano.sh/task-index",
                   "leaderworkerset.sigs.k8s.io/worker-index", "batch.kubernetes.io/job-completion-index")),
    ("k8s_restart", ("jobset.sigs.k8s.io/restart-attempt",)),
    ("k8s_queue", ("kueue.x-k8s.io/queue-name",)),
)  # fmt: skip

OPT_OUT_LABEL = "trainwarden.io/collect"
"""A node labelled ``trainwarden.io/collect=off`` is left alone, by the DaemonSet and by an agent that runs there all the same."""

POD_OF_CGROUP = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
)
LABEL_LINE = re.compile(r'([A-Za-z0-9._/-]{1,320})="((?:[^"\\]|\\.)*)"')
MAX_PODS = 1000
IMAGES_CHARS = 500


@dataclass(frozen=True)
class Pod:
    """A pod on this node."""

    uid: str
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] | None = None
    image: str = ""

    def attributes(self) -> dict[str, str]:
        """What the job's topology event says of it."""
        place = {"k8s_namespace": self.namespace, "k8s_pod": self.name, "k8s_image": self.image}
        return {**{key: value for key, value in place.items() if value}, **chosen(self.labels or {}, POD_LABELS)}


def chosen(labels: Mapping[str, str], table: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, str]:
    """Attributes of `table` that `labels` hold.

    Examples
    --------
    >>> chosen({"topology.kubernetes.io/zone": "eu-1a", "app": "x"}, NODE_LABELS)
    {'zone': 'eu-1a'}
    """
    found = {key: next((labels[name] for name in names if labels.get(name)), "") for key, names in table}
    return {key: value for key, value in found.items() if value}


def parse_downward(text: str) -> dict[str, str]:
    """Labels or annotations as the downward API writes them: one ``key="quoted value"`` a line.

    Examples
    --------
    >>> parse_downward('app="web"\\ntopology.kubernetes.io/zone="eu \\\\"1\\\\""\\n')
    {'app': 'web', 'topology.kubernetes.io/zone': 'eu "1"'}
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = LABEL_LINE.fullmatch(line.strip())
        if match:
            found[match.group(1)] = match.group(2).replace('\\"', '"').replace("\\\\", "\\")
    return found


def pod_of_cgroup(text: str) -> str:
    """UID of the pod in ``/proc/<pid>/cgroup``, of either cgroup driver and version; empty outside pods."""
    match = POD_OF_CGROUP.search(text)
    return match.group(1).replace("_", "-") if match else ""


def parse_checkpoint(text: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Devices by pod UID and resource, from ``kubelet_internal_checkpoint``. Raises `FormatError`.

    ``DeviceIDs`` is a list in kubelets before 1.20 and a table by NUMA node since.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({error}): expected the kubelet's device checkpoint") from None
    data = document.get("Data") if isinstance(document, dict) else None
    entries = data.get("PodDeviceEntries") if isinstance(data, dict) else None
    if entries is None and isinstance(data, dict):
        return {}
    if not isinstance(entries, list):
        raise FormatError("no list Data.PodDeviceEntries: expected the kubelet's device checkpoint")
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for entry in entries:
        if (
            isinstance(entry, dict)
            and isinstance(entry.get("PodUID"), str)
            and isinstance(entry.get("ResourceName"), str)
        ):
            of_pod = found.setdefault(entry["PodUID"], {})
            of_pod[entry["ResourceName"]] = (
                *of_pod.get(entry["ResourceName"], ()),
                *_device_ids(entry.get("DeviceIDs")),
            )
    return dict(list(found.items())[:MAX_PODS])


def _device_ids(node: Any) -> tuple[str, ...]:
    if isinstance(node, dict):
        return tuple(name for names in node.values() for name in _device_ids(names))
    return tuple(name for name in node if isinstance(name, str)) if isinstance(node, list) else ()


def labels_of_node(document: Any) -> dict[str, str]:
    """Labels in the API server's answer about a node. Raises `FormatError` when it is none."""
    return _labels(document, "Node")


def pods_of_list(document: Any) -> dict[str, Pod]:
    """Pods by UID in the API server's answer about this node's pods. Raises `FormatError` when it is none."""
    items = document.get("items") if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise FormatError("no list 'items': expected the API server's PodList")
    found: dict[str, Pod] = {}
    for item in items[:MAX_PODS]:
        meta = item.get("metadata") if isinstance(item, dict) else None
        if isinstance(meta, dict) and isinstance(meta.get("uid"), str):
            # a static pod is known to the kubelet's cgroups by the hash of its file
            mirror = _text_table(meta.get("annotations")).get("kubernetes.io/config.mirror", "")
            uid = mirror or meta["uid"]
            found[uid] = Pod(
                uid,
                str(meta.get("name", "")),
                str(meta.get("namespace", "")),
                _text_table(meta.get("labels")),
                images_of(item),
            )
    return found


def images_of(pod: Mapping[str, Any]) -> str:
    """Images of a pod's containers as they were asked for, with the digest that runs: a tag may be moved.

    Examples
    --------
    >>> images_of({"spec": {"containers": [{"name": "t", "image": "train:1.4"}]},
    ...            "status": {"containerStatuses": [{"name": "t", "imageID": "docker.io/train@sha256:0123456789abcdef"}]}})
    'train:1.4@sha256:0123456789ab'
    """
    digests = {
        str(status.get("name")): str(status.get("imageID", "")).rpartition("@sha256:")[2][:12]
        for status in _tables(pod.get("status"), "containerStatuses")
        if "@sha256:" in str(status.get("imageID", ""))
    }
    found = []
    for container in _tables(pod.get("spec"), "containers"):
        if isinstance(image := container.get("image"), str) and image:
            digest = digests.get(str(container.get("name")), "")
            found.append(f"{image}@sha256:{digest}" if digest and "@sha256:" not in image else image)
    return " ".join(sorted(dict.fromkeys(found)))[:IMAGES_CHARS]


def _tables(node: Any, key: str) -> list[dict[str, Any]]:
    entries = node.get(key) if isinstance(node, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _labels(document: Any, kind: str) -> dict[str, str]:
    meta = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(meta, dict):
        raise FormatError(f"no table 'metadata': expected the API server's {kind}")
    return _text_table(meta.get("labels"))


def _text_table(node: Any) -> dict[str, str]:
    return {key: value for key, value in node.items() if isinstance(value, str)} if isinstance(node, dict) else {}
