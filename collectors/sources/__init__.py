"""One file per source; a source is found by being here."""
