"""Stream processing: alignment, detection, incidents, the store and replay.

Matrices are multiplied by one thread. Those of a job's nodes are small (14 x 240), and OpenBLAS shares even these out: its threads spin
until the other one is done, which takes microseconds on an idle machine and milliseconds where the other has to wait for a processor.
It also makes the last bits of a sum depend on how many processors there are. The library reads this once, when numpy is loaded.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
