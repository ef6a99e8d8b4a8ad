"""A stand-in for the NVIDIA driver library: compiled from stub.c, its answers in a file that a test changes while the library is in use."""

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

HERE = Path(__file__).parent
CALLS = re.findall(r"^CALL\((\w+)\)", (HERE / "calls.def").read_text(encoding="ascii"), re.MULTILINE)
RECORD = struct.Struct("@IIQQQII")
CODE, HANG, UNTOUCHED = 0, 0xFFFFFFFE, 1000
NOT_SUPPORTED = 3
U32, U64, I64, I32, DOUBLE = 1, 3, 4, 5, 0
MIB = 1024 * 1024
COMPILER = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")


@functools.cache
def built(prefix: str = "nvml", old: bool = False) -> Path:
    """The compiled library, once per process and kind."""
    target = Path(tempfile.mkdtemp(prefix="nvml-stub-")) / f"lib{prefix}{'-old' if old else ''}.so"
    options = [f"-DPREFIX={prefix}", *(["-DOLD"] if old else [])]
    assert COMPILER is not None, "no C compiler"
    subprocess.run(
        [COMPILER, "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *options, "-o", target, HERE / "stub.c"],
        check=True,
    )
    return target


class Stub:
    """The answers of a node of `gpus` GPUs; those of an H100 in a working node until a test changes them."""

    def __init__(self, path: Path, gpus: int = 1, library: Path | None = None) -> None:
        sizes = ctypes.CDLL(str(library or built())).stub_sizes
        sizes.restype = ctypes.c_uint64
        self._state, self._gpu, record, self._part, calls, self._gpus_at, *rest = (sizes(which) for which in range(12))
        self._calls_at, self._fields_at, self._gpm_at, self._parts_at, self._global_at, self._event_at = rest
        assert (record, calls) == (RECORD.size, len(CALLS)), "stub.c and its Python side disagree"
        self.path = path
        with path.open("w+b") as file:
            file.truncate(self._state)
            self.memory = mmap.mmap(file.fileno(), self._state)
        self.gpus(gpus)
        self._text(8, 80, "590.48.01")
        for gpu in range(gpus):
            self._healthy(gpu)

    # --- what there is ----------------------------------------------------------------------------------------------------------

    def gpus(self, count: int) -> None:
        """Number of GPUs that the driver reports."""
        struct.pack_into("@II", self.memory, 0, 0x57A7E, count)

    def name(self, gpu: int, uuid: str, pci: str, model: str = "NVIDIA H100 80GB HBM3") -> None:
        at = self._of(gpu)
        for offset, size, text in (
            (0, 64, uuid),
            (64, 32, pci),
            (96, 64, model),
            (160, 32, "1650"),
            (192, 32, "96.00"),
        ):
            self._text(at + offset, size, text)

    def lost(self, gpu: int, lost: bool = True) -> None:
        struct.pack_into("@I", self.memory, self._of(gpu) + 224, lost)

    def links(self, gpu: int, count: int, up: int) -> None:
        struct.pack_into("@II", self.memory, self._of(gpu) + 228, count, up)

    def part(self, gpu: int, index: int, gi: int, total: int, used: int, uuid: str) -> None:
        at = self._of(gpu) + self._parts_at + index * self._part
        struct.pack_into("@IIQQQ", self.memory, at, gi, 0, total, used, 0)
        self._text(at + 32, 64, uuid)
        struct.pack_into("@I", self.memory, self._of(gpu) + 236, index + 1)

    # --- what it answers --------------------------------------------------------------------------------------------------------

    def answer(
        self, name: str, *values: int, gpu: int | None = 0, code: int = 0, kind: int = 0, latency_us: int = 0
    ) -> None:
        """What a function says; for `gpu` None the function of the library itself."""
        self._record(self._at(name, gpu), code, kind, values, latency_us)

    def code(self, name: str, code: int, gpu: int | None = 0) -> None:
        """Change the result code only: this also ends a hang."""
        struct.pack_into("@I", self.memory, self._at(name, gpu), code)

    def latency_us(self, name: str, latency_us: int, gpu: int | None = 0) -> None:
        struct.pack_into("@I", self.memory, self._at(name, gpu) + 32, latency_us)

    def field(self, field: int, value: int = 0, kind: int = U64, gpu: int = 0, code: int = 0, took_us: int = 0) -> None:
        """What a field value says."""
        at = self._of(gpu) + self._fields_at + field * RECORD.size
        self._record(at, code, kind, (value & 0xFFFFFFFFFFFFFFFF, took_us), 0)

    def activity(self, metric: int, value: float, gpu: int = 0) -> None:
        struct.pack_into("@d", self.memory, self._of(gpu) + self._gpm_at + 8 * metric, value)

    def made(self, name: str, gpu: int | None = 0) -> int:
        """How often a function was called."""
        return int(struct.unpack_from("@I", self.memory, self._at(name, gpu) + 36)[0])

    def field_made(self, field: int, gpu: int = 0) -> int:
        """How often a field was asked for."""
        return int(struct.unpack_from("@I", self.memory, self._of(gpu) + self._fields_at + field * RECORD.size + 36)[0])

    def event(self, data: int, gpu: int = 0, kind: int = 0x8, gi: int = 0xFFFFFFFF) -> None:
        """An event of the driver."""
        head = struct.unpack_from("@I", self.memory, 88)[0]
        struct.pack_into("@IIQQ", self.memory, self._event_at + head % 64 * 24, gpu, gi, kind, data)
        struct.pack_into("@I", self.memory, 88, head + 1)

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _of(self, gpu: int) -> int:
        return int(self._gpus_at + gpu * self._gpu)

    def _at(self, name: str, gpu: int | None) -> int:
        base = self._global_at if gpu is None else self._of(gpu) + self._calls_at
        return int(base + CALLS.index(name) * RECORD.size)

    def _record(self, at: int, code: int, kind: int, values: tuple[int, ...], latency_us: int) -> None:
        made = struct.unpack_from("@I", self.memory, at + 36)[0]
        padded = [value & 0xFFFFFFFFFFFFFFFF for value in (*values, 0, 0, 0)[:3]]
        self.memory[at : at + RECORD.size] = RECORD.pack(code, kind, *padded, latency_us, made)

    def _text(self, at: int, size: int, text: str) -> None:
        self.memory[at : at + size] = text.encode()[: size - 1].ljust(size, b"\0")

    def _healthy(self, gpu: int) -> None:
        self.name(gpu, f"GPU-{gpu:08d}", f"00000000:{0x18 + gpu:02X}:00.0")
        self.links(gpu, 18, 18)
        answers: dict[str, tuple[int, ...]] = {
            "DeviceGetClockInfo": (1980, 2619), "DeviceGetTemperatureV": (59,), "DeviceGetTemperature": (59,),
            "DeviceGetTemperatureThreshold": (92, 89, 87), "DeviceGetMarginTemperature": (26,), "DeviceGetUtilizationRates": (100, 11),
            "DeviceGetPowerUsage": (631950,), "DeviceGetMemoryInfo": (81559 * MIB, 19818 * MIB, 479 * MIB),
            "DeviceGetMemoryInfo_v2": (81559 * MIB, 19818 * MIB, 479 * MIB), "DeviceGetCurrPcieLinkGeneration": (5,),
            "DeviceGetCurrPcieLinkWidth": (16,), "DeviceGetMaxPcieLinkGeneration": (5,), "DeviceGetMaxPcieLinkWidth": (16,),
            "DeviceGetComputeRunningProcesses_v3": (3,), "GpmQueryDeviceSupport": (1,), "DeviceGetSupportedEventTypes": (0xF608,),
        }  # fmt: skip
        for name, values in answers.items():
            self.answer(name, *values, gpu=gpu)
        self.answer("DeviceGetGpuFabricInfoV", 3, 0, 0xAAAA, gpu=gpu, kind=3)
        older = (3, 4, 5, 6, 38, 45, 52, 59, 74, 75, 76, 83, 94, 138, 139, 161, 162, 163)
        counters = (*older, 173, 179, 180, 197, 198, 269, 270, 271)
        for field in counters:
            self.field(field, 0, gpu=gpu, took_us=20)
        plain = {82: 54, 142: 0, 143: 0, 144: 0, 145: 0, 185: 631950, 186: 625680, 190: 700000, 230: 0}
        for field, value in plain.items():
            self.field(field, value, U32, gpu=gpu, took_us=20)
        for field, value in ((193, -8), (194, -2)):
            self.field(field, value, I32, gpu=gpu)
        for field in (29, 30, 202, 204, 215):
            self.field(field, gpu=gpu, code=NOT_SUPPORTED)
        for metric, percent in ((2, 93.5), (5, 61.25), (10, 40.0), (20, 100.0), (21, 200.0), (60, 300.0), (61, 400.0)):
            self.activity(metric, percent, gpu)
