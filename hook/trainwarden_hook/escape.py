"""Link escape: watches carriers and heartbeats, moves the node's traffic off a rail that is dead or degraded, and back after repair."""

from __future__ import annotations

import logging
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from trainwarden_hook.addresses import UsageError
from trainwarden_hook.beats import BadBeat, Beat, Codec
from trainwarden_hook.moving import Mover, strict_filters
from trainwarden_hook.mptcp import Standbys, is_enabled
from trainwarden_hook.netlink import LinkState, LinkWatch, links
from trainwarden_hook.paths import ORDERED, Condition, Move, PeerPaths, State
from trainwarden_hook.rail_sockets import RailSocket
from trainwarden_hook.rails import Rails
from trainwarden_hook.routes import RouteTable

log = logging.getLogger("trainwarden.links")
NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000
MAX_NAMES = 8
ASK_AGAIN_MS = (15.0, 35.0, 75.0, 150.0, 400.0)
HURRIED = 4
AFTER_CHANGE_S, AFTER_MISS_S = 5.0, 0.3
"""So many times as often a node sends for so long after a change, or a number that did not come on every rail."""
MOST_BEATS_PER_S = 1000.0
"""Heartbeats a node sends a second at most: with many peers they come at longer intervals."""
Report = Callable[[dict[str, Any]], None]


