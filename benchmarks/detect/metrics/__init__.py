"""Metrics: each works on plain arrays of scores, alarms and labelled spans."""
