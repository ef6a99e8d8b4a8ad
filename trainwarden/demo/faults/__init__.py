"""Faults of the demonstration, one file each; a file here is the registration."""
