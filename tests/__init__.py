"""Tests, a mirror of the code; recordings, faults and scenarios beside."""
