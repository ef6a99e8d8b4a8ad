"""Detectors that know a code's meaning."""
