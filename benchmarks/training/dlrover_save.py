"""DLRover's Flash Checkpoint on the same state; run by `others.dlrover` in an interpreter that has dlrover.

It needs the saver of its launcher (dlrover-run); that one's part is taken by a thread here, as DLRover's own tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

# the names of the job, by which its shared memory is named, come from `others.dlrover`
os.environ.update(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", GROUP_RANK="0", GROUP_WORLD_SIZE="1",
    MASTER_ADDR="127.0.0.1", NODE_RANK="0", NODE_NUM="1",
)  # fmt: skip

import torch.distributed as dist
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver  # type: ignore
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType  # type: ignore

from benchmarks.training.state import Training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-mb", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args()
    AsyncCheckpointSaver.start_async_saving_ckpt()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    training = Training(given.state_mb)
    training.step()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = DdpCheckpointer(folder)
        for number in range(given.rounds + 2):
            started = time.perf_counter()
            checkpointer.save_checkpoint(number, training.state(), storage_type=StorageType.MEMORY)
            times.append(time.perf_counter() - started)
            time.sleep(0.2)
        print(json.dumps({"memory_s": times[2:], "first_s": times[0]}), flush=True)
    # Its own end waits for a launcher that is not there.
    os._exit(0)


if __name__ == "__main__":
    main()
