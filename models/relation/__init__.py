"""The relation model: what a node should look like, given its relatives and its own past."""
