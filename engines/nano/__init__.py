"""A small trained Inkling-2 checkpoint: its data, its training and its export."""
