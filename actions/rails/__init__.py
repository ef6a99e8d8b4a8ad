"""One file per rail; found by being here."""
