"""Who names the culprit among thousands of nodes: `make bench-relation`."""
