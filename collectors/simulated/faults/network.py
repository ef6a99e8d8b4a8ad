"""Faults of ports, links, switches and the fabric: rows 34 to 43 of the taxonomy."""

from __future__ import annotations

from collectors.simulated.faults.base import CLIMB, Drive, FaultClass, FaultKind, Say, Show, Stop, pulses, rise
from collectors.simulated.layout import SPINES
from collectors.simulated.target import Scope

STOPS, SLOWS, WARNS = FaultClass.FAIL_STOP, FaultClass.FAIL_SLOW, FaultClass.WARNING
DOWN = Say("link_down", "mlx5_core 0000:{bus}:00.0 {port}: Link down")


def _congested(rate: float) -> tuple[Show, ...]:
    return (Show("nic.ecn_marked_per_s", "count", lambda m: rate * m), Show("nic.cnp_sent_per_s", "count", lambda m: 0.7 * rate * m),
            Show("nic.rx_wait_per_s", "add", lambda m: 20 * rate * m))  # fmt: skip


ROWS = (
    FaultKind("nic_down", 34, STOPS, Scope.NIC, "a port loses its link", ("nic.up-", "nic.carrier-", "log:link_down", "mesh.lost_count+"),
              "reroute if there is a way, else isolate, restart", (Drive("down", 1), Drive("probe_loss", 1.0)), (DOWN,),
              stop=Stop.NETWORK, bad_node=True),
    FaultKind("link_flapping", 35, WARNS, Scope.NIC, "a link is lost for seconds, again and again", ("nic.link_downed_per_s+", "nic.up-",
              "log:link_down", "steps.duration+"), "alert; reroute or isolate at the third in an hour",
              (Drive("down", 1), Drive("probe_loss", 1.0), Show("nic.link_downed_per_s", "add", 0.2),
               Show("nic.link_recovery_per_s", "add", 0.2)),
              (Say("link_down", "mlx5_core 0000:{bus}:00.0 {port}: Link down", severity="warning", every_s=90),), (1, 1, 1), "",
              600, pulses(90, 5), bad_node=True),
    FaultKind("port_slow", 36, SLOWS, Scope.NIC, "a port agreed on a lower speed", ("nic.speed_mbps-", "steps.duration+", "mesh.rtt_ms+"),
              "isolate or reroute", (Drive("bandwidth", lambda m: 1 / m), Drive("latency_ms", lambda m: 0.05 * m),
              Show("nic.speed_mbps", "mul", lambda m: 1 / m)), (), (2, 4, 8), "times slower", 900, bad_node=True),
    FaultKind("bit_errors", 37, SLOWS, Scope.NIC, "bit errors and retransmits", ("nic.symbol_errors_per_s+", "nic.rx_errors_per_s+",
              "port.fec_corrected_per_s+", "port.rx_power_dbm-"), "alert, ticket; reroute or isolate the port",
              (Show("nic.symbol_errors_per_s", "count", lambda m: 400 * m), Show("nic.rx_errors_per_s", "count", lambda m: 60 * m),
               Show("port.fec_corrected_per_s", "count", lambda m: 5e4 * m), Show("port.rx_power_dbm", "add", -3.0),
               Drive("bandwidth", lambda m: 1 / (1 + 6 * m)), Drive("loss", lambda m: 0.01 * m)), (), (0.01, 0.08, 0.3),
              "share of traffic repeated", 900, rise(120), bad_node=True),
    FaultKind("optics_to_failure", 37, WARNS, Scope.NIC, "an optical module ages until the link is lost", ("port.rx_power_dbm-",
              "port.fec_corrected_per_s+", "port.module_temp_c+", "log:link_down"), "alert, reroute before it fails",
              (Show("port.rx_power_dbm", "add", lambda m: -m), Show("port.fec_corrected_per_s", "count", 3e4),
               Show("port.module_temp_c", "add", 9.0), Show("nic.symbol_errors_per_s", "count", 20)),
              (Say("link_down", "mlx5_core 0000:{bus}:00.0 {port}: Link down", after_s=-1),), (3, 6, 9), "dB lost at the end", 900, CLIMB,
              stop=Stop.NETWORK, stop_at=0.85, bad_node=True),
    FaultKind("leaf_congestion", 38, SLOWS, Scope.LEAF, "traffic of others congests a leaf switch", ("nic.ecn_marked_per_s+",
              "nic.cnp_sent_per_s+", "mesh.rtt_ms+", "steps.duration+"), "reroute or place elsewhere; isolate nobody",
              (Drive("bandwidth", lambda m: 1 - m), Drive("latency_ms", lambda m: 0.4 * m), *_congested(3000)), (), (0.3, 0.6, 0.85),
              "bandwidth lost", 900, rise(20)),
    FaultKind("fabric_congestion", 38, SLOWS, Scope.FABRIC, "the whole fabric is congested", ("nic.ecn_marked_per_s+", "mesh.rtt_ms+",
              "steps.duration+"), "reroute or place elsewhere; isolate nobody",
              (Drive("bandwidth", lambda m: 1 - m), Drive("latency_ms", lambda m: 0.3 * m), *_congested(2000)), (), (0.2, 0.4, 0.7),
              "bandwidth lost", 600, rise(30)),
    FaultKind("slow_receiver", 39, SLOWS, Scope.NIC, "a host drains its port slowly and pauses the switch", ("port.pause_tx_per_s+",
              "steps.duration+", "mesh.rtt_ms+"), "isolate the source of the pauses",
              (Drive("bandwidth", lambda m: 1 - m), Drive("latency_ms", lambda m: 0.5 * m),
               Show("port.pause_tx_per_s", "count", lambda m: 5e4 * m)), (), (0.3, 0.7, 0.9), "bandwidth lost", 600, rise(10),
              bad_node=True),
    FaultKind("packet_loss", 40, SLOWS, Scope.NIC, "packets get lost on a port", ("nic.out_of_sequence_per_s+",
              "nic.retransmit_timeouts_per_s+", "mesh.lost_count+", "steps.duration+"), "reroute; isolate when it is one host's",
              (Drive("loss", lambda m: m), Drive("bandwidth", lambda m: 1 / (1 + 60 * m)), Drive("probe_loss", lambda m: 6 * m),
               Show("nic.out_of_sequence_per_s", "count", lambda m: 4e4 * m),
               Show("nic.retransmit_timeouts_per_s", "count", lambda m: 500 * m)), (), (0.0005, 0.02, 0.1), "share of packets", 600,
              bad_node=True),
    FaultKind("leaf_degraded", 41, SLOWS, Scope.LEAF, "a leaf switch forwards slowly and drops", ("mesh.rtt_ms+", "mesh.lost_count+",
              "nic.out_of_sequence_per_s+", "steps.duration+"), "reroute, avoid the leaf; isolate nobody",
              (Drive("bandwidth", lambda m: 1 - m), Drive("latency_ms", lambda m: 0.6 * m), Drive("probe_loss", lambda m: 0.3 * m),
               Show("nic.out_of_sequence_per_s", "count", lambda m: 300 * m)), (), (0.3, 0.6, 0.9), "bandwidth lost", 600),
    FaultKind("leaf_dead", 41, STOPS, Scope.LEAF, "a leaf switch is dead: one rail of a pod is cut off", ("nic.up-", "nic.carrier-",
              "mesh.lost_count+", "log:link_down"), "reroute, restart elsewhere; isolate nobody", (Drive("down", 1), Drive("probe_loss",
              1.0)),
              (DOWN,), stop=Stop.NETWORK),
    FaultKind("rail_degraded", 41, SLOWS, Scope.RAIL, "one rail is slow on all nodes", ("mesh.rtt_ms+", "steps.duration+",
              "nic.rx_wait_per_s+"), "reroute off the rail; isolate nobody",
              (Drive("bandwidth", lambda m: 1 - m), Drive("latency_ms", lambda m: 0.5 * m), *_congested(500)), (), (0.2, 0.5, 0.9),
              "bandwidth lost", 600),
    FaultKind("spine_degraded", 41, SLOWS, Scope.SPINE, "a spine switch loses capacity; what hashing put there is slow", ("mesh.rtt_ms+",
              "mesh.lost_count+"), "reroute around the spine; isolate nobody",
              (Drive("bandwidth", lambda m: 1 - m / SPINES), Drive("latency_ms", lambda m: 0.8 * m), Drive("probe_loss",
              lambda m: 0.3 * m)),
              (), (0.3, 0.7, 1.0), "capacity lost", 600),
    FaultKind("ecmp_collision", 42, SLOWS, Scope.PAIR, "flows of two nodes share one path", ("steps.duration+", "mesh.rtt_ms+"),
              "reroute (another queue pair or port), rebalance",
              (Drive("bandwidth", lambda m: 1 / m), Drive("latency_ms", 0.12)), (), (1.1, 1.5, 2.0), "times slower", 900),
)  # fmt: skip
