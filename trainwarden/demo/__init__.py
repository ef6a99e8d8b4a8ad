"""The demonstration: a real PyTorch job on this machine, a real fault, and everything that heals it."""
