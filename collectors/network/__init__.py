"""Parsing of what network devices say: RDMA counters, ethtool answers, optics, roles. Pure functions on text and bytes."""
