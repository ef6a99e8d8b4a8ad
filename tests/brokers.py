"""Fixtures that give a test a broker: Tansu always, Apache Kafka where Java and its artifacts can be had."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from trainwarden.embedded.kafka import ApacheKafka, fetch_kafka
from trainwarden.embedded.tansu import TansuBroker
from trainwarden.errors import UnavailableError

REQUIRE_ENV = "TRAINWARDEN_REQUIRE_KAFKA"


@pytest.fixture(scope="session")
def tansu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TansuBroker]:
    """A Tansu broker for the whole session; use topics and groups of your own."""
    with TansuBroker(tmp_path_factory.mktemp("tansu") / "tansu.log") as broker:
        yield broker


@pytest.fixture(scope="session")
def kafka_runtime() -> None:
    """Java and Kafka's artifacts, or a skip with the reason; a failure where Kafka is required."""
    try:
        fetch_kafka()
    except UnavailableError as error:
        if os.environ.get(REQUIRE_ENV) == "1":
            pytest.fail(f"{REQUIRE_ENV}=1, but Apache Kafka cannot be had: {error}")
        pytest.skip(f"Apache Kafka cannot be had: {error}")


@pytest.fixture(scope="session")
def kafka(kafka_runtime: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """An Apache Kafka node for the whole session; do not stop it, use topics and groups of your own."""
    with ApacheKafka(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker
