"""Kernel of Trainwarden: records, topics, clock, bus, topology, policy, configuration and the command line."""

__version__ = "0.1.0"
