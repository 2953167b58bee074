"""DSpark drafters: small transformers that propose a block of tokens at once."""
