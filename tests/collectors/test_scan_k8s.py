"""The DaemonSet against the table in docs/collectors.md, the real configuration and the real command line."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from collectors.agent import build_sources, source_tables
from collectors.base import registry
from collectors.topology.kubernetes import OPT_OUT_LABEL
from tests.collectors.kit import bench
from trainwarden.cli import COMMANDS
from trainwarden.config import Config, from_table

ROOT = Path(__file__).parents[2]
K8S = ROOT / "compose" / "k8s"
OBJECTS: dict[str, dict[str, Any]] = {
    document["kind"]: document for document in yaml.safe_load_all((K8S / "collector.yaml").read_text(encoding="utf-8"))
}
POD: dict[str, Any] = OBJECTS["DaemonSet"]["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]
OF_THE_AGENT = {"/etc/trainwarden", "/var/lib/trainwarden", "/tmp"}
WRITTEN = {"/run/trainwarden", "/var/lib/trainwarden", "/tmp"}


def table() -> dict[str, dict[str, set[str]]]:
    """What each source needs, by the rows of the page."""
    page = (ROOT / "docs" / "collectors.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, set[str]]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"`\w+`", cells[0]):
            needs = {"state": {cells[1]}, "mounts": ticked(cells[2]), "capabilities": ticked(cells[3])}
            found[cells[0].strip("`")] = {**needs, "namespaces": set(cells[4].split()) - {"-"}}
    return found


def ticked(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def needed(what: str) -> set[str]:
    """Union over the sources that are on."""
    return {need for row in table().values() if row["state"] == {"on"} for need in row[what]}


def config() -> Config:
    return from_table(tomllib.loads(OBJECTS["ConfigMap"]["data"]["trainwarden.toml"]))


def test_every_source_has_a_row_and_no_row_is_of_something_else() -> None:
    assert set(table()) == set(registry().all())


def test_mounts_are_those_that_the_sources_need_and_no_more() -> None:
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in CONTAINER["volumeMounts"]}
    assert set(mounts) == needed("mounts") | OF_THE_AGENT
    assert {path for path, read_only in mounts.items() if not read_only} == WRITTEN
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    host_paths = {volume["hostPath"]["path"] for volume in volumes.values() if "hostPath" in volume}
    assert not {path for path in host_paths if path in ("/", "/proc", "/sys", "/dev", "/etc", "/var")}


def test_privileges_are_those_that_the_sources_need_and_no_more() -> None:
    security = CONTAINER["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": security["capabilities"]["add"]}
    assert set(security["capabilities"]["add"]) == needed("capabilities")
    assert (security["privileged"], security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (
        False,
        False,
        True,
    )
    assert {name for name in ("hostPID", "hostNetwork", "hostIPC") if POD.get(name)} == needed("namespaces")
    rules = [(rule["resources"], rule["verbs"]) for rule in OBJECTS["ClusterRole"]["rules"]]
    assert rules == [(["nodes"], ["get"]), (["pods"], ["list"])]


def test_the_configuration_is_real_and_switches_off_what_the_table_says(tmp_path: Path) -> None:
    chosen = config()
    off = {name for name, row in table().items() if row["state"] == {"off"}}
    assert {name for name, keys in chosen.collector.sources.items() if keys.get("enabled") is False} == off
    # every key is one of its source's settings, else this raises
    sources = build_sources(source_tables(chosen, "n0", tmp_path / "hook.sock"), bench(tmp_path).context)
    assert {source.name for source in sources} == set(registry().all()) - off
    paths = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert {str(chosen.collector.socket and chosen.collector.socket.parent), str(chosen.run_dir)} <= paths


def test_the_command_line_is_real_and_names_the_configuration_and_the_node() -> None:
    subcommand, *arguments = CONTAINER["args"]
    command = typer.main.get_command(importlib.import_module(COMMANDS[subcommand][0]).app)
    params = command.make_context("trainwarden collect", list(arguments)).params
    assert params["config"] == Path("/etc/trainwarden/trainwarden.toml")
    assert params["node"] == "$(NODE_NAME)"
    assert CONTAINER["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_probes_limits_tolerations_and_the_label_that_leaves_a_node_alone() -> None:
    port = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}["metrics"]
    assert config().collector.metrics_listen.endswith(f":{port}")
    assert CONTAINER["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert CONTAINER["resources"]["limits"].keys() == {"memory"}
    assert POD["tolerations"] == [{"operator": "Exists"}]
    [term] = POD["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": OPT_OUT_LABEL, "operator": "NotIn", "values": ["off"]} in term["matchExpressions"]


@pytest.mark.parametrize("name", ["nvidia.yaml", "kernel-log.yaml", "rdma.yaml"])
def test_patches_are_of_this_daemonset(name: str) -> None:
    [patch] = yaml.safe_load_all((K8S / name).read_text(encoding="utf-8"))
    assert patch["metadata"] == {"name": "collector", "namespace": OBJECTS["DaemonSet"]["metadata"]["namespace"]}
    assert patch["spec"]["template"]["spec"]["containers"][0]["name"] == CONTAINER["name"]
    assert f"path: {name}" in (K8S / "kustomization.yaml").read_text(encoding="utf-8")
