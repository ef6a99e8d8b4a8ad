"""Networks trained on telemetry (torch, torch-geometric); imported lazily, never by a collector."""
