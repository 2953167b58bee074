"""Looped Inkling-2 (Inkling-2-Mini): what its configuration, text model and weight map add."""
