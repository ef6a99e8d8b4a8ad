"""One cluster for all tests of this package: starting it is what costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.theatre import Theatre, theatre


@pytest.fixture(scope="package")
def stage(kafka_runtime: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    """The running cluster; tests take `play`."""
    with theatre(tmp_path_factory.mktemp("f", numbered=True)) as made:
        yield made


@pytest.fixture
def play(stage: Theatre) -> Theatre:
    """The cluster with everything up, in training, and nothing wrong."""
    stage.ready()
    return stage
