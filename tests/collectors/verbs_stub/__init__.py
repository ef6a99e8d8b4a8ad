"""A stand-in for libibverbs: compiled from stub.c, its adapters in a file that a test changes while the library is in use."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from tests.collectors.kit import FIXTURES

HERE = Path(__file__).parent
CALLS = re.findall(r"^CALL\((\w+)\)", (HERE / "calls.def").read_text(encoding="ascii"), re.MULTILINE)
DEVICE = struct.Struct("@64sIIII16sII")
HANG = 0xFFFFFFFE
DEVICES = 16
INFINIBAND, ETHERNET = 1, 2
ACTIVE, DOWN = 4, 1
COMPILER = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")


@functools.cache
def built() -> Path:
    """The compiled library, once per process."""
    target = Path(tempfile.mkdtemp(prefix="verbs-stub-")) / "libibverbs.so.1"
    assert COMPILER is not None, "no C compiler"
    subprocess.run(
        [COMPILER, "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror", "-I", FIXTURES / "verbs", "-pthread",
         "-o", target, HERE / "stub.c"],
        check=True,
    )  # fmt: skip
    return target


def layout() -> str:
    """Sizes, offsets and numbers as the stand-in has them."""
    say = ctypes.CDLL(str(built())).stub_layout
    say.restype = ctypes.c_char_p
    return str(say().decode("ascii"))


class Fabric:
    """Adapters that reach each other: each with one port, its link up, until a test changes it."""

    def __init__(self) -> None:
        sizes = ctypes.CDLL(str(built())).stub_sizes
        sizes.restype = ctypes.c_uint64
        state, device, self._devices_at, self._calls_at, calls = (sizes(which) for which in range(5))
        assert (device, calls) == (DEVICE.size, len(CALLS)), "stub.c and its Python side disagree"
        # names of sockets are short: no folder of a test
        self._folder = tempfile.TemporaryDirectory(prefix="tw-fabric-")
        self.path = Path(self._folder.name) / "s"
        with self.path.open("w+b") as file:
            file.truncate(state)
            self.memory = mmap.mmap(file.fileno(), state)
        self._names: list[str] = []

    def close(self) -> None:
        """Take away what the adapters left."""
        self._folder.cleanup()

    def add(self, name: str, layer: int = INFINIBAND, gid_index: int = 0) -> None:
        """One more adapter."""
        number = len(self._names)
        self._names.append(name)
        gid = bytes.fromhex("fe80000000000000") + bytes([0, 2, 0xC9, 3, 0, 0, 0, number + 1])
        lid = 0 if layer == ETHERNET else 0x10 + number
        values = (name.encode(), layer, ACTIVE, lid, gid_index, gid, 0, 0)
        DEVICE.pack_into(self.memory, self._devices_at + number * DEVICE.size, *values)
        struct.pack_into("@I", self.memory, 0, number + 1)

    def state(self, name: str, state: int) -> None:
        self._put(name, 68, state)

    def lid(self, name: str, lid: int) -> None:
        self._put(name, 72, lid)

    def drops(self, name: str, drops: bool) -> None:
        """Whether all that the adapter sends and receives is lost."""
        self._put(name, 96, int(drops))

    def code(self, call: str, code: int, name: str = "") -> None:
        """What a function says of an adapter: an error number, `HANG`, or 0."""
        struct.pack_into("@I", self.memory, self._call(call, name), code)

    def made(self, call: str, name: str = "") -> int:
        """How often a function was called."""
        return int(struct.unpack_from("@I", self.memory, self._call(call, name) + 4)[0])

    def _put(self, name: str, at: int, value: int) -> None:
        struct.pack_into("@I", self.memory, self._devices_at + self._names.index(name) * DEVICE.size + at, value)

    def _call(self, call: str, name: str) -> int:
        device = self._names.index(name) if name else 0
        return int(self._calls_at + 8 * (CALLS.index(call) * DEVICES + device))
