"""The relation model: its file format, its card, serving as trained, and going on after an interruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectors.simulated.spec import VERSION
from models import tensors
from models.relation import form, weights
from trainwarden.errors import UsageError

torch = pytest.importorskip("torch", reason="the gnn extra is not installed")


def table(rows: int, seed: int) -> Any:
    from models.relation.net import Table

    stream = np.random.default_rng(seed)
    given = stream.standard_normal((rows, form.INPUTS)).astype(np.float32)
    base = stream.standard_normal((rows, form.CHANNELS)).astype(np.float32)
    target = (
        base + 0.5 * given[:, : form.CHANNELS] + 0.1 * stream.standard_normal((rows, form.CHANNELS)).astype(np.float32)
    )
    return Table(given, base, target.astype(np.float32))


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    kept = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5]),
        "c": np.array([3, 4], dtype=np.int64),
    }
    tensors.write(tmp_path / "x.safetensors", kept, {"model": "x"})
    found = tensors.read(tmp_path / "x.safetensors")
    assert found.keys() == kept.keys()
    assert all(np.array_equal(found[name], kept[name]) and found[name].dtype == kept[name].dtype for name in kept)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x08\0\0\0\0\0\0\0{}", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x10\0\0\0\0\0\0\0" + b'{"a":{"dtype":1}'],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(payload)
    with pytest.raises(UsageError, match=r"x\.safetensors: .*trainwarden train"):
        weights.load(tmp_path / "x.safetensors")


def test_a_file_cut_short_is_told(tmp_path: Path) -> None:
    whole = weights.SHIPPED.read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:-8])
    with pytest.raises(UsageError, match="cut short"):
        weights.load(tmp_path / "x.safetensors")


def test_what_is_shipped_serves_medians_and_is_small() -> None:
    trained = weights.load()
    assert trained.served is None
    assert weights.SHIPPED.stat().st_size < 20_000
    assert set(trained.prices) == set(weights.PRICED)


def test_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    shutil.copy(weights.SHIPPED, tmp_path / "x.safetensors")
    card = json.loads(weights.SHIPPED.with_suffix(".json").read_text())
    (tmp_path / "x.json").write_text(json.dumps(card | {"version": 99}))
    with pytest.raises(UsageError, match="version 99 found, this code needs"):
        weights.load(tmp_path / "x.safetensors")


def test_the_card_names_the_simulator_that_it_was_trained_on() -> None:
    assert weights.load().card["simulator_version"] == VERSION, "train again: the simulator has another version now"


def test_what_is_served_is_what_was_trained() -> None:
    from models.relation.net import Plan, train

    net = train(table(600, 1), table(100, 2), Plan(epochs=2, batch=128), None, lambda progress: None)
    sample = table(50, 3)
    with torch.no_grad():
        middle, scale = net(torch.from_numpy(sample.given), torch.from_numpy(sample.base))
    served = form.Served.of(net.served()).expect(sample.given, sample.base)
    assert served[0] == pytest.approx(middle.numpy(), abs=1e-4)
    assert served[1] == pytest.approx(np.exp(scale.numpy()), rel=1e-4)


def test_it_learns_what_is_there_to_learn() -> None:
    from models.relation.net import Plan, train

    losses: list[float] = []
    net = train(
        table(4000, 1), table(500, 2), Plan(epochs=6, batch=256, rate=1e-2), None, lambda p: losses.append(p.held_out)
    )
    assert losses[-1] < losses[0] - 0.5
    own = np.diag(net.served()["linear"][:, : form.CHANNELS])
    assert own == pytest.approx(np.full(form.CHANNELS, 0.5), abs=0.1)


def test_an_interrupted_training_ends_like_one_that_was_not(tmp_path: Path) -> None:
    from models.relation.net import Plan, Progress, train

    class Interrupted(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.epoch == 1:
            raise Interrupted

    plan, given, held = Plan(epochs=3, batch=256), table(1000, 1), table(100, 2)
    whole = train(given, held, plan, None, lambda progress: None)
    with pytest.raises(Interrupted):
        train(given, held, plan, tmp_path / "c.pt", stop)
    epochs: list[int] = []
    resumed = train(given, held, plan, tmp_path / "c.pt", lambda progress: epochs.append(progress.epoch))
    assert epochs == [0, 1, 2], "the first is where it stood"
    assert all(np.array_equal(resumed.served()[name], value) for name, value in whole.served().items())


def test_no_value_of_one_channel_moves_the_expectation_of_another() -> None:
    from models.relation.net import Plan, train

    net = train(table(600, 1), table(100, 2), Plan(epochs=2, batch=128), None, lambda progress: None)
    served = form.Served.of(net.served())
    calm = np.zeros((1, form.INPUTS), dtype=np.float32)
    odd = calm.copy()
    odd[0, form.block("dp").start + 5] = 1000.0
    moved = served.expect(odd, calm[:, : form.CHANNELS])[0] - served.expect(calm, calm[:, : form.CHANNELS])[0]
    assert np.abs(np.delete(moved, 5)).max() == 0.0
