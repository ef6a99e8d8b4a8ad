"""What the telemetry says about itself: faults of the witnesses, not of the nodes."""
