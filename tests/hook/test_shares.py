"""Shares of the global batch: the gradient is the same whoever computes what, and a change is for all or for none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from trainwarden_hook.job import Job, sync_switch
from trainwarden_hook.mailbox import Mailbox
from trainwarden_hook.shares import GO_WITHIN_S, Shares, cut, even, size_of
from trainwarden_hook.sharing import change


class Board:
    """A notice board in memory; what is written while `lost` is lost."""

    def __init__(self) -> None:
        self.notices: dict[str, str] = {}
        self.lost = False

    def put(self, key: str, text: str) -> None:
        if self.lost:
            raise RuntimeError("the store is gone")
        self.notices[key] = text

    def look(self, key: str) -> str | None:
        if self.lost:
            raise RuntimeError("the store is gone")
        return self.notices.get(key)


class Ranks:
    """Several ranks in this process, in step."""

    def __init__(self, world: int, total: int) -> None:
        self.board = Board()
        self.now_s = 0.0
        self.all = [Shares(rank, world, lambda: self.board, lambda: self.now_s) for rank in range(world)]
        for shares in self.all:
            shares.declare(total)

    def prepare(self, key: str, counts: list[int]) -> list[dict[str, Any]]:
        return [shares.handle({"phase": "prepare", "id": key, "shares": counts}) for shares in self.all]

    def go(self, key: str) -> dict[str, Any]:
        return self.all[0].handle({"phase": "go", "id": key, "deadline_ms": 0})

    def begin(self, step: int) -> list[int]:
        for shares in self.all:
            shares.boundary(step)
        return [shares.mine for shares in self.all]


class TestDivision:
    def test_every_sample_is_computed_once_and_as_evenly_as_can_be(self) -> None:
        assert even(32, 4) == (8, 8, 8, 8)
        assert even(10, 4) == (3, 3, 2, 2)
        ranks = Ranks(3, 7)
        parts = [part for shares in ranks.all for part in shares.take(list(range(23)), 7, lambda on: None)]
        assert [sample for part in parts for sample in part] == list(range(23))

    def test_batches_of_any_form_are_cut(self) -> None:
        x = torch.arange(6)
        assert size_of({"x": x, "y": [1] * 6}) == 6
        assert cut((x, {"y": x}), 2, 4)[1]["y"].tolist() == [2, 3]
        assert [part.tolist() for part in cut([x, x], 0, 1)] == [[0], [0]]

    def test_an_iterator_gives_as_many_as_the_share(self) -> None:
        shares = Shares(1, 2, Board)
        shares.declare(5)
        source = iter(range(100))
        assert list(shares.take(source, 5, lambda on: None)) == [0, 1]
        assert next(source) == 2

    @pytest.mark.parametrize(("total", "message"), [(3, "every rank needs one"), (9, "the number is fixed")])
    def test_a_number_that_cannot_be_meant(self, total: int, message: str) -> None:
        shares = Shares(0, 4, Board)
        shares.declare(8)
        with pytest.raises(ValueError, match=message):
            shares.declare(total)

    def test_gradients_are_exchanged_in_the_last_micro_batch_only_and_always_after_it(self) -> None:
        class Model:
            require_backward_grad_sync = True

        model, shares = Model(), Shares(0, 2, Board)
        seen = [model.require_backward_grad_sync for _ in shares.take(list(range(6)), 6, sync_switch(model))]
        assert seen == [False, False, True]
        for _ in shares.take(list(range(6)), 6, sync_switch(model)):
            break
        assert model.require_backward_grad_sync


def gradient(counts: tuple[int, ...], batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What DDP's averaging makes of the ranks' gradients, and the sum of their losses."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)).double()
    total, loss = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64), 0.0
    for rank in range(len(counts)):
        job = Job()
        job.division = Shares(rank, len(counts), Board)
        job.division.declare(sum(counts))
        job.division.counts = counts
        model.zero_grad()
        for x, y in job.shares(batch, sum(counts)):
            loss += job.backward(((model(x) - y) ** 2).mean()).item()
        total += torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / len(counts)
    return total, loss


@pytest.mark.parametrize("samples", [128, 131])
def test_the_averaged_gradient_is_that_of_the_global_batch_to_twelve_digits(samples: int) -> None:
    batch = (torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 2, dtype=torch.float64))
    balanced, loss = gradient((8, 8, 8, 8), batch)
    for counts in ((9, 9, 5, 9), (1, 29, 1, 1)):
        other, other_loss = gradient(counts, batch)
        assert torch.linalg.vector_norm(other - balanced) <= 1e-12 * torch.linalg.vector_norm(balanced)
        assert abs(other_loss - loss) <= 1e-12 * loss


class TestChange:
    def test_it_is_made_on_one_step_two_ahead_of_rank_0(self) -> None:
        ranks = Ranks(4, 32)
        ranks.begin(10)
        assert all(answer["prepared"] for answer in ranks.prepare("a", [9, 9, 5, 9]))
        assert ranks.begin(11) == [8, 8, 8, 8], "nobody has said go"
        ranks.go("a")
        assert ranks.begin(12) == [8, 8, 8, 8]
        assert ranks.go("a") == {"at": 14}, "told again, it is the same answer"
        assert ranks.begin(13) == [8, 8, 8, 8]
        assert ranks.begin(14) == [9, 9, 5, 9]
        assert {shares.applied for shares in ranks.all} == {"a"}
        assert not any(shares.late for shares in ranks.all)

    def test_a_rank_that_runs_ahead_of_rank_0_as_far_as_it_can_is_in_time(self) -> None:
        ranks = Ranks(2, 8)
        ranks.prepare("a", [3, 5])
        ranks.all[1].boundary(6)
        ranks.go("a")
        ranks.all[0].boundary(5)
        ranks.all[1].boundary(7)
        ranks.all[0].boundary(6)
        ranks.all[0].boundary(7)
        assert [shares.mine for shares in ranks.all] == [3, 5]

    def test_without_go_it_is_called_off_for_all(self) -> None:
        ranks = Ranks(2, 8)
        ranks.prepare("a", [3, 5])
        ranks.now_s += GO_WITHIN_S + 1
        ranks.begin(5)
        assert [shares.pending for shares in ranks.all] == [None, None]
        assert "nobody said go" in ranks.go("a")["error"]
        assert ranks.begin(9) == [4, 4]
        assert all(answer["prepared"] for answer in ranks.prepare("b", [5, 3]))

    def test_it_can_be_called_off_before_go_and_not_after(self) -> None:
        ranks = Ranks(2, 8)
        ranks.prepare("a", [3, 5])
        assert ranks.all[0].handle({"phase": "void", "id": "a"}) == {"voided": True}
        ranks.begin(5)
        assert [shares.pending for shares in ranks.all] == [None, None]
        ranks.prepare("b", [3, 5])
        ranks.go("b")
        assert ranks.all[0].handle({"phase": "void", "id": "b"}) == {"voided": False}

    def test_a_store_that_is_lost_costs_a_few_boundaries_and_no_more(self) -> None:
        ranks = Ranks(2, 8)
        ranks.prepare("a", [3, 5])
        ranks.go("a")
        ranks.board.lost = True
        for step in range(5, 9):
            assert ranks.begin(step) == [4, 4]
        assert [shares.pending for shares in ranks.all] == [None, None]

    @pytest.mark.parametrize(
        ("counts", "message"),
        [
            ([4, 4, 0], "3 whole numbers above 0"),
            ([4, 4, 5], "add up to 12"),
            ([6, 6], "expected 3"),
            ("abc", "expected 3"),
        ],
    )
    def test_shares_that_cannot_be_are_refused(self, counts: Any, message: str) -> None:
        assert message in Ranks(3, 12).prepare("a", counts)[1]["error"]

    def test_one_change_at_a_time_and_a_dry_run_holds_nothing(self) -> None:
        ranks = Ranks(2, 8)
        assert ranks.all[0].handle({"phase": "prepare", "id": "d", "shares": [3, 5], "dry_run": True})["prepared"]
        assert ranks.all[0].pending is None
        ranks.prepare("a", [3, 5])
        assert "the change a is not in force yet" in ranks.prepare("b", [5, 3])[0]["error"]

    def test_a_script_without_shares_and_a_sharded_one_say_so(self) -> None:
        shares = Shares(0, 2, Board)
        assert "divides no batch" in shares.handle({"phase": "prepare", "id": "a", "shares": [1, 1]})["error"]
        assert shares.describe() is None
        shares.barred = "every rank is a replica"
        assert "replica" in shares.handle({"phase": "prepare", "id": "a", "shares": [1, 1]})["error"]


def test_costs_are_those_of_a_micro_batch_and_of_the_rest() -> None:
    shares = Shares(0, 1, Board)
    for _ in range(3):
        list(shares.take(list(range(4)), 4, lambda on: None))
        shares._lone_ns[:] = [10_000_000, 11_000_000, 90_000_000]
        shares.settle(100_000_000, 0, 20_000_000)
    said = shares.describe()
    assert said is not None
    assert (said["micro_ms"], said["fixed_ms"], said["recent_ms"], said["recent_steps"]) == (11.0, 36.0, 100.0, 3)


class TestCommands:
    class Peer:
        """Stands for a link to a rank."""

        def __init__(self, shares: Shares) -> None:
            self.mailbox = Mailbox()
            self.mailbox.shares = shares

        def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
            return self.mailbox.handle(None, message)

    def test_the_launcher_tells_its_ranks_and_rank_0_goes(self) -> None:
        ranks = Ranks(2, 8)
        peers: Any = {rank: self.Peer(shares) for rank, shares in enumerate(ranks.all)}
        answer = change(peers, [0, 1], {"phase": "prepare", "id": "a", "shares": [3, 5]})
        assert (answer["status"], set(answer["result"]["steps"])) == ("done", {"0", "1"})
        stepping = threading.Timer(0.05, lambda: [ranks.begin(step) for step in range(3, 6)])
        stepping.start()
        answer = change(peers, [0, 1], {"phase": "go", "id": "a", "deadline_ms": 20_000})
        stepping.join()
        assert (answer["status"], answer["result"]) == ("done", {"step": 5})
        assert [shares.mine for shares in ranks.all] == [3, 5]

    def test_a_rank_that_is_not_there_and_a_node_without_rank_0(self) -> None:
        ranks = Ranks(2, 8)
        peers: Any = {1: self.Peer(ranks.all[1])}
        assert change(peers, [0, 1], {"phase": "prepare", "id": "a"})["reason"] == "rank 0 does not answer"
        assert ranks.all[1].pending is None, "rank 0 hears of it first, so that somebody can call it off"
        assert "not this one" in change(peers, [1], {"phase": "go", "id": "a"})["reason"]
        assert change(peers, [1], {"phase": "gone"})["status"] == "refused"
