"""Every parser of the collectors, with captures of what it reads and the errors by which it may refuse. Whoever writes one adds it here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from collectors import control, echo, patterns, spool, tail
from collectors.base import Context, Facts
from collectors.cloud import notices
from collectors.files import Files
from collectors.logs import flight, journal, prefix, ras, secrets, steplines, threads, traceback
from collectors.logs.cri import Joiner, labels_of
from collectors.logs.unpickle import PickleError
from collectors.machine import inventory, kernel, mounts, sensors, smart
from collectors.network import ethtool, modules, optics, rdma, roles
from collectors.network.counters import whole
from collectors.network.statistics import plan
from collectors.nvidia import decode, wire
from collectors.pages import amd_tools, ascend_faults, ascend_text, fetch, metax_text, text
from collectors.peers import PeerLearner
from collectors.ranks import RankBoard
from collectors.sources import dcgm, host, process, steps
from collectors.sources.nic import parse_dev, up_by_flags
from collectors.topology import apiserver, hostlist, ibnet, kubernetes, launch, lldp, processes, slurm
from collectors.topology import inventory as table
from collectors.verbs import addresses
from collectors.verbs import wire as rdma_wire
from tests.collectors.kit import Kept
from trainwarden import records
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import SimulatedClock
from trainwarden.errors import ConfigError, TrainwardenError
from trainwarden.selfmetrics import Metrics


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
    return joiner.holds(data), [joiner(line) for line in data.split(b"\n")]


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


@cache
def context() -> Context:
    """Of a source that is given texts and reads no file."""
    clock = SimulatedClock()
    files = Files(Path("/nowhere"), clock)
    return Context(
        "n0", clock, files, RankBoard(), Kept(), Metrics("fuzz"), Path("/nowhere"), Path("/nowhere"), Facts()
    )


def of_host(method: str) -> Callable[[bytes], object]:
    """A reader of the source `host`, asked twice: rates need two."""
    source = host.HostSource(context(), host.HostSource.Settings())
    read = getattr(source, method)
    return of_text(lambda text: [read(text), read(text)])


def pairs(data: bytes) -> object:
    """Lines of which some belong together in twos."""
    memory = patterns.PairMemory(log_patterns())
    lines = data.decode("utf-8", "replace").split("\n")[:200]
    return [(log_patterns().opens_pair(line), memory.feed(line)) for line in lines]


def answered(ask: Callable[[ethtool.Ask, str], object]) -> Callable[[bytes], object]:
    """A question to a network driver that answers with these bytes."""

    def parse(data: bytes) -> object:
        def kernel_of(interface: str, request: bytearray) -> None:
            del interface
            request[4 : 4 + len(data)] = data[: max(0, len(request) - 4)]

        return ask(kernel_of, "eth0")

    return parse


def ordered(data: bytes) -> object:
    """An order from afar; one that is refused becomes a dead letter."""
    letters: list[str] = []
    heard = control.Control(
        "n0", SimulatedClock(), Metrics("fuzz"), dict, lambda topic, reason, payload: letters.append(reason)
    )
    heard.hear(data)
    return letters, heard.interval_ms(1000)


def announced(data: bytes) -> object:
    """A node's announcement."""
    learner = PeerLearner(MemoryBus, SimulatedClock(), None)
    learner._take(data)
    return learner._peers


def objects(data: bytes) -> object:
    """What the API server says of a node and of its pods."""
    document = apiserver.parse_answer(200, data, "/api/v1/nodes/n0")
    read = kubernetes.pods_of_list if isinstance(document, dict) and "items" in document else kubernetes.labels_of_node
    return read(document)


def started(data: bytes) -> object:
    """Arguments and environment of a training process."""
    argv = [word.decode("utf-8", "replace") for word in data.split(b"\0")]
    return launch.parallel_attributes(processes.parse_environment(data), argv, 8)


