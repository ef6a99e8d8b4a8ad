"""Detectors on probes between nodes: which link, which leaf, or everybody."""
