"""The compose file against the real command line, the real configuration and the image file: nothing in it may be a guess."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from trainwarden import config as configuration

COMPOSE = Path(__file__).parents[2] / "compose"
FILE: dict[str, Any] = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Container path to host path or volume."""
    pairs = (entry.split(":") for entry in service.get("volumes", []))
    return {parts[1]: parts[0] for parts in pairs}


def option(service: dict[str, Any], name: str) -> str:
    command: list[str] = service["command"]
    return command[command.index(name) + 1]


def config_of(service: dict[str, Any]) -> configuration.Config:
    inside = option(service, "--config")
    return configuration.load(COMPOSE / mounts(service)[inside], environment={})


def test_every_part_of_ours_has_a_service() -> None:
    assert set(OURS) == {"topics", "collector", "worker", "store", "actions"}


@pytest.mark.parametrize("name", sorted(OURS))
def test_command_lines_parse_with_the_real_command_line(name: str) -> None:
    from trainwarden.cli import COMMANDS

    subcommand, *arguments = OURS[name]["command"]
    module = importlib.import_module(COMMANDS[subcommand][0])
    command = typer.main.get_command(module.app)
    context = command.make_context(f"trainwarden {subcommand}", list(arguments))
    assert context.params["config"] == Path(option(OURS[name], "--config"))


@pytest.mark.parametrize("name", sorted(OURS))
def test_configurations_load_and_name_services_that_exist(name: str) -> None:
    config = config_of(OURS[name])
    kafka = urlsplit(config.kafka.url)
    if OURS[name].get("network_mode") == "host":
        assert f"127.0.0.1:{kafka.port}:{kafka.port}" in SERVICES["kafka"]["ports"]
    else:
        assert kafka.hostname in SERVICES
    advertised = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert f"://{kafka.hostname}:{kafka.port}" in advertised


def test_the_stores_address_fits_the_clickhouse_service() -> None:
    store = urlsplit(config_of(OURS["store"]).store.url)
    given = SERVICES[str(store.hostname)]["environment"]
    assert (store.username, store.password) == (given["CLICKHOUSE_USER"], given["CLICKHOUSE_PASSWORD"])
    assert store.path == f"/{given['CLICKHOUSE_DB']}"
    source = yaml.safe_load((COMPOSE / "grafana" / "datasources" / "clickhouse.yaml").read_text())["datasources"][0]
    assert (source["jsonData"]["username"], source["secureJsonData"]["password"]) == (store.username, store.password)
    assert source["jsonData"]["host"] in SERVICES


def test_run_directories_are_volumes_that_survive() -> None:
    for name in ("collector", "worker", "actions"):
        volume = mounts(OURS[name])[str(config_of(OURS[name]).run_dir)]
        assert volume in FILE["volumes"]


def test_the_collector_has_the_hosts_root_and_the_hooks_folder() -> None:
    config = config_of(OURS["collector"])
    assert mounts(OURS["collector"])[str(config.collector.root)] == "/"
    assert option(OURS["collector"], "--root") == str(config.collector.root)
    assert config.collector.socket is not None
    assert str(config.collector.socket.parent) in mounts(OURS["collector"])


def test_the_status_page_is_published_on_loopback_where_it_listens() -> None:
    port = config_of(OURS["actions"]).actions.listen.rpartition(":")[2]
    assert OURS["actions"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_nothing_is_published_beyond_loopback() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_dependencies_and_volumes_exist() -> None:
    for service in SERVICES.values():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in SERVICES
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[needed]
        named = {source for source in mounts(service).values() if re.fullmatch(r"\w+", source)}
        assert named <= set(FILE["volumes"])


def test_bind_mounts_of_files_exist() -> None:
    for service in SERVICES.values():
        for source in mounts(service).values():
            if source.startswith("./"):
                assert (COMPOSE / source).exists(), source


def test_images_are_pinned_and_kafka_is_the_one_that_is_tested() -> None:
    images = [service["image"] for service in SERVICES.values() if "image" in service]
    assert all(re.search(r":\d+\.\d+", image) for image in images)
    tested = re.search(r"<kafka.version>(.*)</kafka.version>", (COMPOSE / "kafka" / "pom.xml").read_text())
    assert tested is not None
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{tested.group(1)}"


def test_the_image_file_has_a_stage_for_each_process_and_copies_every_package() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM (?:base|debian:\S+) AS (\w+)$", text, re.MULTILINE))
    assert {service["build"]["target"] for service in OURS.values()} == stages
    import tomllib

    project = tomllib.loads((COMPOSE.parent / "pyproject.toml").read_text())
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"COPY {package} {package}\n" in text
    extras = project["project"]["optional-dependencies"]
    for named in re.findall(r'"/src\[(.*?)\]"', text):
        assert set(named.split(",")) <= set(extras)
