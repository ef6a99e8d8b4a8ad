"""Faults of training software, storage and workload: rows 23 and 44 to 52 of the taxonomy. Most have no bad node."""

from __future__ import annotations

from collectors.simulated.faults.base import Drive, FaultClass, FaultKind, Say, Show, Stop
from collectors.simulated.target import Scope

STOPS, WORKLOAD, WARNS, CORRUPTS = FaultClass.FAIL_STOP, FaultClass.WORKLOAD, FaultClass.WARNING, FaultClass.CORRUPTION
SLOWS = FaultClass.FAIL_SLOW
NOBODY = "rebalance; isolate nobody"

ROWS = (
    FaultKind("rank_stuck", 44, STOPS, Scope.GPU, "a rank does not enter the collective, nothing else is wrong", ("gpu.gpu_util_ratio-",),
              "restart without the rank", stop=Stop.ABSENT),
    FaultKind("rank_frozen", 44, STOPS, Scope.GPU, "a rank's process is stopped", ("process.state+", "process.cpu_cores-"), "restart",
              stop=Stop.STOPPED, duration_s=180),
    FaultKind("rank_killed", 44, STOPS, Scope.GPU, "a rank's process is killed", ("process.alive-", "log:worker_exit:-9"), "restart",
              stop=Stop.DIE, exit_code=-9, duration_s=60),
    FaultKind("code_deadlock", 45, STOPS, Scope.JOB, "ranks wait in different collectives", ("gpu.tensor_active_ratio-",),
              "restart, roll the code back; isolate nobody", stop=Stop.NETWORK),
    FaultKind("storage_slow", 46, WORKLOAD, Scope.JOB, "the data store is slow for a whole job", ("steps.data+", "steps.duration+",
              "host.psi_io_some_ratio+"), "alert storage, prefetch more; isolate nobody",
              (Drive("data", lambda m: m), Show("host.psi_io_some_ratio", "add", lambda m: 0.3 * m)), (), (0.1, 0.4, 1.0),
              "shares of a step", 900),
    FaultKind("loader_slow", 46, SLOWS, Scope.NODE, "data loading of one node is slow", ("steps.data+", "steps.duration+",
              "host.psi_io_some_ratio+"), "alert; isolate when it stays with the node",
              (Drive("data", lambda m: m), Show("host.psi_io_some_ratio", "add", lambda m: 0.3 * m)), (), (0.1, 0.5, 1.0),
              "shares of a step", 600, bad_node=True),
    FaultKind("checkpoint_stall", 47, WORKLOAD, Scope.JOB, "checkpoints take much longer", ("steps.checkpoint+",),
              "alert storage, keep the last good checkpoint; no restart", (Drive("checkpoint", lambda m: m),), (), (3, 6, 15),
              "times longer", 2400),
    FaultKind("checkpoint_failing", 47, WARNS, Scope.JOB, "checkpoints cannot be written", ("log:save_failed",),
              "alert, keep the last good checkpoint", (Drive("save_fails", 1),),
              (Say("save_failed", "save of step {step} failed: [Errno 5] Input/output error", "hook", every_s=300),), duration_s=900),
    FaultKind("loss_spike", 48, CORRUPTS, Scope.JOB, "loss and gradient norm jump on all ranks alike", ("steps.loss+",
              "steps.grad_norm_local+"), "roll back, skip the data", (Drive("loss_factor", lambda m: m),), (), (2, 5, 20),
              "times the loss", 120),
    FaultKind("loss_not_finite", 48, CORRUPTS, Scope.JOB, "the loss is not a number", ("steps.finite-",), "roll back to a checked state",
              (Drive("loss_factor", float("inf")),), duration_s=60),
    FaultKind("stage_imbalance", 49, WORKLOAD, Scope.JOB, "the last pipeline stage has too much to do", ("steps.stage+", "steps.duration+"),
              NOBODY, (Drive("last_stage", lambda m: m),), (), (0.1, 0.35, 0.6), "extra work", 1200),
    FaultKind("length_imbalance", 50, WORKLOAD, Scope.JOB, "batches differ much in length: another replica is slow each step",
              ("steps.spread+", "steps.duration+"), NOBODY, (Drive("lengths", lambda m: m),), (), (0.08, 0.2, 0.4), "spread of a batch",
              1200),
    FaultKind("expert_imbalance", 50, WORKLOAD, Scope.JOB, "experts get unequal shares of the tokens", ("steps.duration+",), NOBODY,
              (Drive("experts", lambda m: m),), (), (0.1, 0.25, 0.5), "spread of an expert", 1200),
    FaultKind("pauses", 23, WORKLOAD, Scope.JOB, "garbage collection stalls a random rank in most steps", ("steps.duration+",),
              "alert, tune; isolate nobody", (Drive("job_pause_s", lambda m: m),), (), (0.1, 0.5, 2.0), "seconds", 900),
    FaultKind("bad_release", 51, WORKLOAD, Scope.JOB, "new code is slower for everybody", ("steps.local+", "steps.duration+"),
              "roll back; isolate nobody", (Drive("work", lambda m: m),),
              (Say("", "release: image train:7f3a replaced by train:81c0", "scheduler", "info"),), (1.05, 1.2, 1.5), "times slower", 1200),
    FaultKind("maintenance", 52, STOPS, Scope.JOB, "the scheduler ends a job and starts it again", ("process.alive-",
              "log:worker_exit:-15"), "nothing: it was announced", (), (Say("preempted",
              "slurmstepd: error: *** JOB CANCELLED DUE TO PREEMPTION ***",
              "scheduler", "info"),), stop=Stop.DIE, exit_code=-15, duration_s=60),
)  # fmt: skip
