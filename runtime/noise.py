"""Counter-based random numbers without torch: those of `plugins/noise.py`, bit for bit.

The target's steps draw with purpose SAMPLE. The other purposes belong to the ratio test of
speculative decoding, whose draws must not only be independent of each other but also of those of
earlier rounds: a round that rejects drafts has looked at the numbers of positions that the next
round draws again. So these are keyed by the round too, by the position of its anchor, which no two
rounds share (`runtime/spec/accept.py` says where the test would be biased without).
"""

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def token_bits(
    seed: ArrayLike, position: ArrayLike, purpose: Purpose, num_tokens: int, anchor: ArrayLike = 0
) -> NDArray[np.uint64]:
    """One random word for each token id, by Philox4x32-10.

    Key = low and high word of the seed; counter = (token id // 4, position, purpose, anchor); the
    token takes word (token id % 4) of the result.

    Args:
        seed: integers in [0, 2**63); seed, position and anchor are broadcast to shape [...].
        position: integers in [0, 2**32), of the tokens being drawn.
        purpose: what the numbers are for.
        num_tokens: number of token ids, V.
        anchor: integers in [0, 2**32), position of the round's anchor; 0 for SAMPLE.

    Returns:
        [..., V], words in [0, 2**32).
    """
    shape = np.broadcast_shapes(np.shape(seed), np.shape(position), np.shape(anchor))
    blocks = np.arange(-(-num_tokens // 4), dtype=np.uint64)
    c0, c1, c2, c3, keys = (
        np.broadcast_to(values, (*shape, len(blocks)))
        for values in (
            blocks,
            np.asarray(position, np.uint64)[..., None],
            np.uint64(purpose),
            np.asarray(anchor, np.uint64)[..., None],
            np.asarray(seed, np.uint64)[..., None],
        )
    )
    k0, k1 = keys & _WORD, keys >> _SHIFT
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _WORD,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    words = np.stack((c0, c1, c2, c3), axis=-1).reshape(*shape, 4 * len(blocks))
    return words[..., :num_tokens]


def uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map words in [0, 2**32) to u = (bits + 1/2) / 2**32: exact, never 0 or 1."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def gumbel(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Gumbel noise g = -log(-log u): float64 inside, rounded once."""
    noise: NDArray[np.float32] = (-np.log(-np.log(uniform(bits)))).astype(np.float32)
    return noise
