"""Inkling-2: configuration, per-rank text model and weight map."""
