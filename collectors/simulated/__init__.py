"""A whole cluster as a source: nodes, networks, jobs and their faults, from a seed.

What comes out is what real collectors would send (ticks, step reports, logs, topology); the ground truth goes elsewhere. Nothing here
knows how faults are detected. `docs/simulator.md` tells the model.
"""
