"""Replicas on a peer, and everything that can be wrong with peers, disks and memory: no step waits for any of it."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainwarden_hook import segments
from trainwarden_hook.checkpoint import Saver, SaveReport
from trainwarden_hook.depot import AT_ONCE, GO, Depot, Replica, open_depot
from trainwarden_hook.disk import CHUNK_BYTES, Folder, open_file
from trainwarden_hook.environment import Environment
from trainwarden_hook.job import Job
from trainwarden_hook.last_state import LastState
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.offers import Holdings, Offer, look
from trainwarden_hook.packing import HEADER_BYTES, SHARDED, Header, Plan, Refused
from trainwarden_hook.pull import Reader, Server
from trainwarden_hook.restore import Told, agree, choose
from trainwarden_hook.sums import checksum

PRINT = 77


def packed(step: int, size: int = 1000, rank: int = 0, world: int = 1, flags: int = 0) -> tuple[Header, memoryview]:
    plan = Plan({"model": {"w": torch.full((size,), float(step))}})
    payload = memoryview(bytearray(plan.payload_bytes))
    plan.write_index(payload)
    plan.write_tensors(payload)
    crc = checksum(payload)
    return Header(step, world, rank, 1, len(plan.index), plan.payload_bytes, crc, PRINT, 0, flags), payload


@pytest.fixture
def depot() -> Iterator[Depot]:
    made = Depot("127.0.0.1", f"t{uuid.uuid4().hex[:8]}", "n1")
    yield made
    made.close()
    segments.unlink_all(made._job, made._node)


def kept(depot: Depot) -> dict[int, int]:
    """Step of each good replica by rank."""
    paths = segments.replicas(depot._job, depot._node)
    held = look(Buffers(depot._job, depot._node, 0), None, PRINT, None, paths)
    for offer in held.offers:
        offer.verify()
    assert not held.refused
    return {segments.rank_of_replica(offer.where): offer.header.step for offer in held.offers}


def always() -> bool:
    return True


# -- replicas


def test_a_replica_takes_the_place_of_the_one_before(depot: Depot) -> None:
    for step in (10, 20):
        assert Replica(depot.address, 3).write(*packed(step, 300_000, world=4), always)
        assert kept(depot) == {3: step}


def test_a_sender_that_ends_in_the_middle_costs_nothing(depot: Depot) -> None:
    Replica(depot.address, 3).write(*packed(10, world=4), always)
    left = iter([True] * 3)
    header, payload = packed(20, 8_000_000, world=4)
    assert not Replica(depot.address, 3).write(header, payload, lambda: next(left, False))
    Replica(depot.address, 2).write(*packed(30, world=4), always)
    assert kept(depot) == {2: 30, 3: 10}


def test_senders_that_hang_in_the_middle_give_their_turns_to_others(
    depot: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwarden_hook.depot.SILENCE_S", 0.2)
    host, port, token = depot.address.rsplit(":", 2)
    hung = [socket.create_connection((host, int(port)), 60) for _ in range(AT_ONCE)]
    for rank, sender in enumerate(hung):
        sender.sendall(f'{{"token":"{token}","rank":{rank},"size":9000000}}\n'.encode())
        assert sender.recv(1) == GO
    try:
        assert Replica(depot.address, 3, timeout_s=60).write(*packed(10, world=4), always)
        assert kept(depot) == {3: 10}
    finally:
        for sender in hung:
            sender.close()


def test_a_replica_that_a_killed_launcher_had_half_is_none_and_is_removed(depot: Depot) -> None:
    header, payload = packed(10, 300_000, world=4)
    final = segments.replica_path(depot._job, depot._node, 3)
    Path(f"{final}.new").write_bytes(header.encode() + bytes(payload[:1000]))
    assert kept(depot) == {}
    Replica(depot.address, 3).write(header, payload, always)
    assert kept(depot) == {3: 10}
    Path(f"{final}.new").write_bytes(b"again")
    assert segments.unlink_all(depot._job, depot._node) == 2


def test_replicas_of_ranks_that_are_no_more_are_dropped(depot: Depot) -> None:
    Replica(depot.address, 3).write(*packed(10, world=4), always)
    Replica(depot.address, 1).write(*packed(20, world=2), always)
    assert kept(depot) == {1: 20}


@pytest.mark.parametrize(
    "opening",
    [
        b'{"token":"no","rank":0,"size":9}\n', b"[]\n", b"no json\n", b'{"rank":-1}\n', b"x" * 5000,
        b'{"token":"TOKEN","rank":0,"size":999999999999999999999999}\n',
    ],
)  # fmt: skip
def test_strangers_and_nonsense_get_nothing(depot: Depot, opening: bytes) -> None:
    host, port, token = depot.address.rsplit(":", 2)
    with socket.create_connection((host, int(port)), 60) as stranger:
        stranger.sendall(opening.replace(b"TOKEN", token.encode()))
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass
    assert kept(depot) == {}
    assert Replica(depot.address, 3).write(*packed(10, world=4), always), "and the next one is served"
    assert depot.failed == 1


def test_full_memory_on_the_peer_is_an_error_of_the_sender(depot: Depot, monkeypatch: pytest.MonkeyPatch) -> None:
    Replica(depot.address, 0).write(*packed(10), always)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trainwarden_hook.depot.os.posix_fallocate", full)
    with pytest.raises(OSError):
        Replica(depot.address, 0).write(*packed(20), always)
    assert kept(depot) == {0: 10}


def test_a_node_that_cannot_listen_goes_without_a_depot() -> None:
    assert open_depot("203.0.113.7", "j", "n0") is None


# -- nobody waits


class Hung:
    """Accepts connections and never reads."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}:token"

    def close(self) -> None:
        self._socket.close()


