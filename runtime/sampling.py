"""The distribution that a request samples from, without torch: that of `plugins/sampling.py`.

The filters stand in the same order, keep the same ties and round in the same places, so that a row
of logits gives the token here that the step drew from it. Source: dspark.md section 6.2.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inkrt.runtime.executor import Sampling
from inkrt.runtime.noise import Purpose, gumbel, token_bits


def filtered_logits(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float32]:
    """Scale rows of logits and remove the tokens that may not be drawn.

    Args:
        logits: [..., V].
        sampling: its temperature is above 0.

    Returns:
        [..., V], -inf where removed; at least one token of a row stays.
    """
    # A step gets its parameters as float32.
    min_p, top_p = np.float32(sampling.min_p), np.float32(sampling.top_p)
    scaled = logits / np.float32(sampling.temperature)
    if min_p > 0:
        share = np.float32(math.log(float(min_p)))
        scaled = _keep_from(scaled, scaled.max(-1, keepdims=True) + share)
    if 0 < sampling.top_k < scaled.shape[-1]:
        place = scaled.shape[-1] - sampling.top_k
        scaled = _keep_from(scaled, np.partition(scaled, place, -1)[..., place : place + 1])
    if top_p < 1:
        descending = -np.sort(-scaled, axis=-1)  # NaN last: its row has no distribution
        first = descending[..., :1].astype(np.float64)
        with np.errstate(invalid="ignore"):
            mass = np.exp(descending - first).cumsum(-1)
        is_short = mass < float(top_p) * mass[..., -1:]
        last = np.minimum(is_short.sum(-1, keepdims=True), scaled.shape[-1] - 1)
        threshold = np.take_along_axis(descending, last, -1)
        has_mass = np.isfinite(scaled.max(-1, keepdims=True))
        scaled = _keep_from(scaled, np.where(has_mass, threshold, np.float32(-np.inf)))
    return scaled


def probabilities(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The distribution of the token behind each row; greedy and degenerate rows are one-hot.

    Args:
        logits: [..., V].
        sampling: of the request.
    """
    if sampling.temperature == 0:
        return one_hot(logits.argmax(-1), logits.shape[-1])
    kept = filtered_logits(logits, sampling).astype(np.float64)
    top = kept.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(kept - top)
        weights /= weights.sum(-1, keepdims=True)
    certain = one_hot(kept.argmax(-1), kept.shape[-1])
    mixed: NDArray[np.float64] = np.where(np.isfinite(top), weights, certain)
    return mixed


def one_hot(tokens: ArrayLike, num_tokens: int) -> NDArray[np.float64]:
    """[..., V], 1 at the token of each row."""
    is_it = np.arange(num_tokens) == np.asarray(tokens)[..., None]
    rows: NDArray[np.float64] = is_it.astype(np.float64)
    return rows


def draw(
    logits: NDArray[np.float32],
    sampling: Sampling,
    positions: ArrayLike,
    *,
    seeds: ArrayLike | None = None,
    purpose: Purpose = Purpose.SAMPLE,
    anchors: ArrayLike = 0,
) -> NDArray[np.int32]:
    """Draw one token per row; with purpose SAMPLE the one that a step of the target draws.

    Args:
        logits: [..., V].
        sampling: of the request.
        positions: [...], of the tokens being drawn.
        seeds: [...]; None takes that of `sampling`.
        purpose: what the noise is for.
        anchors: [...], positions of the anchors of the rounds; 0 for SAMPLE.
    """
    scores = logits
    if sampling.temperature > 0:
        seeds = sampling.seed if seeds is None else seeds
        noise = gumbel(token_bits(seeds, positions, purpose, logits.shape[-1], anchors))
        scores = filtered_logits(logits, sampling) + noise
    tokens: NDArray[np.int32] = scores.argmax(-1).astype(np.int32)
    return tokens


def _keep_from(logits: NDArray[np.float32], threshold: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(logits < threshold, np.float32(-np.inf), logits)
