"""Flint: configuration, per-rank text model and weight map."""
