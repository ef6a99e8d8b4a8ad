"""One file per group of subcommands; each imports its part only when it is called."""
