"""What the whole collector costs: `python -m benchmarks.collector`; see `__main__`."""
