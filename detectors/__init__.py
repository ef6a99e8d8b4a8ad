"""Detectors: pure functions of closed frames, one folder per family."""
