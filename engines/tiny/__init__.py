"""Random tiny checkpoints in the publishers' formats, for tests, demos and first steps.

They have every kind of tensor and every special case of the real model in a few megabytes, and an
output that is as random as their weights. `python -m inkrt.engines.tiny OUT` writes one.
"""
