"""Captured nodes as root trees, looked at as `trainwarden collect --once --root` does, and what was seen as one readable text.

A capture stands still, so its rates would all be 0 and a wrong unit would not show. Between two looks every counter is therefore raised by
1000 a second (errors by 1): a rate of 1000 is a count as it is, 4000 one of words of four octets, 0.001 one of microseconds.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from collectors import devices, patterns
from collectors.agent import build_sources, source_tables
from collectors.asking import Question
from collectors.base import Context, Facts, Sample, Source, registry
from collectors.files import Files
from collectors.ranks import RankBoard
from collectors.runner import take
from tests.collectors.kit import FIXTURES, Kept
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import Config
from trainwarden.selfmetrics import Metrics

NODE = "n0"
STEPS_S = (60, 1)
"""What is asked in a thread of its own sees the first step, what is read at once the second: both are told as a rate."""
TRAFFIC_PER_S, ERRORS_PER_S = 1000, 1
WHOLE_NUMBER = re.compile(r"(?<![\w.:-])\d+(?![\w.:])")
LAST_NUMBER = re.compile(r"\d+(?=\D*$)")
OURS = {"run_dir_free_bytes", "disk_used_ratio", "answer_ms", "used_ratio", "free_bytes", "inodes_used_ratio"}
"""Columns that a file system answers, and that is this machine's, not the capture's."""
OUR_FAMILIES = {"host", "board", "mount"}

TRAFFIC = (
    "proc/stat", "proc/vmstat", "proc/diskstats", "proc/pressure/*", "proc/net/dev", "proc/net/snmp", "proc/*/mountstats",
    "sys/class/infiniband/*/ports/*/counters/*_data", "sys/class/infiniband/*/ports/*/counters/*_packets",
    "sys/class/infiniband/*/ports/*/counters/port_xmit_wait", "sys/class/infiniband/*/ports/*/hw_counters/*",
    "sys/class/net/*/statistics/*",
)  # fmt: skip
ERRORS = (
    "sys/class/infiniband/*/ports/*/counters/*", "sys/devices/*/aer_dev_*", "sys/bus/pci/devices/*/aer_dev_*",
    "sys/devices/system/edac/mc/*/ce_count", "sys/devices/system/cpu/*/thermal_throttle/*",
)  # fmt: skip
STAY = ("*/hw_counters/lifespan",)
GAUGES = ("procs_", "btime", "nr_", "Tcp: RtoAlgorithm")
"""Lines of the files above that count nothing."""

Lay = Callable[[Path], None]


PATIENCE_S = 60.0


@dataclass(frozen=True)
class Capture:
    """One captured node: how it becomes a root tree, and what a source needs to be told to find it."""

    name: str
    lay: Lay
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    counters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More counters to raise: file → how the lines begin whose last number counts."""
    start_s: int = 1_700_000_000


def tree(name: str, inside: str = "", below: str = "") -> Lay:
    """The folder `inside` of the archive tests/fixtures/<name>/tree.tar.gz, laid out at `below` of the root."""

    def lay(root: Path) -> None:
        unpacked = root.with_name("unpacked")
        with tarfile.open(FIXTURES / name / "tree.tar.gz") as archive:
            members = [replace_mode(member) for member in archive.getmembers()]
            if hasattr(tarfile, "data_filter"):  # from 3.11.4 on
                archive.extractall(unpacked, members, filter=_as_captured)
            else:
                archive.extractall(unpacked, members)
        shutil.copytree(unpacked / inside, root / below, symlinks=True, dirs_exist_ok=True)

    return lay


