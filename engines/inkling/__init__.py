"""Inkling: configuration, per-rank text model, chained MTP heads and weight map."""
