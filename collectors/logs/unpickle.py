"""Reading a pickle that a job wrote, without running any of it: an own reader that knows containers, numbers and text, and nothing else.

The standard reader can be forbidden to import, yet still allocates whatever memory a file asks for. This one knows no opcode that
names a class, calls, or builds an object, and bounds every count by the size of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAX_BYTES = 64 * 1024 * 1024
MAX_STEPS = 3_000_000
MAX_INT_BYTES = 16


class PickleError(Exception):
    """The bytes are no pickle of plain data; the message says what was found, and where."""


class _Mark:
    """A mark on the stack."""


_MARK = _Mark()


def load(data: bytes) -> Any:
    """The plain value in `data`: None, bool, int, float, str, bytes, and lists, tuples, dicts and sets of them.

    Raises
    ------
    PickleError
        Anything else, broken or too big.
    """
    if len(data) > MAX_BYTES:
        raise PickleError(f"pickle of {len(data)} bytes, at most {MAX_BYTES} are read")
    return _Reader(data).run()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MAX_STEPS):
            code = self._take(1)[0]
            if code == 0x2E:  # STOP
                return self._pop()
            action = _ACTIONS.get(code)
            if action is None:
                raise PickleError(
                    f"opcode {code:#04x} at byte {self._at - 1}: only plain data is read, this calls or names code"
                )
            try:
                action(self)
            except (TypeError, IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
                raise PickleError(f"broken at byte {self._at}: {type(error).__name__}") from None
        raise PickleError(f"more than {MAX_STEPS} steps")

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count or count < 0:
            raise PickleError(f"ends at byte {len(self._data)} in the middle of a value")
        self._at += count
        return piece

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop() if self._stack else _MARK
        if value is _MARK:
            raise PickleError(f"nothing on the stack at byte {self._at}")
        return value

    def _since_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                found = self._stack[index + 1 :]
                del self._stack[index:]
                return found
        raise PickleError(f"no mark before byte {self._at}")

    def _top(self, kind: type[Any]) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise PickleError(f"a {kind.__name__} was expected at byte {self._at}")
        return self._stack[-1]

    def _text(self, size: int) -> None:
        self._push(self._take(size).decode("utf-8", "surrogatepass"))

    def _int(self, size: int) -> None:
        if size > MAX_INT_BYTES:
            raise PickleError(f"a number of {size} bytes at byte {self._at}")
        self._push(self._number(size, signed=True))

    def _keep(self, index: int) -> None:
        if not self._stack:
            raise PickleError(f"nothing to remember at byte {self._at}")
        self._memo[index] = self._stack[-1]

    def _append(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._top(dict)
        if len(values) % 2:
            raise PickleError(f"a key without a value at byte {self._at}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int | float | bytes | None):
                raise PickleError(f"a key of type {type(key).__name__} at byte {self._at}")
            target[key] = value

    def _append_one(self) -> None:
        value = self._pop()
        self._append([value])

    def _set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _set(self) -> None:
        values = self._since_mark()
        if not all(isinstance(value, str | int | float | bytes | None) for value in values):
            raise PickleError(f"a set of what is no text or number at byte {self._at}")
        self._top(set).update(values)

    def _tuple(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(values)))


_ACTIONS: dict[int, Callable[[_Reader], object]] = {
    0x80: lambda r: r._take(1),  # PROTO
    0x95: lambda r: r._take(8),  # FRAME
    0x28: lambda r: r._push(_MARK),
    0x4E: lambda r: r._push(None),
    0x88: lambda r: r._push(True),
    0x89: lambda r: r._push(False),
    0x4A: lambda r: r._push(r._number(4, signed=True)),  # BININT
    0x4B: lambda r: r._push(r._number(1)),
    0x4D: lambda r: r._push(r._number(2)),
    0x8A: lambda r: r._int(r._number(1)),  # LONG1
    0x8B: lambda r: r._int(r._number(4)),  # LONG4
    0x47: lambda r: r._push(struct.unpack(">d", r._take(8))[0]),  # BINFLOAT
    0x58: lambda r: r._text(r._number(4)),  # BINUNICODE
    0x8C: lambda r: r._text(r._number(1)),
    0x8D: lambda r: r._text(r._number(8)),
    0x42: lambda r: r._push(r._take(r._number(4))),  # BINBYTES
    0x43: lambda r: r._push(r._take(r._number(1))),
    0x8E: lambda r: r._push(r._take(r._number(8))),
    0x5D: lambda r: r._push([]),
    0x7D: lambda r: r._push({}),
    0x29: lambda r: r._push(()),
    0x8F: lambda r: r._push(set()),
    0x61: lambda r: r._append_one(),
    0x65: lambda r: r._append(r._since_mark()),
    0x73: lambda r: r._set_one(),
    0x75: lambda r: r._set_items(r._since_mark()),
    0x90: lambda r: r._set(),  # ADDITEMS
    0x74: lambda r: r._push(tuple(r._since_mark())),
    0x85: lambda r: r._tuple(1),
    0x86: lambda r: r._tuple(2),
    0x87: lambda r: r._tuple(3),
    0x30: lambda r: r._pop(),
    0x71: lambda r: r._keep(r._number(1)),  # BINPUT
    0x72: lambda r: r._keep(r._number(4)),
    0x94: lambda r: r._keep(len(r._memo)),  # MEMOIZE
    0x68: lambda r: r._push(r._memo[r._number(1)]),  # BINGET
    0x6A: lambda r: r._push(r._memo[r._number(4)]),
}
