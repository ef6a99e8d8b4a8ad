"""Every parser of the collectors, fed with damaged captures: it answers, or refuses with the error that it names. Nothing else, ever.

Some damages each by default, with ``-m long`` thousands. A case is named by its parser and number, so that it can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest

from collectors import echo, patterns
from collectors.logs import flight, journal, prefix, ras, secrets, steplines, threads, traceback
from collectors.logs.cri import Joiner, labels_of
from collectors.logs.unpickle import PickleError
from collectors.machine import inventory, kernel, mounts, sensors, smart
from collectors.network import modules, optics, rdma, roles
from collectors.network.counters import whole
from collectors.network.statistics import plan
from collectors.nvidia import decode, wire
from collectors.pages import amd_tools, ascend_faults, ascend_text, metax_text, text
from collectors.sources import host, process, steps
from collectors.sources.nic import parse_dev
from collectors.topology import hostlist, ibnet, kubernetes, lldp, processes, slurm
from collectors.topology import inventory as table
from tests.collectors.kit import FIXTURES
from trainwarden import records
from trainwarden.errors import ConfigError, TrainwardenError

SEED_BYTES = 4000
SHORT, LONG = 60, 5000
JUNK = (
    b"", b"\0", b"\xff\xfe", b" ", b"\n", b"\r", b"\t", b":", b"=", b"-1", b"nan", b"inf", b"-inf", b"1e309", b"9" * 40, b"0x", b"\\777",
    "\u0663".encode(), "\u2028".encode(), b"[" * 60, b"{" * 60, b"(((", b"\"", b"'", b"%s", b"a" * 3000, b"\x1b[31m", b"[1-99999999]",
    b"<0>", b"null", b"true", b"{}", b"[]", b"\x80\x04", b".",
)  # fmt: skip


class Parser(NamedTuple):
    """What is fuzzed: its captures (files of tests/fixtures, or texts) and the errors that it may raise."""

    parse: Callable[[bytes], object]
    seeds: tuple[str | bytes, ...]
    refuses: tuple[type[Exception], ...] = ()


def of_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """A parser of text that others have decoded."""
    return lambda data: parse(data.decode("utf-8", "replace"))


def by_lines(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """A parser of single lines."""
    return lambda data: [parse(line) for line in data.decode("utf-8", "replace").split("\n")[:200]]


@cache
def log_patterns() -> patterns.PatternTable:
    """The shipped table."""
    return patterns.load()


def joined(data: bytes) -> object:
    """Lines of a container's log."""
    joiner = Joiner()
    return [joiner(line) for line in data.split(b"\n")]


def failures(data: bytes) -> object:
    """Tracebacks in lines that several ranks wrote."""
    reader = traceback.FailureReader()
    lines = data.decode("utf-8", "replace").split("\n")[:300]
    return [reader.feed(f"rank{number % 3}", line, number * 10**8) for number, line in enumerate(lines)]


def entries(data: bytes) -> object:
    """A stream of the journal, in two pieces."""
    reader = journal.JournalReader()
    half = len(data) // 2
    return [
        entry.cursor + entry.text("MESSAGE") + str(entry.realtime_us)
        for entry in reader.feed(data[:half]) + reader.feed(data[half:])
    ]


def stalls(data: bytes) -> object:
    """A flight record and what it says beside another one."""
    return [stall.text() for stall in flight.stalls([flight.read(data, 0), flight.read(data, 1)])]


def packed(data: bytes) -> object:
    """A record of the bus and the rows in it."""
    record = records.decode(data)
    return [block.rows() for block in record.blocks] if isinstance(record, records.Tick) else record