def _as_captured(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """Links of /sys point out of the archive: they are kept, for they say where a device hangs; what they point to is never written."""
    return member if member.issym() else tarfile.data_filter(member, path)


def replace_mode(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Readable and writable for us, whatever it was on the node."""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


PCI_CLASS = {"infiniband": "0x020700", "nvme": "0x010802"}


def nfs(root: Path) -> None:
    """The part of node_exporter's tree that a process with an NFS mount has; the collector reads that of process 1."""
    tree("node_exporter")(root.with_name("all"))
    shutil.copytree(root.with_name("all") / "proc" / "10", root / "proc" / "1")


def snapshot(path: str) -> Lay:
    """A snapshot of /sys that was taken as JSON (path → content). Class directories, PCI classes and the list of interfaces, which the
    kernel always has and the snapshot has not, are added: what holds no adapter and no disk is called a bridge, counters begin at 0.
    """

    def lay(root: Path) -> None:
        names = []
        for name, content in json.loads(_snapshot(path)).items():
            _write(
                root,
                re.sub(r"^/sys/class/pci_bus/[^/]+/device/(?:.*/)?(?=[^/]+/[^/]+$)", "/sys/bus/pci/devices/", name),
                content,
            )
            names.append(name)
        for kind in ("infiniband", "net", "nvme"):
            for device in sorted({m.group(1) for m in map(re.compile(rf"(.*/{kind}/[^/]+)/").match, names) if m}):
                link = root / "sys/class" / kind / device.rpartition("/")[2]
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(root / device.lstrip("/"))
        for entry in (root / "sys/bus/pci/devices").glob("*/current_link_width"):
            kind = next((k for k in PCI_CLASS if (entry.parent / k).exists()), "")
            _write(entry.parent, "class", PCI_CLASS.get(kind, "0x060400"))
        interfaces = [entry.name for entry in sorted((root / "sys/class/net").glob("*"))]
        if interfaces:
            _write(
                root, "proc/net/dev", "Inter-|   Receive\n" + "".join(f"{n}:" + " 0" * 16 + "\n" for n in interfaces)
            )

    return lay


def _snapshot(path: str) -> bytes:
    """A file, or one of an archive: ``folder/archive.tar.gz/name``."""
    archive, inside, name = path.partition(".tar.gz/")
    if not inside:
        return (FIXTURES / path).read_bytes()
    with tarfile.open(FIXTURES / f"{archive}.tar.gz") as opened:
        member = opened.extractfile(name)
        assert member is not None
        return member.read()


def plain(name: str) -> Lay:
    """The tree tests/fixtures/<name>, as it lies there."""

    def lay(root: Path) -> None:
        shutil.copytree(FIXTURES / name, root, symlinks=True, dirs_exist_ok=True)

    return lay


def copied(*names: str, to: str = "") -> Lay:
    """Files of tests/fixtures, laid out at the root."""

    def lay(root: Path) -> None:
        (root / to).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(FIXTURES / name, root / to)

    return lay


def ionic(root: Path) -> None:
    """What the tools said of AMD's RoCE adapters, as the files of /sys from which the tools have it."""
    base = FIXTURES / "rocm-nic"
    states = {"ACTIVE": "4: ACTIVE", "LINK_UP": "5: LinkUp"}
    for line in (base / "rdma_link.txt").read_text(encoding="utf-8").splitlines():
        _, port, _, state, _, physical, *_ = line.split()
        device, _, number = port.partition("/")
        _write(root, f"sys/class/infiniband/{device}/ports/{number}/state", states[state])
        _write(root, f"sys/class/infiniband/{device}/ports/{number}/phys_state", states[physical])
        vendor = (base / f"sys_class_infiniband_{device}_device_vendor.txt").read_text(encoding="utf-8")
        _write(root, f"sys/class/infiniband/{device}/device/vendor", vendor)
    for port in json.loads((base / "rdma_statistic_j.txt").read_text(encoding="utf-8")):
        counters = f"sys/class/infiniband/{port['ifname']}/ports/{port['port']}/hw_counters"
        for name, value in port.items():
            if name not in ("ifname", "port"):
                _write(root, f"{counters}/{name}", f"{value}\n")


def _write(root: Path, name: str, content: str) -> None:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


# --- looking ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What all sources said at the last of three looks, and every event up to then."""

    sources: list[Source]
    samples: dict[str, Sample]
    context: Context
    outlet: Kept


def look(capture: Capture, root: Path, own: Path) -> Seen:
    """Look at a capture that is laid out at `root`, with all sources as an agent has them."""
    clock, outlet = SimulatedClock(capture.start_s * NS_PER_S), Kept()
    context = Context(NODE, clock, Files(root, clock), RankBoard(), outlet, Metrics("golden"), own, own, Facts())
    config = Config()
    config = replace(
        config, collector=replace(config.collector, root=root, sources={k: dict(v) for k, v in capture.tables.items()})
    )
    sources = build_sources(source_tables(config, NODE, own / "hook.sock"), context)
    be_patient(sources)
    with at_once():
        _all(sources, clock)
        pass_time(capture, root, sources, clock)
        samples = _all(sources, clock)
    for source in sources:
        source.close()
    return Seen(sources, samples, context, outlet)


def at_once() -> Any:
    """Ticks follow one another at once here: nothing is read ahead, which would be of the one before."""
    return patch.object(devices, "AHEAD_NS", 0)


def be_patient(sources: list[Source]) -> list[Source]:
    """Nothing hangs here: on a busy machine devices are waited for."""
    for source in sources:
        for value in vars(source).values():
            if isinstance(value, devices.Devices):
                value._wait_s = PATIENCE_S
    return sources


def pass_time(capture: Capture, root: Path, sources: list[Source], clock: SimulatedClock) -> None:
    """From the first look to the last one: counters rise, and whatever asks in a thread of its own has asked and been answered."""
    _settle(sources)
    for number, seconds in enumerate(STEPS_S):
        for _ in range(2 if number else 1):
            _all(sources, clock)
        raise_counters(root, capture, seconds)
        clock.advance_ns(seconds * NS_PER_S)
        if number < len(STEPS_S) - 1:
            _all(sources, clock)


class Passing(SimulatedClock):
    """A clock on which all of that happens while somebody sleeps."""

    def __init__(self, start_ns: int, passing: Callable[[SimulatedClock], None]) -> None:
        super().__init__(start_ns)
        self._passing = passing

    def sleep(self, seconds: float) -> None:
        del seconds
        self._passing(self)


def _all(sources: list[Source], clock: SimulatedClock) -> dict[str, Sample]:
    """A sample of each; whatever asks in a thread of its own has its answer before the next one."""
    samples = {source.name: take(source, clock.now_ns()) for source in sources}
    _settle(sources)
    return samples


def _settle(sources: list[Source]) -> None:
    for source in sources:
        for question in _questions(source):
            assert question.settle(PATIENCE_S), f"{source.name} was not answered"


def _questions(source: Source) -> Iterator[Question[Any]]:
    for value in vars(source).values():
        if isinstance(value, Question):
            yield value
        elif isinstance(value, dict):
            held = (getattr(entry, "question", entry) for entry in value.values())
            yield from (entry for entry in held if isinstance(entry, Question))


def raise_counters(root: Path, capture: Capture, seconds: int) -> None:
    """Every counter of the tree as it would be some seconds later. Files keep their inode: descriptors stay open on them."""
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink() or not path.is_file() or _matches(name, STAY):
            continue
        if _matches(name, TRAFFIC):
            _rewrite(path, lambda text: _raised(text, seconds * TRAFFIC_PER_S))
        elif _matches(name, ERRORS):
            _rewrite(path, lambda text: _raised(text, seconds * ERRORS_PER_S))
        elif name in capture.counters:
            _rewrite(path, lambda text, begin=capture.counters[name]: _raised_lines(text, begin, seconds))  # type: ignore[misc]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _raised(text: str, by: int) -> str:
    """Counters that stand at the maximum of their four or eight bits stay there."""
    stuck = ("15", "255", "65535", "4294967295")
    if text.strip() in stuck:
        return text
    return "".join(
        line if line.startswith(GAUGES) else WHOLE_NUMBER.sub(lambda m: str(int(m.group()) + by), line)
        for line in text.splitlines(keepends=True)
    )


def _raised_lines(text: str, begin: tuple[str, ...], seconds: int) -> str:
    return "".join(
        LAST_NUMBER.sub(lambda m: str(int(m.group()) + seconds * TRAFFIC_PER_S), line)
        if line.lstrip().startswith(begin) else line
        for line in text.splitlines(keepends=True)
    )  # fmt: skip


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    with path.open("r+", encoding="utf-8") as file:
        changed = change(file.read())
        file.seek(0)
        file.write(changed)
        file.truncate()


# --- telling ---------------------------------------------------------------------------------------------------------------------


def told(seen: Seen) -> str:
    """Values with their units by family and device, columns without a value, facts, events and gaps: sorted, one thing a line."""
    units = {f.name: {m.name: m.unit for m in f.metrics} for source in seen.sources for f in source.families}
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for sample in seen.samples.values():
        for block in sample.blocks:
            for device, values in block.rows():
                row = dict(zip(units[block.family], values, strict=True))
                rows.setdefault((block.family, device), {}).update(row)
    return "\n".join([*_table(rows, units), *_rest(seen)]) + "\n"


def told_by_command(output: Mapping[str, Any]) -> str:
    """The same of what `trainwarden collect --once` printed: it prints no events, and not who said a fact."""
    units = {f.name: {m.name: m.unit for m in f.metrics} for kind in registry().all().values() for f in kind.families}
    rows = {
        (family, device): {name: math.nan if value is None else value for name, value in row.items()}
        for family, table in output["families"].items()
        for device, row in table.items()
    }
    facts = [f"  {key} = {value}" for key, value in sorted(output["topology"].items())]
    gaps = [
        f"  {source}: {reason}" for source, reason in sorted({(gap["source"], gap["reason"]) for gap in output["gaps"]})
    ]
    lines = [*_table(rows, units), *["facts"] * bool(facts), *facts, *["gaps"] * bool(gaps), *gaps]
    return "\n".join(lines) + "\n"


def without_events(agreed: str) -> str:
    """A golden text as the command tells it."""
    kept, part = [], ""
    for line in agreed.splitlines():
        part = part if line.startswith(" ") else line
        told_line = re.sub(r" \(\w+\)$", "", line) if part == "facts" else line
        kept += [told_line] * (part != "events")
    return "\n".join(kept) + "\n"


def _table(rows: Mapping[tuple[str, str], Mapping[str, float]], units: Mapping[str, Mapping[str, str]]) -> list[str]:
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (family, device), row in sorted(rows.items()):
        alike.setdefault((family, tuple(_row(family, row, units[family]))), []).append(device)
    return [line for (family, body), devices in alike.items() for line in (*_folded(family, devices), *body)]


def _row(family: str, row: Mapping[str, float], units: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(row.items()):
        if not math.isnan(value):
            ours = family in OUR_FAMILIES and name in OURS
            yield f"  {name} = {'of this machine' if ours else f'{value:.6g} {units[name]}'}"
    absent = sorted(name for name, value in row.items() if math.isnan(value))
    yield from _folded("  absent:", absent)


def _folded(head: str, names: list[str]) -> Iterator[str]:
    line = head
    for name in names:
        if len(line) + len(name) > 118:
            yield line
            line = "   "
        line += f" {name}"
    if names:
        yield line


def _rest(seen: Seen) -> Iterator[str]:
    facts = seen.context.facts.board.merged("node")
    yield from ["facts"] * bool(facts)
    yield from (f"  {key} = {claim.value} ({claim.source})" for key, claim in sorted(facts.items()))
    events = sorted({(e.source, e.severity, e.code, e.line) for e, _ in seen.outlet.logs})
    yield from ["events"] * bool(events)
    yield from (f"  {source} {severity} {code}: {line}" for source, severity, code, line in events)
    gaps = sorted({(gap.source, gap.reason) for sample in seen.samples.values() for gap in sample.gaps})
    yield from ["gaps"] * bool(gaps)
    yield from (f"  {source}: {reason}" for source, reason in gaps)


SECONDS_OF_NPU_PAGE = 1_606_402
"""When the captured page says that it was sampled; milliseconds since 1970, and wrong by the exporter's own doing."""
DCGM_COUNTERS = tuple(
    f"DCGM_FI_DEV_{name}" for name in ("TOTAL_ENERGY", "PCIE_REPLAY", "POWER_VIOLATION", "THERMAL_VIOLATION")
)
CAPTURES = (
    Capture("procfs", tree("procfs", "fixtures")),
    Capture("node_exporter", tree("node_exporter")),
    Capture("node_exporter-nfs", nfs),
    Capture("h100", tree("gpud-infiniband-h100", "sys-class-infiniband-h100.0", "sys/class/infiniband")),
    *(Capture(f"gcm-{name}", snapshot(f"gcm-health/{name}.json"))
      for name in ("learn_good", "learn_ib_intf_bad_rate", "learn_ib_intf_operstate_down", "learn_stuck_ib_intf", "cache_downlink")),
    *(Capture(f"gcm-{name}", snapshot(f"gcm-health/snapshots.tar.gz/{name}.json"))
      for name in ("cache_milan_good", "cache_rome_good", "compute_samsung980pro", "compute_samsung980pro-downgraded",
                   "learn_ib_intf_bad_version", "learn_ib_misbound_if")),
    *(Capture(f"tree-{name}", plain(name)) for name in ("node", "h100", "machine", "rdma")),
    Capture("rocm-nic", ionic),
    *(Capture(f"rocm-smi-{name}", copied(f"amd/{name}.json"), {"amd": {"smi": f"file:/{name}.json"}},
              {f"{name}.json": ('"PCIe Replay Count"', '"Accumulated Energy (uJ)"')})
      for name in ("mi100_rocm571", "mi100_rocm602", "rx6700xt_rocm430", "rx6700xt_rocm571", "rx6700xt_rocm602",
                   "rx6700xt_rocm612", "vega-10-XT", "vega-20-WKS-GL-XE")),
    Capture("dcgm-h100", copied("dcgm/h100.prom"), {"dcgm": {"url": "file:/h100.prom"}}, {"h100.prom": DCGM_COUNTERS}),
    Capture("dcgm-mig", copied("dcgm/mig_new_names.prom"), {"dcgm": {"url": "file:/mig_new_names.prom"}}),
    Capture("npu-exporter", copied("ascend/npu_exporter.prom"), {"ascend": {"url": "file:/npu_exporter.prom"}},
            start_s=SECONDS_OF_NPU_PAGE - 61),
    Capture("npu-exporter-short", copied("ascend/npu_exporter_short.prom"),
            {"ascend": {"url": "file:/npu_exporter_short.prom"}}),
    *(Capture(f"hccn_tool-{name}", copied(f"ascend/{name}.txt"), {"ascend": {"hccn": f"file:/{name}.txt"}},
              {f"{name}.txt": ("roce_rx_err_pkt_num", "roce_tx_err_pkt_num")})
      for name in ("npu_info_before", "npu_info_after", "npu_info_kg")),
)  # fmt: skip


# --- log files -------------------------------------------------------------------------------------------------------------------

LOGS = (
    "gpud-logs/xid-dmesg-with-xid-119.log", "gpud-logs/kmsg-kmsg.1.log", "gpud-logs/kmsg-kmsg.2.peermem.log",
    "gpud-logs/nccl-segfault-dmesg.decode.iso.log", "gpud-logs/memory-dmesg.decode.iso.log", "gpud-logs/os-dmesg.decode.iso.log",
    "gpud-logs/fabric-manager-fabricmanager.log", "gpud-logs/pstore-dmesg-erst.txt",
    "ascend/plog-59420_20250124110314898.log", "ascend/plog-12337_20230704214646084.log", "ascend/device-1365_20250806230906733.log",
)  # fmt: skip


def told_of_log(path: Path) -> str:
    """What is known of the lines of a log: severity, code, how often, attributes of the first; and how many lines say nothing to us."""
    known = patterns.load()
    pairs = patterns.PairMemory(known)
    found: dict[str, tuple[int, patterns.Hit]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    unknown = 0
    for line in lines:
        hit = pairs.feed(line) or known.match(line)
        unknown += hit is None
        if hit is not None:
            found[hit.fold_key] = (found.get(hit.fold_key, (0, hit))[0] + 1, hit)
    told_lines = [f"{len(lines)} lines, {unknown} of them not known"]
    for count, hit in sorted(found.values(), key=lambda each: (each[1].code, each[1].fold_key)):
        told_lines.append(f"{hit.severity} {hit.code} x{count}")
        told_lines += [f"  {name} = {value}" for name, value in sorted(hit.attributes.items())]
    return "\n".join(told_lines) + "\n"
