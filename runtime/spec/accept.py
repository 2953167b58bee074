"""The ratio test of a block of drafts: block verification.

Draft i (from 1) was drawn from q_i and p_i is the target's distribution at its place, both with
the drafts before it as context and with all filters of the request. With P_0 = 1:

    P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
    R_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = R_i / (R_i + 1 - P_i) for i < l,  h_l = P_l
    A   = the largest i whose own coin u_i is below h_i, else 0

and the token behind the A drafts comes from max(P_A p_{A+1} - q_{A+1}, 0), normalized, or from
p_{l+1} if A = l. Source: Z. Sun et al., "Block verification accelerates speculative decoding",
2024; dspark.md section 6.6.

Exact, also where the width l is chosen while drafting. Let S_i be the probability that at least i
drafts are accepted, given the drafts x_1..x_i. Then S_i = P_i: at the last draft by h_l = P_l; and
before it, as more than i are accepted with probability sum over x of q(x) P_{i+1} =
sum min(q, P_i p) = P_i - R_i, S_i = (P_i - R_i) + (1 - P_i + R_i) h_i = P_i. So exactly i are
accepted with probability R_i, and the token at place i+1 is x with probability
min(q, P_i p) + max(P_i p - q, 0) = P_i p(x): that of the target, for every prefix. The induction
runs backwards over the tree of drafts, so its leaves may be at different depths, if only whether
x_i is verified does not depend on x_i itself or what comes after it (`runtime/spec/width.py`).

The proof needs draws that are independent of all that was decided before. A coin keyed by seed and
position alone is not: that A drafts were accepted says that the coins behind A failed and depends
on the drafts there, and the next round would draw with the same numbers again. Therefore coins,
drafts and residual are keyed by the round's anchor too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inkrt.runtime.executor import Sampling
from inkrt.runtime.noise import Purpose, gumbel, token_bits, uniform
from inkrt.runtime.sampling import one_hot, probabilities

_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a block.

    Attributes:
        accepted: drafts that stay, A.
        token: the one behind them.
    """

    accepted: int
    token: int


def accept_probabilistic(
    drafts: Sequence[int],
    logits: NDArray[np.float32],
    draft_logits: NDArray[np.float32] | None,
    sampling: Sampling,
    anchor: int,
) -> Verdict:
    """Decide on the drafts of one round.

    Args:
        drafts: x_1..x_l for positions anchor + 1 and up; none is allowed.
        logits: [l+1, V], of the target; row i is what follows draft i.
        draft_logits: [l, V]; draft i must have been drawn from these with the request's own
            temperature and filters and with noise of purpose DRAFT. None: the drafts are certain.
        sampling: of the request.
        anchor: position of the anchor.
    """
    num_tokens = logits.shape[-1]
    ids = np.asarray(drafts, np.int64)
    target = probabilities(logits, sampling)
    draft = one_hot(ids, num_tokens)
    if draft_logits is not None:
        draft = probabilities(draft_logits, sampling)
        assert (draft[np.arange(len(ids)), ids] > 0).all(), "a draft is not of its distribution"
    accepted, share = accept_block(
        ids, target, draft, coins(sampling.seed, anchor, len(ids)), len(ids)
    )
    rest = residual(target, draft, accepted, share, len(ids))
    token = draw_residual(rest, sampling.seed, anchor, accepted)
    return Verdict(int(accepted), int(token))


def coins(seed: ArrayLike, anchor: ArrayLike, width: int) -> _Numbers:
    """[..., l], the coin of each draft, for seeds and anchors [...]."""
    positions = np.asarray(anchor)[..., None] + np.arange(1, width + 1)
    bits = token_bits(
        np.asarray(seed)[..., None], positions, Purpose.ACCEPT, 1, np.asarray(anchor)[..., None]
    )
    return uniform(bits[..., 0])


def thresholds(
    drafts: NDArray[np.int64], target: _Numbers, draft: _Numbers, widths: ArrayLike
) -> tuple[_Numbers, _Numbers]:
    """h_1..h_l and P_1..P_l, each [..., l]; h is 0 behind a row's width.

    Args:
        drafts: [..., l].
        target: p, [..., l+1, V].
        draft: q, [..., l, V].
        widths: [...], drafts that were verified, at most l.
    """
    widths = np.asarray(widths)
    num_drafts = drafts.shape[-1]
    at = drafts[..., None]
    p = np.take_along_axis(target[..., :-1, :], at, -1)[..., 0]
    q = np.take_along_axis(draft, at, -1)[..., 0]
    share: _Numbers = np.ones(drafts.shape[:-1])
    limits, shares = np.zeros(drafts.shape), np.zeros(drafts.shape)
    for i in range(num_drafts):
        # A draft that q cannot give never counts: only places behind the width may hold one.
        ratio = np.divide(p[..., i], q[..., i], out=np.zeros_like(share), where=q[..., i] > 0)
        share = np.minimum(1.0, share * ratio)
        limit = share
        if i + 1 < num_drafts:
            rest = _excess(share, target[..., i + 1, :], draft[..., i + 1, :]).sum(-1)
            whole = rest + (1.0 - share)
            inner = np.divide(rest, whole, out=np.ones_like(share), where=whole > 0)
            limit = np.where(i + 1 < widths, inner, share)
        limits[..., i] = np.where(i < widths, limit, 0.0)
        shares[..., i] = share
    return limits, shares


def accept_block(
    drafts: NDArray[np.int64],
    target: _Numbers,
    draft: _Numbers,
    coins: _Numbers,
    widths: ArrayLike,
) -> tuple[NDArray[np.int64], _Numbers]:
    """A and P_A of each block, both [...]; arguments as in `thresholds`, coins [..., l]."""
    limits, shares = thresholds(drafts, target, draft, widths)
    places = np.arange(1, drafts.shape[-1] + 1)
    accepted = np.where(coins < limits, places, 0).max(-1, initial=0)
    shares = np.concatenate([np.ones((*drafts.shape[:-1], 1)), shares], -1)
    return accepted, np.take_along_axis(shares, accepted[..., None], -1)[..., 0]


def residual(
    target: _Numbers, draft: _Numbers, accepted: ArrayLike, share: _Numbers, widths: ArrayLike
) -> _Numbers:
    """Weights [..., V] of the token behind the accepted drafts; they need not sum to 1."""
    accepted, num_drafts = np.asarray(accepted), draft.shape[-2]
    p = np.take_along_axis(target, accepted[..., None, None], -2)[..., 0, :]
    if num_drafts == 0:
        return p
    place = np.minimum(accepted, num_drafts - 1)[..., None, None]
    excess = _excess(share, p, np.take_along_axis(draft, place, -2)[..., 0, :])
    # Where rounding leaves nothing, p and q are equal up to rounding.
    is_whole = (accepted == np.asarray(widths)) | (excess.sum(-1) <= 0)
    return np.where(is_whole[..., None], p, excess)


def draw_residual(
    weights: _Numbers, seed: ArrayLike, anchor: ArrayLike, accepted: ArrayLike
) -> NDArray[np.int64]:
    """The token behind the accepted drafts, [...], drawn from weights [..., V]."""
    position = np.asarray(anchor) + np.asarray(accepted) + 1
    noise = gumbel(token_bits(seed, position, Purpose.RESIDUAL, weights.shape[-1], anchor))
    with np.errstate(divide="ignore"):
        tokens: NDArray[np.int64] = (np.log(weights) + noise).argmax(-1)
    return tokens


def _excess(share: _Numbers, p: _Numbers, q: _Numbers) -> _Numbers:
    return np.maximum(share[..., None] * p - q, 0.0)
