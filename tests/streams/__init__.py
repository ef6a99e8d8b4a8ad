"""Tests of the stream worker."""
