"""`inkling2-nano`: a small trained Inkling-2 and its drafters, and the scripts that make them."""
