"""Stream processing: alignment, detection, incidents, the store and replay."""
