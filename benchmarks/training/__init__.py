"""Benchmarks of the training side."""
