"""Lines per series that follow history and load."""