class HungInTheMiddle(Hung):
    """Lets the sender begin, and reads nothing more."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self._begin, daemon=True).start()

    def _begin(self) -> None:
        self._connection = self._socket.accept()[0]
        self._connection.sendall(GO)


def test_a_peer_that_hangs_in_the_middle_of_a_replica_is_given_up() -> None:
    hung = HungInTheMiddle()
    try:
        # more than the buffers of two sockets hold
        with pytest.raises(TimeoutError):
            Replica(hung.address, 0, timeout_s=0.2).write(*packed(10, 8_000_000), always)
    finally:
        hung.close()


def dead_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return f"127.0.0.1:{gone.getsockname()[1]}:token"


class Stuck:
    """A goal that does not come back until it is let go."""

    where = "disk"

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def write(self, *_: object) -> bool:
        return self.let_go.wait(60)


@pytest.mark.parametrize("trouble", ["hung peer", "dead peer", "stuck disk"])
def test_saves_go_on_whatever_becomes_of_peer_and_disk(trouble: str) -> None:
    job, reports = f"t{uuid.uuid4().hex[:8]}", list[SaveReport]()
    hung, stuck = Hung(), Stuck()
    address = {"hung peer": hung.address, "dead peer": dead_address()}.get(trouble)
    peer = Replica(address, 0, timeout_s=0.2) if address else None
    saver = Saver(
        Buffers(job, "n0", 0), stuck if trouble == "stuck disk" else None, Stamp(1, 0, 0, PRINT), reports.append, peer
    )
    try:
        for step in range(1, 6):
            assert saver.save(step, {"model": {"w": torch.full((1000,), float(step))}}, must=False) is None
            assert saver.wait_sealed(60), "sealing waits for neither peer nor disk"
        assert [report.step for report in reports if report.where == "memory" and report.ok] == [1, 2, 3, 4, 5]
        best = look(Buffers(job, "n0", 0), None, PRINT, None).best()
        assert best is not None
        assert best.header.step == 5
    finally:
        hung.close()
        stuck.let_go.set()
        saver.close()
        segments.unlink_all(job, "n0")


# -- disk


def test_an_interrupted_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path), "j", "n0", 0)
    header, payload = packed(10, 2 * CHUNK_BYTES)
    os.makedirs(folder.path)
    with open(f"{folder.file_of(10)}.tmp", "wb") as left:
        left.write(header.encode())
        left.write(payload[: CHUNK_BYTES + 100])
    written: list[int] = []
    plain = os.pwrite

    def counted(descriptor: int, data: memoryview, at: int) -> int:
        written.append(len(data))
        return plain(descriptor, data, at)

    monkeypatch.setattr("trainwarden_hook.disk.os.pwrite", counted)
    assert folder.write(header, payload, always)
    assert sum(written) == len(payload) - CHUNK_BYTES
    assert open_file(folder.file_of(10), PRINT)[0] == header


def test_what_is_left_of_another_save_does_no_harm(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), "j", "n0", 0)
    os.makedirs(folder.path)
    Path(f"{folder.file_of(10)}.tmp").write_bytes(random.Random(1).randbytes(100_000))
    Path(f"{folder.file_of(5)}.tmp").write_bytes(b"older")
    folder.write(*packed(10), always)
    assert open_file(folder.file_of(10), PRINT)[0].step == 10
    assert os.listdir(folder.path) == [os.path.basename(folder.file_of(10))]


def test_the_newest_stay_and_some_for_good(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), "j", "n0", 0, keep=2, keep_every=100)
    for step in (100, 150, 200, 250, 275, 290):
        folder.write(*packed(step), always)
    assert [step for step, _ in folder.newest_first()] == [290, 275, 200, 100]


# -- what is refused, and the next best


def told(step: int, rank: int, world: int, holder: int = 0, number: int = 0, generation: int = 1) -> Told:
    header = Header(step, world, rank, generation, 0, 0, 0, PRINT, 0, SHARDED if world else 0)
    return Told(holder, number, header, Offer(header, memoryview(b""), "memory", "").key, "memory")


def test_parts_of_different_steps_make_no_save_and_are_named() -> None:
    mixed = [told(30, 0, 2), told(20, 1, 2, 1), told(20, 0, 2, 0, 1), told(30, 1, 2, 1, 1, generation=0)]
    choice, incomplete = choose(mixed, set(), set())
    assert choice is not None
    assert choice.key == (20, 1, 2)
    assert incomplete == [
        "step 30 of generation 1 is incomplete: no good save of rank 1 of 2",
        "step 30 of generation 0 is incomplete: no good save of rank 0 of 2",
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([10, 20, 30]), st.integers(0, 2), st.integers(0, 3)), max_size=14),
    st.sets(st.integers(0, 13)),
)
def test_the_newest_step_that_is_whole_in_good_hands_is_chosen(
    parts: list[tuple[int, int, int]], bad: set[int]
) -> None:
    offers = [told(step, rank, 3, holder, number) for number, (step, rank, holder) in enumerate(parts)]
    spoilt = {(offers[number].holder, number) for number in bad if number < len(offers)}
    choice, _ = choose(offers, spoilt, set())
    good = [(step, rank) for number, (step, rank, _) in enumerate(parts) if number not in bad]
    whole_steps = [step for step in (10, 20, 30) if {rank for at, rank in good if at == step} == {0, 1, 2}]
    assert (choice.key[0] if choice else None) == (max(whole_steps) if whole_steps else None)
    if choice:
        assert not {(each.holder, each.number) for some in choice.holders.values() for each in some} & spoilt


@settings(max_examples=40, deadline=None)
@given(st.integers(0, HEADER_BYTES + 4000), st.integers(1, 255), st.booleans())
def test_one_wrong_byte_or_a_cut_anywhere_and_the_older_save_is_taken(at: int, flip: int, cut: bool) -> None:
    made = [packed(step) for step in (10, 20)]
    blobs = [bytearray(header.encode() + bytes(payload)) for header, payload in made]
    at = at % len(blobs[1])
    used = 8 + 4 + 4 + 8 + 4 + 4 + 8 + 8 + 8 + 4 + 4 + 8 + 4
    if cut:
        del blobs[1][at:]
    else:
        blobs[1][at] ^= flip
    held = Holdings()
    for number, blob in enumerate(blobs):
        try:
            header = Header.decode(memoryview(blob)[:HEADER_BYTES], f"save {number}")
            payload = memoryview(blob)[HEADER_BYTES:]
            if len(payload) < header.payload_bytes:
                raise Refused("truncated")
            held.offers.append(Offer(header, payload, "memory", f"save {number}"))
        except Refused as error:
            held.refuse(str(error))
    restored = agree(held)
    assert restored is not None
    harmless = not cut and used <= at < HEADER_BYTES
    assert restored.step == (20 if harmless else 10)
    assert float(restored.state["model"]["w"][0]) == restored.step
    assert len(held.refused) == (0 if harmless else 1)


# -- pulling


def test_a_server_gives_just_what_is_there_and_only_to_those_with_the_token() -> None:
    area = memoryview(bytearray(random.Random(2).randbytes(20_000_000)))
    with Server([memoryview(bytearray(b"small")), area], "127.0.0.1") as server:
        reader = Reader(server.address, 20)
        some = memoryview(bytearray(1000))
        reader.read(1, 19_999_000, some)
        assert some == area[19_999_000:]
        target = memoryview(bytearray(len(area)))
        assert reader.read_summed(1, target) == checksum(area)
        assert target == area
        with pytest.raises(OSError):
            reader.read(0, 3, memoryview(bytearray(3)))
        host, port, _ = server.address
        with pytest.raises(OSError):
            Reader((host, port, "00" * 16), 20).read(0, 0, memoryview(bytearray(1)))


# -- the save at the moment of failure


class Broken:
    """A job of one rank whose step 7 breaks."""

    def __init__(self) -> None:
        self.name = f"t{uuid.uuid4().hex[:8]}"
        self.job = Job(Environment(self.name, "n0", 1, 0, 0, 1, None, None, None, None, 60.0))
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.saver = Saver(Buffers(self.name, "n0", 0), None, Stamp(1, 0, 1, PRINT), self.job.on_save)
        last = LastState(self.job, self.saver, lambda: {"model": self.model.state_dict()})
        assert last.watch(self.optimizer)
        self.job.on_failed_step = last.save

    def run(self, step: int, broken: str = "") -> None:
        with self.job.step(step):
            self.model(torch.ones(2, 3)).sum().backward()
            if broken == "collective":
                raise RuntimeError("Connection reset by peer")
            self.optimizer.step()
            if broken == "after":
                raise RuntimeError("late")

    def held(self) -> dict[str, Any] | None:
        restored = agree(look(Buffers(self.name, "n0", 0), None, PRINT, None))
        return None if restored is None else {"step": restored.step, **restored.state["model"]}

    def close(self) -> None:
        self.saver.close()
        segments.unlink_all(self.name, "n0")


@pytest.fixture
def broken() -> Iterator[Broken]:
    made = Broken()
    yield made
    made.close()


def test_a_step_that_breaks_in_a_collective_leaves_its_beginning_in_memory(broken: Broken) -> None:
    broken.run(6)
    weight = broken.model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="reset by peer"):
        broken.run(7, "collective")
    held = broken.held()
    assert held is not None
    assert held["step"] == 7
    assert torch.equal(held["weight"], weight)


def test_a_step_that_breaks_after_the_optimizer_leaves_nothing(broken: Broken) -> None:
    broken.run(6)
    with pytest.raises(RuntimeError, match="late"):
        broken.run(7, "after")
    assert broken.held() is None
    assert not broken.job.errors