NODE, MACHINE, H100, TOPOLOGY = "node/proc", "machine", "h100/sys/class/infiniband/mlx5_0/ports/1", "topology"
JOURNAL = b"__CURSOR=s=1\n__REALTIME_TIMESTAMP=1700000000000000\nMESSAGE=Xid (PCI:0000:3b:00): 79\n\nMESSAGE\n\x05\0\0\0\0\0\0\0a\nb c\n\n"
CRI = b'2026-01-02T03:04:05.678901234Z stdout P part one \n2026-01-02T03:04:05.7Z stdout F two\n{"log":"x\\n","stream":"stderr"}\n'
TRACEBACK = (
    b'[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 3, in f\n[rank1]: ValueError: no\n'
)
STEP = b'{"v":1,"t":"step","job":"j","generation":1,"node":"n0","rank":0,"world":4,"pid":7,"step":3,"duration_ms":60.1,"start_ns":1}'
TICK = records.encode(records.Tick(cluster="c", node="n0", blocks=(records.Block("host", "x", ("host",), bytes(16)),)))
WANTED = frozenset({"DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_XID_ERRORS", "npu_chip_info_temperature"})
PARSERS: dict[str, Parser] = {
    "proc.dev": Parser(of_text(parse_dev), (f"{NODE}/net/dev",)),
    "proc.vmstat": Parser(of_text(kernel.vmstat), (f"{MACHINE}/proc/vmstat",)),
    "proc.softnet": Parser(of_text(kernel.softnet), (f"{MACHINE}/proc/net/softnet_stat",)),
    "proc.file-nr": Parser(of_text(kernel.file_handles), (f"{MACHINE}/proc/sys/fs/file-nr",)),
    "proc.interrupts": Parser(of_text(kernel.error_interrupts), (f"{MACHINE}/proc/interrupts",)),
    "proc.stat": Parser(of_text(kernel.stat_numbers), (f"{NODE}/stat",)),
    "proc.snmp": Parser(of_text(host.retransmits), (f"{NODE}/net/snmp",)),
    "proc.meminfo": Parser(of_text(host._memory), (f"{NODE}/meminfo",)),
    "proc.pid.stat": Parser(of_text(process.stat_fields), (f"{NODE}/26231/stat",)),
    "proc.environ": Parser(processes.parse_environment, (b"RANK=3\0WORLD_SIZE=8\0SLURM_JOB_ID=7\0",)),
    "proc.mountinfo": Parser(of_text(lambda t: mounts.parse_mounts(t, 24)), (f"{MACHINE}/proc/26231/mountinfo",)),
    "proc.mountstats": Parser(of_text(mounts.parse_mountstats), (f"{MACHINE}/proc/26231/mountstats",)),
    "proc.lustre": Parser(of_text(mounts.parse_lustre), (f"{MACHINE}/proc/vmstat", b"read_bytes 12 samples [bytes] 0 9 100\n")),
    "proc.cgroup": Parser(of_text(kubernetes.pod_of_cgroup), (b"0::/kubepods.slice/kubepods-pod1f2e_3d.slice/cri-containerd-ab.scope\n",)),
    "proc.cmdline": Parser(of_text(inventory.kernel_parameters), (b"BOOT_IMAGE=/vmlinuz root=/dev/vda1 iommu=pt pci=realloc\n",)),
    "proc.nvidia": Parser(of_text(inventory.nvidia_version), (b"NVRM version: NVIDIA UNIX Open Kernel Module  590.48.01\n",)),
    "sys.aer": Parser(of_text(lambda t: sensors.aer_total(t, "TOTAL_ERR_COR")),
                      (f"{MACHINE}/sys/bus/pci/devices/0000:01:00.0/aer_dev_correctable",)),
    "sys.link": Parser(of_text(sensors.transfers), (b"16.0 GT/s PCIe\n",)),
    "sys.state": Parser(of_text(rdma.number_of_state), (f"{H100}/state",)),
    "sys.rate": Parser(of_text(rdma.gigabits), (f"{H100}/rate",)),
    "sys.counter": Parser(whole, (f"{H100}/counters/port_rcv_data", b"N/A (no PMA)\n")),
    "net.names": Parser(of_text(lambda t: rdma.hardware_plan(t.split("\n"), set(), 32)), ("rocm-nic/ethtool_S_enp68s0.txt",)),
    "net.statistics": Parser(of_text(lambda t: plan(t.split("\n"))), ("rocm-nic/ethtool_S_enp68s0.txt",)),
    "net.routes": Parser(of_text(lambda t: roles.default_routes(t, t)), (b"eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n",)),
    "net.optics": Parser(optics.decode, tuple(bytes([kind]) + bytes(range(256)) * 10 for kind in (0x03, 0x11, 0x18))),
    "net.netlink": Parser(modules.answer, (modules.message(20, 31, 1, modules.attribute(7, bytes(128))),), (OSError,)),
    "disk.health": Parser(smart.decode_health, (bytes(range(256)) * 2,)),
    "gpu.fields": Parser(decode.field_results, (bytes(range(200)),)),
    "gpu.pci": Parser(of_text(decode.pci_address), (b"00000000:3B:00.0", b"0000:3b:00")),
    "gpu.frame": Parser(lambda d: wire.frame_of(d, 8, 4), (wire.Frame(1, 2, 3, 4, 5, 6, 7, 8, bytes(40)).pack(),), (wire.WireError,)),
    "gpu.facts": Parser(wire.facts_of, (wire.inventory(3, {"gpus": [{"name": "gpu0", "uuid": "GPU-1"}]}),), (wire.WireError,)),
    "page": Parser(text.Reader(WANTED).read, ("dcgm/h100.prom", "ascend/npu_exporter.prom"), (text.PageError,)),
    "amd.json": Parser(amd_tools.parse_tool, ("amd/mi100_rocm602.json", "amd/vega-10-XT.json"), (text.PageError,)),
    "amd.list": Parser(amd_tools.parse_list, (b'[{"gpu": 0, "bdf": "0000:c1:00.0", "uuid": "x"}]',), (text.PageError,)),
    "ascend.info": Parser(of_text(ascend_text.parse_info), ("ascend/npu_info_after.txt",), (text.PageError,)),
    "ascend.health": Parser(of_text(ascend_text.parse_health), (b"Error Code : 80E01801 80E18402\n",)),
    "ascend.optical": Parser(of_text(ascend_text.parse_optical), (b"temperature : 45 C\nTx Power0 : 0.8 mW\nRx Power0 : 0.7 mW\n",)),
    "ascend.counts": Parser(of_text(ascend_text.parse_counts), (b"mac_tx_mac_pause_num:0\nroce_rx_cnp_pkt_num : 12\n",)),
    "ascend.link": Parser(of_text(ascend_text.parse_link), (b"link status: UP\n",)),
    "ascend.faults": Parser(of_text(lambda t: ascend_faults.parse_levels(t, "k")), ("ascend/faultCode.json",), (ConfigError,)),
    "metax.table": Parser(of_text(metax_text.parse_smi), ("ascend/npu_info_after.txt",), (text.PageError,)),
    "log.patterns": Parser(by_lines(lambda line: log_patterns().match(line)), ("log-lines/labelled.tsv", "log-lines/patterns.tsv")),
    "log.prefix": Parser(by_lines(prefix.unprefixed), ("log-lines/labelled.tsv", TRACEBACK)),
    "log.secrets": Parser(by_lines(secrets.redact), (b"password=hunter2 Authorization: Bearer abc.def AKIA0123456789ABCDEF\n", TRACEBACK)),
    "log.traceback": Parser(failures, (TRACEBACK, "steplog/megatron_v100.out")),
    "log.container": Parser(joined, (CRI,)),
    "log.names": Parser(of_text(labels_of), (b"/var/log/pods/ns_pod-0_1f2e-3d/trainer/0.log",)),
    "log.journal": Parser(entries, (JOURNAL,)),
    "log.steps": Parser(by_lines(steplines.parse),
                        ("steplog/iteration-lines.txt", "steplog/mlperf_b200.txt", "steplog/dlrover_events.log")),
    "stacks.flight": Parser(stalls, ("stacks/nccl_trace_rank_0", "stacks/nccl_trace_rank_2"), (PickleError,)),
    "stacks.ras": Parser(of_text(lambda t: ras.parse(t).text()), ("stacks/ras_behind.txt", "stacks/ras_dead.txt")),
    "stacks.py-spy": Parser(threads.from_py_spy, ("stacks/py_spy.json",), (threads.ThreadError,)),
    "place.lldp": Parser(of_text(lldp.parse_lldp), (f"{TOPOLOGY}/lldpctl.json", f"{TOPOLOGY}/lldpctl.json0"), (ValueError,)),
    "place.fabric": Parser(of_text(ibnet.parse_fabric), (f"{TOPOLOGY}/ibnetdiscover.txt", f"{TOPOLOGY}/iblinkinfo.txt"), (ValueError,)),
    "place.slurm": Parser(of_text(slurm.parse_topology), (f"{TOPOLOGY}/topology.conf", f"{TOPOLOGY}/scontrol.txt"), (ValueError,)),
    "place.hosts": Parser(of_text(hostlist.expand_hosts), (b"gpu[001-032,40],login1,n[1-2]x[3-4]",), (ValueError,)),
    "place.csv": Parser(of_text(lambda t: table.attributes_of(t, "gpu001", toml=False)), (f"{TOPOLOGY}/nodes.csv",), (ValueError,)),
    "place.toml": Parser(of_text(lambda t: table.attributes_of(t, "gpu001", toml=True)), (f"{TOPOLOGY}/nodes.toml",), (ValueError,)),
    "place.labels": Parser(of_text(kubernetes.parse_downward), (f"{TOPOLOGY}/podinfo-labels",)),
    "place.checkpoint": Parser(of_text(kubernetes.parse_checkpoint), (f"{TOPOLOGY}/checkpoint.json",), (ValueError,)),
    "wire.hook": Parser(steps.parse, (STEP,), (steps.WireError,)),
    "wire.probe": Parser(echo.parse, (echo.request(bytes(16)), echo.reply(bytes(16), 1, 2))),
    "wire.record": Parser(packed, (TICK,), (TrainwardenError,)),
}  # fmt: skip

