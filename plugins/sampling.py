"""The filters between logits and a draw: temperature, min-p, top-k, top-p, in this order.

This module owns the distribution that a request samples from, for every operator that draws or
compares tokens; it knows nothing about random numbers. Source: dspark.md section 6.2.
"""

import math

import torch
from torch import Tensor


def filtered_logits(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Scale one row of logits and remove the tokens that may not be drawn.

    Every filter sees what the ones before it left, and keeps all tokens that tie at its threshold,
    so that no result depends on a sorting order. At least one token stays. A NaN counts as larger
    than any number, is never removed, and leaves top-p out, as an infinite maximum does: there is
    no distribution then.

        l = logits / temperature
        min-p: keep l >= max(l) + log(min_p)
        top-k: keep l >= k-th largest l
        top-p: keep l >= the last l of the smallest set of largest l with mass >= top_p, where the
               mass is that of the distribution renormalized after top-k

    Args:
        logits: float32 [V].
        temperature: above 0.
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1]; 0 keeps all.

    Returns:
        float32 [V], -inf where removed.
    """
    scaled = logits / temperature
    if min_p > 0:
        scaled = _keep_from(scaled, scaled.max() + math.log(min_p))
    if 0 < top_k < scaled.shape[0]:
        scaled = _keep_from(scaled, torch.topk(scaled, top_k).values[-1])
    if top_p < 1 and scaled.max().isfinite():
        # Logits are sorted, not probabilities: equal logits stay equal, and float64 sums keep the
        # border where it is however many small terms there are.
        descending = scaled.sort(descending=True).values
        mass = (descending.double() - descending[0].double()).exp().cumsum(0)
        last = torch.searchsorted(mass, top_p * mass[-1])
        scaled = _keep_from(scaled, descending[last])
    return scaled


def _keep_from(logits: Tensor, threshold: Tensor) -> Tensor:
    return logits.masked_fill(logits < threshold, -math.inf)
