"""Metrics that others publish on a page, or print: fetched off the shared thread, read strictly, turned into rows of our own units."""