NODE, MACHINE, H100, TOPOLOGY = "node/proc", "machine", "h100/sys/class/infiniband/mlx5_0/ports/1", "topology"
JOURNAL = b"__CURSOR=s=1\n__REALTIME_TIMESTAMP=1700000000000000\nMESSAGE=Xid (PCI:0000:3b:00): 79\n\nMESSAGE\n\x05\0\0\0\0\0\0\0a\nb c\n\n"
CRI = b'2026-01-02T03:04:05.678901234Z stdout P part one \n2026-01-02T03:04:05.7Z stdout F two\n{"log":"x\\n","stream":"stderr"}\n'
TRACEBACK = (
    b'[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 3, in f\n[rank1]: ValueError: no\n'
)
STEP = b'{"v":1,"t":"step","job":"j","generation":1,"node":"n0","rank":0,"world":4,"pid":7,"step":3,"duration_ms":60.1,"start_ns":1}'
TICK = records.encode(records.Tick(cluster="c", node="n0", blocks=(records.Block("host", "x", ("host",), bytes(16)),)))
RDMA_ADDRESS = addresses.Address(bytes.fromhex("fe80000000000000") + bytes(7) + b"\1", 0x1C, 0x24A, 0x7F3A9C01, "ib")
RDMA_PORTS = addresses.announcement({"mlx5_0/1": RDMA_ADDRESS, "mlx5_1/1": RDMA_ADDRESS}).encode()
RDMA_REPORT = rdma_wire.report(
    {"mlx5_0/1": ("", RDMA_ADDRESS), "b/1": ("hung", None)}, {"n1/b/1": [0.1, 0.2, 3, 1]}, {"rate": 2}, 1.5
)
RDMA_ORDERS = rdma_wire.orders(1.5, {"mlx5_0/1": [("n1/mlx5_0/1", RDMA_ADDRESS)]})
PLACE = records.encode(
    records.TopologyEvent(entity="node:n1", attributes={"probe_address": "10.0.0.2:9471", "leaf": "l1"})
)
ORDER = records.encode(
    records.CollectorOrder(
        key="interval_ms", value="5s", nodes="gpu[01-08],n0", observed_at_ns=1, expires_at_ns=60_000_000_000
    )
)
SPOOLED = spool._frame(spool.Entry(spool.Value.LOG, 1, "tw.logs", b"k", TICK)) * 2
DEEPSPEED = b"""  train_batch_size ............. 512
[2026-01-05 10:11:12,345] [INFO] [logging.py:96:log_dist] [Rank 0] step=120, skipped=2, lr=[0.00015], mom=[(0.9, 0.95)]
[2026-01-05 10:11:12,346] [INFO] [timer.py:260:stop] epoch=0/micro_step=480/global_step=120, RunningAvgSamplesPerSec=12.51
  2%|2         | 20/1000 [01:29<2:24:02,  4.00it/s]{'loss': 2.3142, 'grad_norm': 0.431, 'learning_rate': 0.00015, 'epoch': 0.12}
"""
MAINTENANCE = b'[{"NotBefore":"21 Jan 2019 09:00:43 GMT","Code":"system-reboot","EventId":"i-1","State":"active"}]'
UPCOMING = b'{"type":"SCHEDULED","windowStartTime":"2024-12-01T08:00:00-08:00","canReschedule":"true"}'
AZURE = (
    b'{"DocumentIncarnation":1,"Events":[{"EventId":"f0","EventType":"Freeze","Resources":["vm0"],'
    b'"NotBefore":"Mon, 19 Sep 2016 18:29:47 GMT"}]}'
)
ALIBABA = b'[{"eventId":"e-1","eventType":"SystemMaintenance.Reboot","notBefore":"2024-01-01T00:00:00Z"}]'
TITAN = b"[rank3]:[titan] 2026-01-05 10:11:12,900 - root - INFO - step:  6  loss:  2.9  grad_norm:  0.5  memory: 1GiB  tps: 9\n"
XID = b"[ 12.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
ABORTED = b"""terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 3] NCCL watchdog thread terminated
Exception raised from run at /pytorch/x.cpp:42 (most recent call first):
Fatal Python error: Segmentation fault
Current thread 0x00007f (most recent call first):
  File "t.py", line 3 in f
"""
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
    "log.patterns": Parser(by_lines(lambda line: log_patterns().match(line)), (XID, "log-lines/labelled.tsv", "log-lines/patterns.tsv")),
    "log.prefix": Parser(by_lines(prefix.unprefixed), ("log-lines/labelled.tsv", TRACEBACK)),
    "log.secrets": Parser(by_lines(secrets.redact), (b"password=hunter2 Authorization: Bearer abc.def AKIA0123456789ABCDEF\n", TRACEBACK)),
    "log.traceback": Parser(failures, (TRACEBACK, ABORTED, "steplog/megatron_v100.out")),
    "log.container": Parser(joined, (CRI,)),
    "log.names": Parser(of_text(labels_of), (b"/var/log/pods/ns_pod-0_1f2e-3d/trainer/0.log",)),
    "log.journal": Parser(entries, (JOURNAL,)),
    "log.steps": Parser(by_lines(steplines.parse),
                        (DEEPSPEED, TITAN, "steplog/iteration-lines.txt", "steplog/mlperf_b200.txt", "steplog/dlrover_events.log")),
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
    "rdma.ports": Parser(of_text(addresses.announced), (RDMA_PORTS,)),
    "rdma.sender": Parser(lambda d: addresses.sender_of(d, 1, True), (b"\x60" + bytes(39), bytes(20) + b"\x45" + bytes(19))),
    "rdma.report": Parser(rdma_wire.report_of, (RDMA_REPORT,), (rdma_wire.WireError,)),
    "rdma.orders": Parser(rdma_wire.orders_of, (RDMA_ORDERS,), (rdma_wire.WireError,)),
    "wire.hook": Parser(steps.parse, (STEP,), (steps.WireError,)),
    "wire.probe": Parser(echo.parse, (echo.request(bytes(16)), echo.reply(bytes(16), 1, 2))),
    "wire.record": Parser(packed, (TICK,), (TrainwardenError,)),
    "proc.pid": Parser(of_text(processes._number), (b"26231",)),
    "proc.cpu": Parser(of_host("_cpu"), (f"{NODE}/stat",)),
    "proc.loadavg": Parser(of_host("_load"), (f"{NODE}/loadavg",)),
    "proc.diskstats": Parser(of_host("_disks"), (f"{NODE}/diskstats",)),
    "proc.groups": Parser(of_text(lambda t: process.Cgroups(context())._groups(t)), (b"0::/a/b\n4:cpu,cpuacct:/docker/1f\n",)),
    "proc.throttling": Parser(of_text(process.throttled_s),
                              (b"usage_usec 1\nthrottled_usec 22\n", b"nr_periods 3\nthrottled_time 12345678\n")),
    "proc.release": Parser(of_text(inventory.os_name), (b'NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12"\n',)),
    "proc.memory": Parser(of_text(inventory.memory_gib), (f"{NODE}/meminfo",)),
    "proc.choice": Parser(of_text(inventory.chosen), (b"always [madvise] never\n",)),
    "proc.settings": Parser(lambda d: inventory.environment(d, ("IMAGE",)), (b"NCCL_DEBUG=INFO\0NCCL_IB_HCA=mlx5\0TOKEN=x\0",)),
    "proc.launch": Parser(started, (b"train.py\0--tensor-model-parallel-size\0002\0--pp=2\0TRAINWARDEN_TP=2\0",)),
    "sys.flags": Parser(of_text(up_by_flags), (b"0x1003\n",)),
    "net.driver": Parser(answered(ethtool.driver), (bytes(range(200)), b"mlx5_core".ljust(32, b"\0") * 6)),
    "net.driver-names": Parser(answered(lambda ask, name: ethtool.names(ask, name, 4)),
                               (b"\x01\0\0\0\x04\0\0\0rx_packets".ljust(160, b"\0"),)),
    "net.driver-values": Parser(answered(lambda ask, name: ethtool.statistics(ask, name, 4)), (b"\x04\0\0\0" + bytes(range(64)),)),
    "net.driver-link": Parser(answered(ethtool.link_settings), (bytes(range(100)), bytes(8) + b"\xfd" * 8)),
    "net.driver-fec": Parser(answered(ethtool.active_fec), (b"\x08\0\0\0" * 3,)),
    "net.driver-module": Parser(answered(ethtool.module_memory), (b"\x11\0\0\0\0\x02\0\0" + bytes(range(256)),)),
    "gpu.shift": Parser(wire.shift_of, (wire.shift(1000), wire.shift(-5))),
    "gpu.address": Parser(of_text(dcgm.bus_address), (b"00000000:3B:00.0",)),
    "log.pairs": Parser(pairs, ("log-lines/labelled.tsv", "log-lines/patterns.tsv")),
    "log.text": Parser(tail.text_of, ("log-lines/labelled.tsv",)),
    "cloud.aws-maintenance": Parser(notices.aws_scheduled, (MAINTENANCE,), (ValueError,)),
    "cloud.aws-spot": Parser(notices.aws_spot, (b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}',), (ValueError,)),
    "cloud.aws-rebalance": Parser(notices.aws_rebalance, (b'{"noticeTime": "2020-10-27T08:22:00Z"}',), (ValueError,)),
    "cloud.google": Parser(notices.gcp_event, (b"TERMINATE_ON_HOST_MAINTENANCE", b"NONE"), (ValueError,)),
    "cloud.google-upcoming": Parser(notices.gcp_upcoming, (UPCOMING,), (ValueError,)),
    "cloud.google-preempted": Parser(notices.gcp_preempted, (b"TRUE", b"FALSE"), (ValueError,)),
    "cloud.azure": Parser(lambda d: notices.azure_events(d, "vm0"), (AZURE,), (ValueError,)),
    "cloud.alibaba": Parser(notices.alibaba_events, (ALIBABA,), (ValueError,)),
    "cloud.alibaba-spot": Parser(notices.alibaba_spot, (b"2015-01-05T18:02:00Z",), (ValueError,)),
    "place.object": Parser(objects, (f"{TOPOLOGY}/node.json", f"{TOPOLOGY}/pods.json"), (ValueError,)),
    "place.guid": Parser(of_text(ibnet.normal_guid), (b"0x506b4b0300c2f5a4", b"506b:4b03:00c2:f5a4")),
    "wire.order": Parser(ordered, (ORDER,)),
    "wire.announcement": Parser(announced, (PLACE,)),
    "wire.address": Parser(of_text(echo.split_address), (b"10.0.0.2:9471",), (ValueError,)),
    "wire.url": Parser(of_text(lambda t: fetch.parse_address(t, "url")), (b"http://127.0.0.1:9400/metrics",), (ConfigError,)),
    "spool": Parser(lambda d: list(spool._entries(d)), (SPOOLED,)),
}  # fmt: skip

WITHOUT_CAPTURE = {"metax.table", "ascend.info"}
"""Fed with a capture of many commands' answers, which they have to refuse as a whole."""
