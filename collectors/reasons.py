"""Why a source had nothing to say: every reason of a gap, what it means and what to do about it.

A reason is a code, ``deadline``; of one device or file among several it is ``hung:mlx5_0/1``; of one part of a source it is
``counters_hung:mlx5_0/1``. The table in docs/collectors.md is `table`, and the tests let no source give a reason that is not here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

REASONS: Mapping[str, tuple[str, str]] = {
    # of the agent, for any source
    "deadline": ("no answer within half an interval", "once is nothing; often: the node is starved, or the source is about to hang"),
    "hung": ("asked, and no answer came", "look at what it asks: a driver, a mount, a service that is stuck"),
    "backoff": ("it answered too late and rests for a while, up to a minute", "as for `deadline`"),
    "late": ("no answer yet, for less than two seconds (devices) or for 2.5 periods (pages)", "as for `hung`"),
    "error": ("failed in a way that nobody foresaw", "the collector's log has the trace: report it"),
    "os_error": ("the kernel refused, without saying why", "the collector's log"),
    "permission": ("may not be read", "see the table of capabilities and mounts above"),
    "missing": ("the file is not there", "mount it, or correct its path in the configuration"),
    "not_started": ("listens only while the agent runs", "nothing: `--once` does not start it"),
    "starting": ("the first answer is under way", "nothing"),
    "stale": ("the newest value is too old, or has not changed for long", "whoever writes it stands: restart that"),
    "unreadable": ("exists and cannot be read", "the collector's log names the file"),
    "malformed": ("came, and is not what it should be", "the collector's log quotes it"),
    "timeout": ("no whole answer within the deadline", "the service is overloaded, or stuck"),
    "unreachable": ("nobody there", "the address in the configuration; a firewall"),
    "over_limit": ("more files or ranks than are followed", "narrow the pattern"),
    "overwritten": ("the kernel overwrote records of its log before they were read; they are counted", "a longer ring: `log_buf_len`"),
    "positions_unsaved": ("positions in logs are not stored: lines may come twice after a restart", "room and rights on the spool's disk"),
    # of one source
    "spool_full": ("the disk takes no more records: the newest wait in memory", "make room, or move `collector.spool_directory`"),
    "spool_pressure": ("the broker is away and the spool more than half full: a fifth of the ticks", "the broker"),
    "no_interfaces": ("`nic`: no interface is left to read", "`collector.sources.nic.ignore`; host network of the pod"),
    "no_rail_address": ("`mesh`: the address that probes leave from is not here", "`collector.rail_address`"),
    "port_in_use": ("`mesh`: another program has the probe port", "`collector.probe_port`"),
    "stalled": ("`mounts`: a file system does not answer, its row says which", "the file server"),
    "request_stays": ("`stacks`: the request file cannot be taken away", "rights of `run_dir`"),
    "child_ended": ("`journal`: the program that reads it ended, with the code behind the colon", "run that by hand"),
    "podinfo": ("`kubernetes`: the downward API files cannot be read", "the volume of the DaemonSet"),
    "driver": ("`amd`: the bus has chips and no driver is bound to them", "load the driver"),
    "no_tool": ("chips, but neither a page nor a tool", "start the exporter, or put the tool into the image"),
    "several_hosts": ("`dcgm`: the page tells of more machines than one", "ask this node's own exporter"),
    "no_library": ("`nvidia`, `ppu`, `rdma_mesh`: the driver's library is not there", "the container runtime of the vendor; rdma-core"),
    "no_driver": ("`nvidia`, `ppu`: the library finds no driver", "load the driver"),
    "driver_hung": ("`nvidia`, `ppu`: opening the driver hangs", "restart the node"),
    "driver_changed": ("`nvidia`, `ppu`: the driver was replaced under its library", "nothing: it is opened again"),
    "helper_silent": ("`nvidia`, `ppu`, `rdma_mesh`: the process that asks the driver says nothing", "as for `driver_hung`"),
    "helper_restarting": ("`nvidia`, `ppu`, `rdma_mesh`: that process ended and begins anew", "the collector's log"),
    # of pages and tools
    "refused": ("refuses connections; of counters and disks: refuses to be read", "start it; rights"),
    "redirect": ("redirects to another host", "give the address it means"),
    "protocol": ("does not speak HTTP", "the port in the configuration"),
    "truncated": ("ends in the middle", "once is nothing; often: its memory or time limit"),
    "too_large": ("more than is read", "a page for less"),
    "empty": ("has nothing in it", "the exporter's log"),
    "not_metrics": ("is no metrics text", "the path in the address"),
    "no_metrics": ("has nothing that is read here", "which exporter is it?"),
    "not_json": ("a tool's answer is no JSON", "its version"),
    "no_chips": ("a tool's answer names no chip", "run it by hand"),
    "failed": ("a tool ended with an error", "run it by hand"),
}  # fmt: skip

PARTS: Mapping[str, str] = {
    "counters": "`rdma`: counters of ports", "statistics": "`ethtool`: statistics of drivers", "optics": "`ethtool`: optical modules",
    "disks": "`machine`: health of NVMe disks", "sensors": "`machine`: sensors and PCIe", "kernel": "`machine`: the kernel's tables",
    "slow": "`machine`: what is asked once a minute", "lldp": "`fabric`: neighbours by LLDP", "infiniband": "`fabric`: the InfiniBand file",
    "api": "`kubernetes`: the API server", "checkpoint": "`kubernetes`: the kubelet's device checkpoint", "smi": "the vendor's tool",
    "hccn": "`ascend`: `hccn_tool`",
}  # fmt: skip

_HTTP = re.compile(r"http_\d{3}")
_KERNEL = frozenset(name.lower() for name in errno.errorcode.values())


def meaning(reason: str) -> str:
    """One clause for a person: what the gap means; empty when nobody knows.

    Examples
    --------
    >>> meaning("counters_hung:mlx5_0/1")
    '`rdma`: counters of ports: asked, and no answer came (mlx5_0/1)'
    >>> meaning("http_503"), meaning("eio"), meaning("nonsense")
    ('the server answered with status 503', 'the kernel answered EIO', '')
    """
    code, _, detail = reason.partition(":")
    text = _of_code(code)
    part, _, rest = code.partition("_")
    if not text and part in PARTS and (said := _of_code(rest)):
        text = f"{PARTS[part]}: {said}"
    return f"{text} ({detail})" if text and detail else text


def _of_code(code: str) -> str:
    if code in REASONS:
        return REASONS[code][0]
    if _HTTP.fullmatch(code):
        return f"the server answered with status {code[5:]}"
    return f"the kernel answered {code.upper()}" if code in _KERNEL else ""


def table() -> str:
    """All of it as the two tables of docs/collectors.md."""
    rows = ["| reason | means | what to do |", "| --- | --- | --- |"]
    rows += [f"| `{code}` | {means} | {remedy} |" for code, (means, remedy) in REASONS.items()]
    rows += ["| `http_<status>` | the server answered with that status | the exporter's log |"]
    rows += ["| `eio`, `enodev`, ... | the kernel's own word, where it is none of the above | the kernel log |", ""]
    rows += ["| before it | of what part |", "| --- | --- |"]
    rows += [f"| `{part}_` | {what} |" for part, what in PARTS.items()]
    return "\n".join(rows) + "\n"
