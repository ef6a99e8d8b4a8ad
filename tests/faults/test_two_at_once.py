"""Two demonstrations on one machine do not meet: ports, addresses, shared memory and names are of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.processes import start
from tests.faults.theatre import SEEDS
from trainwarden.demo.network import Loopback, Namespaces
from trainwarden.demo.seat import take_seat


def test_each_takes_a_seat_of_its_own() -> None:
    first, second = Loopback(), Namespaces()
    try:
        assert not set(first.seat.ports) & set(second.seat.ports)
        assert max(first.seat.ports) < 32768, "above it any connection may have the port already"
        other = Loopback()
        assert len({net.seat.number for net in (first, second, other)}) == 3
        assert len({net.management_address(0) for net in (first, second, other)}) == 3
        other.down()
    finally:
        first.down()
        second.down()


def test_a_seat_is_free_again_when_it_is_left() -> None:
    seat = take_seat(5)
    number = seat.number
    seat.leave()
    again = take_seat(5)
    again.leave()
    assert again.number <= number


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not SEEDS, reason="two whole demonstrations: with TRAINWARDEN_FAULT_SEEDS")
def test_two_demonstrations_at_once_both_heal(tmp_path: Path) -> None:
    running = []
    for fault in ("kill", "freeze"):
        command = [
            sys.executable,
            "-m",
            "trainwarden.cli",
            "demo",
            "--fault",
            fault,
            "--directory",
            str(tmp_path / fault),
        ]
        running.append(start(command, tmp_path / f"{fault}.txt", tmp_path))
    try:
        codes = [started.ends(500) for started in running]
        assert codes == [0, 0], "\n".join(started.text() for started in running)
        assert not any(started.left() for started in running)
    finally:
        for started in running:
            started.kill_all()
