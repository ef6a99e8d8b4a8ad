"""Adaptors: files recorded elsewhere, read as a time-ordered stream of our records."""
