"""Benchmark of anomaly detectors on public labelled series: ours and the usual tools, in one run.

`python -m benchmarks.detect --split tune` runs the tuning series, `--split test` the rest; see `docs/benchmark-detectors.md`.
"""