WITHOUT_CAPTURE = {"metax.table", "ascend.info"}
"""Fed with a capture of many commands' answers, which they have to refuse as a whole."""


def seed_of(seed: str | bytes) -> bytes:
    """A capture's beginning."""
    return seed if isinstance(seed, bytes) else (FIXTURES / seed).read_bytes()[:SEED_BYTES]


def damaged(seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    """A capture with one to four damages of different kinds."""
    data = dice.choice(seeds)
    for _ in range(dice.randrange(1, 5)):
        data = dice.choice(KINDS)(data, seeds, dice)[: 2 * SEED_BYTES]
    return data


def cut(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    return data[: dice.randrange(len(data) + 1)]


def without(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    at = dice.randrange(len(data) + 1)
    return data[:at] + data[at + dice.randrange(1, 40) :]


def stuffed(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(JUNK) + data[at:]


def overwritten(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    at, junk = dice.randrange(len(data) + 1), dice.choice(JUNK)
    return data[:at] + junk + data[at + len(junk) :]


def flipped(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    changed = bytearray(data)
    for _ in range(min(len(changed), dice.randrange(1, 8))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def spliced(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    other = dice.choice(seeds)
    return data[: dice.randrange(len(data) + 1)] + other[dice.randrange(len(other) + 1) :]


def shuffled(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    lines = data.split(b"\n")
    dice.shuffle(lines)
    return b"\n".join(lines + lines[:3])


def noise(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del data, seeds
    return dice.randbytes(dice.randrange(300))


KINDS = (cut, without, stuffed, overwritten, flipped, spliced, shuffled, noise)


def cases(name: str, count: int) -> Iterator[bytes]:
    """Damaged captures of a parser; the first ones are those that everybody forgets."""
    seeds = tuple(seed_of(seed) for seed in PARSERS[name].seeds)
    yield from (b"", b"\n", b"\0" * 100, b"\xff" * 100, b" " * 5000, b"9" * 5000, b"[" * 5000, *seeds)
    for number in range(count):
        yield damaged(seeds, random.Random(f"{name}/{number}"))


def fuzz(name: str, count: int) -> None:
    """Feed a parser."""
    parser = PARSERS[name]
    for number, data in enumerate(cases(name, count)):
        try:
            parser.parse(data)
        except parser.refuses:
            continue
        except Exception as error:
            raise AssertionError(f"{name}, case {number}: {error!r}; {len(data)} bytes: {data[:300]!r}") from error


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_parser_answers_or_refuses(name: str) -> None:
    fuzz(name, SHORT)


@pytest.mark.parametrize("name", sorted(set(PARSERS) - WITHOUT_CAPTURE))
def test_a_whole_capture_is_not_refused(name: str) -> None:
    for seed in PARSERS[name].seeds:
        PARSERS[name].parse(seed if isinstance(seed, bytes) else (FIXTURES / seed).read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_parser_answers_or_refuses_whatever_comes(name: str) -> None:
    fuzz(name, LONG)
