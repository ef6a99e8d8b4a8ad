"""A finished step as raw numbers, and how they become the step datagram.

The training thread only collects the numbers; the text is made where it costs training nothing
(`outbox`). It is put together by hand: a test holds it to `wire.encode`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwarden_hook.scalars import Scalar, here, read
from trainwarden_hook.wire import plain_number

NS_PER_MS = 1e6
UNKNOWN = -1


@dataclass(slots=True)
class Row:
    """One step of one rank; times are `time.perf_counter_ns` values but for ``wall_ns``, the wall clock at ``ended_ns``.

    ``handed_ns``, ``reduced_ns`` and ``backward_left_ns`` are 0 when not known. ``parts`` are the marked times of data,
    forward, backward and optimizer. Numbers from a device may still be on their way. With ``partial`` the local norm
    is that of a part of the gradients: it is told only if it is not finite. ``checkpoint_ns`` is our own save at the boundary,
    ``saved_before_ns`` and ``saved_within_ns`` those that the script made since the last step, and within this one.
    """

    head: str
    step: int
    first: bool
    began_ns: int
    entered_ns: int
    ended_ns: int
    wall_ns: int
    checkpoint_ns: int
    handed_ns: int
    reduced_ns: int
    backward_left_ns: int
    parts: list[int]
    cpu_ns: int
    own_ns: int
    samples: int | None = None
    loss: Scalar = None
    norm_local: Scalar = None
    norm: Scalar = None
    partial: bool = False
    checksum: Scalar = None
    saved_before_ns: int = 0
    saved_within_ns: int = 0

    def ready(self) -> bool:
        """Whether all numbers have arrived."""
        return here(self.loss) and here(self.norm_local) and here(self.norm) and here(self.checksum)

    def body(self) -> bytes:
        """The datagram; a number that has not arrived is absent."""
        local = _number("grad_norm_local", None if self._tells_nothing() else self.norm_local)
        tail = _number("loss", self.loss) + local + _number("grad_norm", self.norm) + _whole(self.checksum)
        return f"{self._text()}{tail}}}".encode()

    def _tells_nothing(self) -> bool:
        if not self.partial:
            return False
        number = read(self.norm_local)
        return number is not None and math.isfinite(number)

    def _text(self) -> str:
        duration_ns = self.ended_ns - self.began_ns
        start_wall_ns = self.wall_ns - duration_ns
        text = (
            f'{self.head},"step":{self.step},"phase":"{self._kind()}","start_ns":{start_wall_ns},'
            f'"duration_ms":{duration_ns / NS_PER_MS:.3f}{self._split()},'
            f'"cpu_ms":{self.cpu_ns / NS_PER_MS:.3f},"hook_us":{self.own_ns / 1e3:.1f}'
        )
        if self.handed_ns:
            text += f',"arrived_ns":{start_wall_ns + self.handed_ns - self.began_ns}'
        if self.samples is not None:
            text += f',"samples":{self.samples}'
        return text

    def _kind(self) -> str:
        if self.first:
            return "first"
        return "checkpoint" if self._saved_ns else "train"

    @property
    def _saved_ns(self) -> int:
        return self.checkpoint_ns + self.saved_before_ns + self.saved_within_ns

    def _split(self) -> str:
        data_ns, forward_ns, backward_ns, optimizer_ns = self.parts
        data_ns = data_ns or self.entered_ns - self.began_ns - self.saved_before_ns
        wait_ns = UNKNOWN
        if self.handed_ns:
            claimed_ns = data_ns + forward_ns + self.checkpoint_ns + self.saved_before_ns
            backward_ns, wait_ns = self._divide_backward(backward_ns, claimed_ns)
        text = f',"data_ms":{data_ns / NS_PER_MS:.3f}'
        text += _part("forward_ms", forward_ns) + _part("backward_ms", backward_ns)
        if wait_ns != UNKNOWN:
            text += f',"wait_ms":{wait_ns / NS_PER_MS:.3f}'
        return text + _part("optimizer_ms", optimizer_ns) + _part("checkpoint_ms", self._saved_ns)

    def _divide_backward(self, backward_ns: int, claimed_ns: int) -> tuple[int, int]:
        """Local work and waiting for the others.

        Unmarked: all local time up to the hand-over that no mark has claimed is called backward.
        """
        if self.backward_left_ns:
            wait_ns = max(0, self.backward_left_ns - self.handed_ns)
            return max(0, backward_ns - wait_ns), wait_ns
        return max(0, self.handed_ns - self.began_ns - claimed_ns), max(0, self.reduced_ns - self.handed_ns)


def _part(key: str, time_ns: int) -> str:
    return f',"{key}":{time_ns / NS_PER_MS:.3f}' if time_ns else ""


def _whole(value: Scalar) -> str:
    """A checksum, every digit of it."""
    number = value if isinstance(value, float) else read(value)
    return "" if number is None else f',"param_checksum":{int(number)}'


def _number(key: str, value: Scalar) -> str:
    number = value if isinstance(value, float) else read(value)
    if number is None:
        return ""
    if math.isfinite(number):
        return f',"{key}":{number:.7g}'
    return f',"{key}":"{plain_number(number)}"'
