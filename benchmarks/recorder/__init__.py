"""Recordings of a real job under real faults, made on one machine: see `benchmarks.recorder.__main__`."""
