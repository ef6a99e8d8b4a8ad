"""One file per notifier; found by being here."""
