"""Nodes and what binds them: who should behave like whom, and which single cause explains all that does not."""
