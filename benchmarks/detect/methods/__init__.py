"""Detectors under test: one file, one method. A file here is found by itself; `registry.discover` lists them."""