class Escape:
    """Keeps the node's traffic on good rails.

    Parameters
    ----------
    rails
        The links file.
    secret
        Signs the heartbeats.
    report
        Called with the fields of each event.
    avoided
        (rail, peer) that orders took out of use before.

    Raises
    ------
    UsageError
        Routes or endpoints cannot be set here, or would not help.
    """

    def __init__(self, rails: Rails, secret: bytes, report: Report, avoided: Iterable[tuple[str, str]] = ()) -> None:
        self.rails = rails
        self._report = report
        self._codec = Codec(secret, rails.digest)
        self._place = rails.nodes.index(rails.own.name)
        self._boot = time.time_ns()
        self._number = 0
        self._indexes = [0] * len(rails.names)
        self._carriers = 0
        self._table = RouteTable(rails.tuning.rto_min_ms)
        self._mover = Mover(rails, self._table, self._indexes)
        self._sockets = [RailSocket(own, rails.port, name) for own, name in zip(rails.own.on, rails.interfaces, strict=True)]  # fmt: skip
        self._peers = {rails.nodes.index(peer.name): peer for peer in rails.peers}
        self._echo: dict[tuple[int, int], tuple[int, int]] = {}
        self._said: dict[int, tuple[int, int, int, int]] = {}
        self._lost: set[str] = set()
        self._silent: set[str] = set()
        self._hurry_until_ns = 0
        self._unfit = 0
        self._to_cut: list[tuple[int, int]] = []
        self._asking: dict[int, list[int]] = {}
        self._judged: dict[int, list[State]] = {}
        self.counters: Counter[str] = Counter()
        self._watch = LinkWatch()
        self._poll = select.epoll()
        self._check()
        self._follow(links())
        adopted = self._mover.adopt()
        self.paths = {
            place: PeerPaths(peer.name, len(rails.names), rails.tuning, adopted[peer.name])
            for place, peer in self._peers.items()
        }
        for rail, peer in avoided:
            self._avoid_again(rail, peer)
        self._standbys = self._make_standbys()
        self._poll.register(self._watch.fileno(), select.EPOLLIN)
        self._take_links(links())

    # -- beginning and end

    def _check(self) -> None:
        if strict := strict_filters(self.rails.interfaces):
            raise UsageError(
                f"links: rp_filter of {strict[0]} is 1: the kernel would drop what comes by another rail; "
                f"set net.ipv4.conf.all.rp_filter and that of each rail to 0 or 2"
            )
        if self.rails.mptcp and not is_enabled():
            raise UsageError("links: mptcp = true but net.mptcp.enabled is not 1; set the sysctl or mptcp = false")

    def _make_standbys(self) -> Standbys | None:
        if not self.rails.mptcp:
            return None
        standbys = Standbys(self.rails.own, self.rails.mptcp_port)
        standbys.begin(self._indexes)
        return standbys

    def clear(self) -> None:
        """Remove every route and endpoint of ours."""
        self._mover.clear()
        if self._standbys is not None:
            self._standbys.clear()

    def close(self) -> None:
        """Give the sockets back; routes and endpoints stay."""
        for rail in self._sockets:
            rail.close()
        if self._standbys is not None:
            self._standbys.close()
        self._watch.close()
        self._poll.close()
        self._table.close()

    # -- the loop

    def run(self, control: int, handle: Callable[[], bool]) -> None:
        """Watch; ``handle`` is called when the file ``control`` can be read, until it gives ``False``."""
        self._poll.register(control, select.EPOLLIN)
        due_ns = time.monotonic_ns()
        self._hurry(due_ns, AFTER_CHANGE_S)
        while True:
            wait_s = max(0.0, (due_ns - time.monotonic_ns()) / NS_PER_S)
            ready = {number for number, _ in self._poll.poll(wait_s)}
            if control in ready and not handle():
                return
            try:
                due_ns = self._turn(ready, due_ns)
            except UsageError:
                raise
            except Exception:
                # an unforeseen error must not end the watch: the next turn looks at everything anew
                self.counters["errors"] += 1
                log.exception("a turn of the link watch failed; going on")
                due_ns = time.monotonic_ns() + self._interval_ns(0)

    def _turn(self, ready: set[int], due_ns: int) -> int:
        """One look at what is ready; when the next heartbeats are due."""
        news = self._watch.fileno() in ready and self._take_links(self._watch.read())
        now_ns = time.monotonic_ns()
        due = now_ns >= due_ns
        # all rails together: they are judged by the numbers that came on each
        urgent = any(sock.number in ready for sock in self._sockets)
        told = self._take_beats(ready) if due or urgent else set()
        moved = self._decide(now_ns, set(self.paths) if due or news else told)
        if self._asking:
            self._ask_again(now_ns)
        if news or moved or told:
            self._hurry(now_ns, AFTER_CHANGE_S)
        elif urgent or (due and any(paths.misses(now_ns) for paths in self.paths.values())):
            self._hurry(now_ns, AFTER_MISS_S)
        if due or news or moved:
            self._send(now_ns)
        # after that: peers should know as soon as we do
        self._mind_standbys()
        interval_ns = self._interval_ns(now_ns)
        if not due:
            return min(due_ns, now_ns + interval_ns)
        # one that was held up does not make up for it
        return due_ns + interval_ns if now_ns < due_ns + interval_ns else now_ns + interval_ns

    def _hurry(self, now_ns: int, for_s: float) -> None:
        self._hurry_until_ns = max(self._hurry_until_ns, now_ns + int(for_s * NS_PER_S))

    def _interval_ns(self, now_ns: int) -> int:
        beats = len(self._peers) * len(self.rails.names)
        usual_ms = self.rails.tuning.heartbeat_ms
        wanted_ms = usual_ms / HURRIED if now_ns < self._hurry_until_ns else usual_ms
        return int(max(wanted_ms, 1000.0 * beats / MOST_BEATS_PER_S) * NS_PER_MS)

    # -- carriers

    def _follow(self, states: Iterable[LinkState]) -> tuple[int, int]:
        """Take in what the kernel tells of interfaces; masks of rails whose carrier was lost and won."""
        lost = won = 0
        for state in states:
            if state.name not in self.rails.interfaces:
                continue
            rail = self.rails.interfaces.index(state.name)
            bit = 1 << rail
            anew = state.usable and self._indexes[rail] != state.index
            self._indexes[rail] = state.index
            if state.usable and (anew or not self._carriers & bit):
                won, lost = won | bit, lost & ~bit
            elif not state.usable and self._carriers & bit:
                lost, won = lost | bit, won & ~bit
            self._carriers = self._carriers | bit if state.usable else self._carriers & ~bit
        return lost, won

    def _take_links(self, states: Iterable[LinkState]) -> bool:
        lost, won = self._follow(states)
        for rail, sock in enumerate(self._sockets):
            if self._carriers >> rail & 1:
                if won >> rail & 1:
                    self._mover.lay(rail)
                    self._relay(rail)
                    now_ns = time.monotonic_ns()
                    self._asking[rail] = [now_ns + int(after_ms * NS_PER_MS) for after_ms in ASK_AGAIN_MS]
                sock.open(self._poll)
        return bool(lost | won)

    def _ask_again(self, now_ns: int) -> None:
        """A port that has just come up may swallow what is sent first, and the kernel asks for addresses once a second only."""
        for rail, times in list(self._asking.items()):
            if now_ns < times[0]:
                continue
            for place, states in self._judged.items():
                if states[rail].condition is Condition.DEAD:
                    self._mover.ask_again(self._peers[place], rail)
            self._asking[rail] = times[1:]
            if not times[1:]:
                del self._asking[rail]

    def _relay(self, rail: int) -> None:
        """The kernel dropped the escape routes over a rail that was switched off; whoever is on it needs them again."""
        for place, paths in self.paths.items():
            if paths.current == rail != 0:
                self._mover.move(self._peers[place], rail)

    # -- heartbeats

    def _take_beats(self, ready: set[int]) -> set[int]:
        """Places of the peers that told of a change."""
        heard: set[int] = set()
        # the last rail first: a number is sent on the first rail first, so what came on the last has come on all
        for rail, sock in reversed(list(enumerate(self._sockets))):
            for data, waited_ns in sock.read(sock.number in ready):
                self._take_beat(data, rail, time.monotonic_ns() - waited_ns, heard)
        return heard

    def _take_beat(self, data: bytes, rail: int, now_ns: int, heard: set[int]) -> None:
        try:
            beat = self._codec.unpack(data)
        except BadBeat as error:
            self.counters[f"bad_beats: {error}"] += 1
            return
        paths = self.paths.get(beat.sender)
        if paths is None or beat.receiver != self._place or beat.rail != rail or not paths.is_newer(beat, now_ns):
            self.counters["foreign_beats"] += 1
            return
        self._echo[beat.sender, rail] = (beat.sent_ns, now_ns)
        if paths.hear(beat, now_ns):
            heard.add(beat.sender)

    def _send(self, now_ns: int) -> None:
        self._number += 1
        for place, paths in self.paths.items():
            peer, hears, clean = self._peers[place], paths.hears, paths.clean
            say = (self._carriers, hears, clean, paths.avoided)
            news, self._said[place] = say != self._said.get(place) or paths.misses(now_ns), say
            for rail, sock in enumerate(self._sockets):
                if not self._carriers >> rail & 1:
                    continue
                echo_ns, came_ns = self._echo.get((place, rail), (0, now_ns))
                sent_ns = time.monotonic_ns()
                beat = Beat(
                    self._place, place, rail, self._boot, self._number, sent_ns, echo_ns, (sent_ns - came_ns) // 1000,
                    *say,
                )  # fmt: skip
                if not sock.send(self._codec.pack(beat, news), peer.on[rail]):
                    self.counters[f"unsent on {self.rails.names[rail]}"] += 1

    # -- decisions

    def _decide(self, now_ns: int, places: set[int]) -> bool:
        """Look at these peers; whether traffic was moved."""
        moves: list[Move] = []
        for place in sorted(places):
            paths = self.paths[place]
            self._judged[place] = states = paths.judge(self._carriers, now_ns)
            self._tell_lost(paths, states, now_ns)
            move = paths.wish(states)
            if move is not None:
                moves.append(move)
        done = [move for move in moves if self._carry_out(move)]
        self._tell_moves(done, now_ns)
        return bool(done)

    def _carry_out(self, move: Move) -> bool:
        place = self.rails.nodes.index(move.peer)
        if not self._mover.move(self._peers[place], move.target):
            self.counters["failed_moves"] += 1
            return False
        self.paths[place].current = move.target
        if move.cause == "no_carrier":
            # what was sent in between waits for the peer's address on the dead rail, and TCP repeats nothing that it still holds
            self._mover.ask_again(self._peers[place], move.source)
        if move.cause:
            self._to_cut.append((place, move.source))
        return True

    def _mind_standbys(self) -> None:
        """Connections leave the rails that were moved off; a rail that was bad towards most peers is announced again when it is well."""
        if self._standbys is None:
            return
        for place, rail in self._to_cut:
            self.counters["cut"] += self._standbys.cut(self._peers[place], rail)
        self._to_cut.clear()
        for rail in range(len(self.rails.names)):
            bad = sum(states[rail].condition >= Condition.DEGRADED for states in self._judged.values())
            well = sum(states[rail].condition == Condition.GOOD for states in self._judged.values())
            bit = 1 << rail
            if not self._unfit & bit and 2 * bad > len(self._judged):
                self._unfit |= bit
            elif self._unfit & bit and 2 * well > len(self._judged):
                self._unfit &= ~bit
                self._standbys.put_in(rail, self._indexes[rail])

    def _tell_moves(self, moves: list[Move], now_ns: int) -> None:
        groups: dict[tuple[int, int, str], list[str]] = {}
        for move in moves:
            groups.setdefault((move.source, move.target, move.cause), []).append(move.peer)
        for (source, target, cause), peers in groups.items():
            if cause or target > source:
                self._tell_moved(source, target, cause, peers, now_ns)
            else:
                settled = all(paths.current == 0 for paths in self.paths.values())
                self._tell("returned", target, peers, "", to=self.rails.names[target], settled=settled)

    def _tell_moved(self, source: int, target: int, cause: str, peers: list[str], now_ns: int) -> None:
        """``own`` = the fault is at this node's end, as far as can be told: it lost its carrier, or most peers are bad to reach."""
        away = sum(paths.current != source for paths in self.paths.values())
        own = cause == "no_carrier" or (cause not in ("ordered", "far_end") and 2 * away > len(self.paths))
        hold_s = max(self.paths[self.rails.nodes.index(peer)].hold_s(source) for peer in peers)
        took_us = (time.monotonic_ns() - now_ns) // 1000
        self._tell("moved", source, peers, cause, to=self.rails.names[target], own=own, hold_s=hold_s, took_us=took_us)

    def _tell_lost(self, paths: PeerPaths, states: list[State], now_ns: int) -> None:
        dead = all(state.condition is Condition.DEAD for state in states)
        if dead != (paths.name in self._lost):
            (self._lost.add if dead else self._lost.discard)(paths.name)
            causes = ", ".join(f"{name} {state.cause}" for name, state in zip(self.rails.names, states, strict=True))
            self._tell("lost" if dead else "found", paths.current, [paths.name], causes if dead else "", settled=dead)
        silent = bool(paths.heard_at_ns) and now_ns - paths.heard_at_ns > self.rails.tuning.lost_s * NS_PER_S
        if silent != (paths.name in self._silent):
            (self._silent.add if silent else self._silent.discard)(paths.name)
            cause = "no heartbeat on any rail" if silent else ""
            self._tell("silent" if silent else "heard", paths.current, [paths.name], cause)

    def _tell(self, event: str, rail: int, peers: list[str], cause: str, **more: Any) -> None:
        names = ",".join(sorted(peers)[:MAX_NAMES])
        fields = {
            "event": event, "rail": self.rails.names[rail], "interface": self.rails.interfaces[rail], "peers": names,
            "peer_count": len(peers), "cause": cause, "at_ns": time.time_ns(), **more,
        }  # fmt: skip
        self.counters[event] += 1
        log.warning("link %s: %s", event, {key: value for key, value in fields.items() if value not in ("", None)})
        self._report(fields)

    # -- orders and state

    def order(self, rail: str, peers: list[str], undo: bool, dry_run: bool) -> list[Move]:
        """Take a rail out of use (towards all peers or some) until it is undone; the moves that follow from it.

        Raises
        ------
        UsageError
            There is no such rail or peer.
        """
        bit = 1 << self.rails.rail(rail)
        known = {paths.name: paths for paths in self.paths.values()}
        if unknown := sorted(set(peers) - set(known)):
            raise UsageError(f"there is no peer {unknown[0]!r}; the peers are {', '.join(sorted(known))}")
        chosen = [known[name] for name in peers] or list(known.values())
        moves = self._foresee(chosen, bit, undo)
        if not dry_run:
            for paths in chosen:
                paths.avoided = paths.avoided & ~bit if undo else paths.avoided | bit
        return moves

    def _foresee(self, chosen: list[PeerPaths], bit: int, undo: bool) -> list[Move]:
        now_ns, moves = time.monotonic_ns(), []
        for paths in chosen:
            before = paths.avoided
            paths.avoided = before & ~bit if undo else before | bit
            move = paths.wish(paths.judge(self._carriers, now_ns))
            paths.avoided = before
            if move is not None:
                moves.append(replace(move, cause=move.cause or ORDERED.cause))
        return moves

    def _avoid_again(self, rail: str, peer: str) -> None:
        """An order from before a restart; one about a rail or node that the file no longer has is over."""
        for paths in self.paths.values():
            if paths.name == peer and rail in self.rails.names:
                paths.avoided |= 1 << self.rails.rail(rail)

    @property
    def avoided(self) -> list[tuple[str, str]]:
        """(rail, peer) that orders took out of use."""
        return [
            (name, paths.name)
            for place, name in enumerate(self.rails.names)
            for paths in self.paths.values()
            if paths.avoided >> place & 1
        ]

    def rail_in_use(self) -> str:
        """The rail that most peers are reached by."""
        used = Counter(paths.current for paths in self.paths.values())
        return self.rails.names[used.most_common(1)[0][0] if used else 0]

    def status(self) -> dict[str, Any]:
        """For the status page."""
        carriers = {name: bool(self._carriers >> place & 1) for place, name in enumerate(self.rails.names)}
        peers = {paths.name: self._status_of(paths) for paths in self.paths.values()}
        return {"carriers": carriers, "peers": peers, "avoided": self.avoided, "counters": dict(self.counters)}

    def _status_of(self, paths: PeerPaths) -> dict[str, Any]:
        states = paths.judge(self._carriers, time.monotonic_ns())
        named = {name: str(state) for name, state in zip(self.rails.names, states, strict=True)}
        return {"rail": self.rails.names[paths.current], "states": named}
