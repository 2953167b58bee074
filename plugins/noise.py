"""Counter-based random numbers: the same draw whatever the step width, the batch or the rank.

This module owns Philox4x32-10 and the Gumbel noise made of it, and knows nothing about logits. A
number depends only on (seed, position of the token being drawn, token id, purpose) and, for all
purposes but SAMPLE, on the position of the round's anchor; `runtime/noise.py`, which gives the same
numbers without torch, says why.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. The tests hold the known-answer vectors of the authors' Random123 library.
"""

from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10, the block function.

    Args:
        counter: int64 [..., 4], words in [0, 2**32).
        key: two words in [0, 2**32).

    Returns:
        int64 [..., 4], four random words in [0, 2**32) per counter.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps modulo 2**64, so its 64 bits are those of the unsigned product; the
        # mask removes the sign that `>>` drags in.
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _WORD) ^ c1 ^ k0,
            product_1 & _WORD,
            ((product_0 >> 32) & _WORD) ^ c3 ^ k1,
            product_0 & _WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def token_bits(
    seed: int, positions: Tensor, purpose: Purpose, vocab_size: int, anchor: int = 0
) -> Tensor:
    """One random word for each position and token id.

    Key = low and high word of the seed; counter = (token id // 4, position, purpose, anchor); the
    token takes word (token id % 4) of the result.

    Args:
        seed: in [0, 2**64).
        positions: integers [R] in [0, 2**32), timeline indices of the tokens being drawn.
        purpose: what the numbers are for.
        vocab_size: number of token ids, V.
        anchor: in [0, 2**32), position of the round's anchor; 0 for SAMPLE.

    Returns:
        int64 [R, V], words in [0, 2**32).
    """
    num_blocks = -(-vocab_size // 4)
    counter = torch.zeros((len(positions), num_blocks, 4), dtype=torch.int64)
    counter[..., 0] = torch.arange(num_blocks)
    counter[..., 1] = positions[:, None]
    counter[..., 2] = int(purpose)
    counter[..., 3] = anchor
    words = philox4x32(counter, (seed & _WORD, seed >> 32))
    return words.flatten(1)[:, :vocab_size]


def uniform(bits: Tensor) -> Tensor:
    """Map int64 words in [0, 2**32) to u = (bits + 1/2) / 2**32: float64, exact, never 0 or 1."""
    return (bits.double() + 0.5) * 2.0**-32


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise g = -log(-log u), from -3.13 to 22.87.

    Both logarithms are float64: u is exact there, so the tail at u -> 1, where float32 knows only
    multiples of 2**-24, is as accurate as the one at u -> 0. The result is rounded once.

    Args:
        bits: int64 words in [0, 2**32), any shape.

    Returns:
        float32, same shape.
    """
    return (-torch.log(-torch.log(uniform(bits)))).float()
