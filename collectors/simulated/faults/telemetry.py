"""Faults of telemetry: rows 31 and 54 of the taxonomy. The node is well, what it says is not."""

from __future__ import annotations

from collectors.simulated.faults.base import Drive, FaultClass, FaultKind, Show
from collectors.simulated.target import Scope

BROKEN = FaultClass.TELEMETRY
KEEP = "alert; the node is not to blame"

ROWS = (
    FaultKind("clock_skewed", 31, BROKEN, Scope.NODE, "a node's clock is off", ("host.clock_offset_ms+", "stamps+"),
              "alert, correct stamps", (Drive("skew_ms", lambda m: m),), (), (100, 500, 3000), "ms", 600),
    FaultKind("collector_dead", 54, BROKEN, Scope.NODE, "a collector sends nothing, training goes on", ("ticks-",), KEEP,
              (Drive("silent", 1),), duration_s=300),
    FaultKind("collector_stuck", 54, BROKEN, Scope.NODE, "a collector repeats its last values", ("stuck+",), KEEP, (Drive("stuck", 1),),
              duration_s=300),
    FaultKind("messages_late", 54, BROKEN, Scope.NODE, "messages of a node wait on the way", ("late+",), KEEP,
              (Drive("late_s", lambda m: m),), (), (3, 10, 60), "s", 300),
    FaultKind("rack_silent", 54, BROKEN, Scope.RACK, "the collectors of a rack lost their broker", ("ticks-",), KEEP, (Drive("silent", 1),),
              duration_s=180),
    FaultKind("sensor_stuck", 54, BROKEN, Scope.GPU, "one sensor reads nonsense", ("gpu.temp_c+",), KEEP,
              (Show("gpu.temp_c", "set", 255.0),), duration_s=600),
    FaultKind("counter_absent", 54, BROKEN, Scope.NODE, "the driver of the adapters reports no traffic counters", ("nic.absent+",), KEEP,
              (Show("nic.rx_bytes_per_s", "set", float("nan")), Show("nic.tx_bytes_per_s", "set", float("nan"))), duration_s=600),
)  # fmt: skip
