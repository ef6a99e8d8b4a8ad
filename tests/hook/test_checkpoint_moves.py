"""Copying, checksums, limits: overlapped saves equal blocking ones, and nothing wrong passes for right."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trainwarden_hook import segments
from trainwarden_hook.checkpoint import Saver, SaveReport
from trainwarden_hook.crew import BLOCK_BYTES, Job, load
from trainwarden_hook.layout import stable_paths
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.offers import look
from trainwarden_hook.pace import Pace
from trainwarden_hook.ring import partners
from trainwarden_hook.saving_options import SavingOptions
from trainwarden_hook.sums import checksum

NOISE = random.Random(7).randbytes(3 * BLOCK_BYTES + 77)


# -- checksums


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(NOISE) - 1), st.integers(1, 255))
def test_any_changed_byte_changes_the_checksum(at: int, flip: int) -> None:
    spoilt = bytearray(NOISE)
    spoilt[at] ^= flip
    assert checksum(memoryview(spoilt)) != checksum(memoryview(bytearray(NOISE)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2 * BLOCK_BYTES), st.integers(1, 8192), st.sampled_from([0, 0xFF]))
@example(13379, 1, 0)
def test_a_page_that_is_blank_or_moved_changes_the_checksum(at: int, size: int, fill: int) -> None:
    """Unless it is what it was: a single byte of noise may be blank already."""
    spoilt, moved, whole = bytearray(NOISE), bytearray(NOISE), checksum(memoryview(bytearray(NOISE)))
    spoilt[at : at + size] = bytes([fill]) * size
    moved[at : at + size] = NOISE[at + 8192 : at + 8192 + size]
    assert (checksum(memoryview(spoilt)) == whole) == (spoilt == NOISE)
    assert (checksum(memoryview(moved)) == whole) == (moved == NOISE)


@pytest.mark.parametrize("cut", [BLOCK_BYTES, 2 * BLOCK_BYTES])
def test_a_checksum_is_continued_over_whole_blocks(cut: int) -> None:
    whole = memoryview(bytearray(NOISE))
    assert checksum(whole[cut:], checksum(whole[:cut])) == checksum(whole)
    assert checksum(whole[:100]) != checksum(whole[:101])


# -- overlapped saves


class Trained:
    """A small model whose saves are all copied beside the next step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.job = f"t{uuid.uuid4().hex[:8]}"
        self.reports: list[SaveReport] = []
        self.buffers = Buffers(self.job, "n0", 0)
        stable = stable_paths(self.model, self.optimizer)
        stamp = Stamp(1, 0, 0, 5)
        self.saver = Saver(self.buffers, None, stamp, self.reports.append, stable=stable, overlap_from_bytes=0)
        self.optimizer.register_step_pre_hook(lambda *_: self.saver.before_change())
        self.step()

    def gradients(self) -> None:
        self.model(torch.randn(8, 40)).square().mean().backward()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step: int, at_once: bool) -> None:
        assert self.saver.save(step, self.state(), must=at_once) is None

    def settled(self) -> bytes:
        """Bytes of the newest save once it is sealed."""
        assert self.saver.wait_idle(60)
        best = look(Buffers(self.job, "n0", 0), None, 5, None).best()
        return b"" if best is None else bytes(best.payload)


@pytest.fixture
def trained() -> Iterator[Trained]:
    made = Trained()
    yield made
    made.saver.close()
    segments.unlink_all(made.job, "n0")


@pytest.mark.parametrize("with_crew", [True, False])
def test_an_overlapped_save_equals_one_at_once_though_training_goes_on(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, with_crew: bool
) -> None:
    if with_crew:
        assert load() is not None, "the machine of this test has no C compiler"
    else:
        monkeypatch.setattr("trainwarden_hook.copying.ready", lambda: None)
    for step in range(0, 20, 2):
        trained.save(step, at_once=True)
        expected = trained.settled()
        trained.save(step + 1, at_once=False)
        trained.step()
        assert trained.settled() == expected


def test_what_the_forward_pass_changes_is_copied_before_it(trained: Trained) -> None:
    """Running statistics change before the optimizer's step: they are not left for later."""
    stable = stable_paths(trained.model, trained.optimizer)
    names = {name for name, value in trained.model.state_dict().items() if stable(f"state.model.{name}", value)}
    assert names == {name for name, _ in trained.model.named_parameters()}


@pytest.mark.parametrize("with_crew", [True, False])
def test_a_change_before_the_copy_is_complete_is_found_and_the_save_refused(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, with_crew: bool
) -> None:
    trained.save(1, at_once=True)
    trained.settled()
    whole_copy = Job.wait

    def late(*given: object, **more: object) -> bool:
        del more
        with torch.no_grad():
            next(trained.model.parameters()).add_(1)
        if given and isinstance(given[0], Job):
            whole_copy(given[0])
        return True

    if with_crew:
        assert load() is not None, "the machine of this test has no C compiler"
        monkeypatch.setattr(Job, "wait", late)
    else:
        monkeypatch.setattr("trainwarden_hook.copying.ready", lambda: None)
        monkeypatch.setattr("trainwarden_hook.copying.copy_piece", late)
    trained.save(2, at_once=False)
    trained.saver.before_change()
    assert trained.saver.wait_idle(60)
    assert trained.reports[-1].error.endswith("was changed before its copy was complete")
    best = look(Buffers(trained.job, "n0", 0), None, 5, None).best()
    assert best is not None
    assert best.header.step == 1
    monkeypatch.undo()
    trained.save(3, at_once=False)
    assert trained.saver._overlap is None, "such a script's saves are copied at once from then on"


# -- limits, settings, partners


def test_a_limit_holds_on_average_and_idle_time_is_not_saved_up() -> None:
    now = [0.0]
    pace = Pace(100.0, now=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    for _ in range(10):
        pace.spend(50)
    assert now[0] == pytest.approx(5.0)
    now[0] = 100.0
    pace.spend(50)
    assert now[0] == pytest.approx(100.5)


def test_settings_that_are_no_numbers_are_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    options = SavingOptions.read({"TRAINWARDEN_SAVE_KEEP": "many", "TRAINWARDEN_SAVE_DISK_MB_PER_S": "2.5"})
    assert (options.keep, options.disk_bytes_per_s) == (3, 2.5e6)
    assert "TRAINWARDEN_SAVE_KEEP is 'many'" in caplog.text
    assert SavingOptions.read({"TRAINWARDEN_SAVE_OVERLAP_FROM_MB": "-1"}).overlap_from_bytes is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=24))
def test_each_node_keeps_for_one_other_in_another_rack_where_racks_allow(racks: list[str]) -> None:
    nodes = {f"n{number}": rack for number, rack in enumerate(racks)}
    found = partners(nodes)
    if len(nodes) < 2:
        assert found == {}
        return
    assert sorted(found) == sorted(nodes) == sorted(found.values())
    assert all(node != partner for node, partner in found.items())
    if max(racks.count(rack) for rack in racks) * 2 <= len(racks):
        assert all(nodes[node] != nodes[partner] for node, partner in found.items())
