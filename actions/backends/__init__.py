"""One file per backend; found by being here."""
