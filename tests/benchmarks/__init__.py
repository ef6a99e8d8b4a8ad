"""Benchmarks are software too: their metrics, loaders and runner."""
