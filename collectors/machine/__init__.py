"""Parsing of what the machine says of itself: sensors, error counters, mounts, disks, clock, versions. Pure functions where possible."""
