"""Speculative decoding: drafters, acceptance, and the round that joins them."""
