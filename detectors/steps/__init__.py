"""Detectors on the job's own reports: who computes long, who stands, who computes wrong."""
