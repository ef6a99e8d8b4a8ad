"""Benchmarks: each is a command that prints a table and writes JSON; ratios within one run."""
