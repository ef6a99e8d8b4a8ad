"""Benchmarks: each is a command that prints a table and writes JSON; ratios within one run."""

import streams  # noqa: F401 - before numpy: one thread for matrices, as in the product
