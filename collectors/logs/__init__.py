"""What log sources share: prefixes, tracebacks, secrets, folding, the desk that turns lines into events; formats of logs and dumps."""
