"""NVIDIA GPUs by NVML: `child` is the process that calls the driver, `parent` its keeper; everything else is shared or pure.

What the child loads is the standard library and this package only: it costs the memory of a bare interpreter and ctypes. For the same
reason NVML is bound here and not through nvidia-ml-py, whose 8,000 lines cost five megabytes; the tests compare every number and structure
used here with it.
"""
