"""draft_head: the tokens of a drafted block, one after the other, with logits and confidences.

Row k of g, in float32, with x_0 the anchor, e = markov_w1[x_k], h = hidden[k], s_0 = 0:

    vanilla:  z = e
    gated:    z = sigmoid(W [h; e] + b) * e
    rnn:      [a; c; o] = W [s_k; e; h] + b
              z = tanh(o),  s_{k+1} = sigmoid(a) * s_k + (1 - sigmoid(a)) * tanh(c)
    base   = base_logits[k] / logits_divisor        its softcap, if that stands before the bias
    l_k    = base + markov_w2 z                      its softcap, if that stands behind the bias
    x_{k+1} = a draw from l_k, for the token at position + 1 + k
    c_k    = sigmoid(w [h; e] + b), or w h + b if w is that short

z comes from the old state, so s counts from the next row on. Softcaps are cap * tanh(. / cap).

The draw, its filters and its noise are those of `draft_sample`.

A trimmed vocabulary has Vd tokens, draft token i being the target's i + d2t[i]. Logits are those of
the target's tokens, -inf where a token cannot be drafted; drawn tokens, and the rows of markov_w1,
are the target's always. The divisor comes behind the projection, where it costs no rounding.

Ranks share markov_w2 by its rows and the base logits by their columns, vocabulary_share of each;
what follows from the hidden rows alone and from x_k they all compute.
Source: dspark.md sections 2.6 to 2.8, 5.8, 6.1 and 6.7.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.draft_head.cases import cases
from inkrt.plugins.draft_sample.op import draw_draft
from inkrt.plugins.registry import Collective, operator
from inkrt.plugins.sample.op import fit_sampling
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

HEADS = ("vanilla", "gated", "rnn")
SOFTCAP_PLACES = ("none", "before_bias", "after_bias")


def is_base_shared(d2t: object | None, base_is_drafted: bool) -> bool:
    """Whether base logits have a column for each row of the second table, and ranks share both."""
    return d2t is None or base_is_drafted


def _payload(
    *,
    base_logits: Tensor,
    markov_w2: Tensor,
    d2t: Tensor | None,
    base_is_drafted: bool,
    **_other: object,
) -> Tensor:
    """A row per token of the rank: its base logits, if ranks share these, and its row of W2."""
    if not is_base_shared(d2t, base_is_drafted):
        return markov_w2
    return torch.cat([base_logits.T, markov_w2], dim=1)


def fake(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    mix_proj: Tensor | None,
    mix_bias: Tensor | None,
    confidence_proj: Tensor | None,
    confidence_bias: Tensor | None,
    d2t: Tensor | None,
    is_coupled: Tensor,
    wants_logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    head: str,
    vocab_size: int,
    draft_vocab_size: int,
    base_is_drafted: bool,
    softcap: float,
    softcap_place: str,
    logits_divisor: float,
    tp_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int32 [g], logits float32 [g, V] and confidences float32 [g], or [0] without."""
    axes = Axes("draft_head")
    axes.fit("hidden", hidden, "g", "D", dtype=MODEL_DTYPES)
    axes.fit("markov_w1", markov_w1, "N", "r", dtype=hidden.dtype)
    axes.fit("markov_w2", markov_w2, "Vs", "r", dtype=hidden.dtype)
    axes.require(tp_size >= 1, f"tp_size is {tp_size}, expected >= 1")
    rows = tp_size * axes["Vs"]
    axes.require(
        1 <= draft_vocab_size <= rows,
        f"draft_vocab_size is {draft_vocab_size}, expected 1 to {rows}",
    )
    columns = "Vs" if is_base_shared(d2t, base_is_drafted) else vocab_size
    axes.fit("base_logits", base_logits, "g", columns, dtype=MODEL_DTYPES)
    axes.fit("anchor", anchor, 1, dtype=torch.int32)
    axes.fit("is_coupled", is_coupled, 1, dtype=torch.int32)
    axes.fit("wants_logits", wants_logits, 1, dtype=torch.int32)
    fit_sampling(axes, temperature, top_k, top_p, min_p, seed, position)
    rank, width = axes["r"], axes["D"]
    axes.require(head in HEADS, f"head is {head!r}, expected one of {', '.join(HEADS)}")
    mixes = {"gated": (rank, width + rank), "rnn": (3 * rank, 2 * rank + width)}
    axes.require(
        (mix_proj is not None, mix_bias is not None) == (head in mixes,) * 2,
        f"head {head} has mix_proj and mix_bias: expected both for {', '.join(mixes)}, else none",
    )
    if mix_proj is not None and mix_bias is not None:
        axes.fit("mix_proj", mix_proj, *mixes[head], dtype=hidden.dtype)
        axes.fit("mix_bias", mix_bias, mixes[head][0], dtype=torch.float32)
    if confidence_proj is not None:
        axes.fit("confidence_proj", confidence_proj, 1, "read", dtype=torch.float32)
        axes.require(
            axes["read"] in (width, width + rank),
            f"confidence_proj reads {axes['read']} values, expected {width} or {width + rank}",
        )
    if confidence_bias is not None:
        axes.fit("confidence_bias", confidence_bias, 1, dtype=torch.float32)
    if d2t is not None:
        axes.fit("d2t", d2t, draft_vocab_size, dtype=torch.int32)
    is_whole = d2t is not None or vocab_size == draft_vocab_size
    axes.require(
        axes["N"] >= vocab_size >= draft_vocab_size and is_whole,
        f"vocab_size is {vocab_size}, expected at most {axes['N']} and, without d2t, "
        f"{draft_vocab_size}",
    )
    axes.require(
        softcap_place in SOFTCAP_PLACES and (softcap_place == "none" or softcap > 0),
        f"softcap_place is {softcap_place!r} with softcap {softcap}, expected one of "
        f"{', '.join(SOFTCAP_PLACES)} and a softcap > 0 for the last two",
    )
    axes.require(logits_divisor > 0, f"logits_divisor is {logits_divisor}, expected > 0")
    rows = axes["g"]
    return (
        hidden.new_empty(rows, dtype=torch.int32),
        hidden.new_empty((rows, vocab_size), dtype=torch.float32),
        hidden.new_empty(0 if confidence_proj is None else rows, dtype=torch.float32),
    )


def _combine(
    payloads: Sequence[Tensor],
    *,
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    markov_w1: Tensor,
    mix_proj: Tensor | None,
    mix_bias: Tensor | None,
    confidence_proj: Tensor | None,
    confidence_bias: Tensor | None,
    d2t: Tensor | None,
    is_coupled: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    head: str,
    vocab_size: int,
    draft_vocab_size: int,
    base_is_drafted: bool,
    softcap: float,
    softcap_place: str,
    logits_divisor: float,
    tp_size: int,
    **_other: object,
) -> tuple[Tensor, Tensor, Tensor]:
    assert len(payloads) == tp_size, f"{len(payloads)} payloads for {tp_size} ranks"
    num_rows = len(hidden)
    ids = torch.arange(draft_vocab_size)
    second, base = torch.cat(list(payloads))[:draft_vocab_size].float(), base_logits
    is_shared = is_base_shared(d2t, base_is_drafted)
    if is_shared:
        base, second = second[:, :num_rows].T, second[:, num_rows:].contiguous()
    base = base.float() / logits_divisor
    if softcap_place == "before_bias":
        base = softcap * torch.tanh(base / softcap)
    if d2t is not None:
        ids = ids + d2t
        base = base if is_shared else base[:, ids]
    sampling = (temperature, top_k, top_p, min_p, seed)
    logits = torch.full((num_rows, vocab_size), -torch.inf)
    tokens = torch.empty(num_rows, dtype=torch.int32)
    confidences = torch.empty(0 if confidence_proj is None else num_rows)
    state, previous = torch.zeros(markov_w1.shape[1]), int(anchor)
    for row in range(num_rows):
        h, e = hidden[row].float(), markov_w1[previous].float()
        z, state = _mixed(head, h, e, state, mix_proj, mix_bias)
        drafted = base[row] + F.linear(z, second)
        if softcap_place == "after_bias":
            drafted = softcap * torch.tanh(drafted / softcap)
        logits[row, ids] = drafted
        if confidence_proj is not None:
            read = torch.cat([h, e])[: confidence_proj.shape[1]]
            confidences[row] = F.linear(read, confidence_proj, confidence_bias).sigmoid()
        previous = draw_draft(logits[row], is_coupled, *sampling, position, row)
        tokens[row] = previous
    return tokens, logits, confidences


@operator(
    "draft_head",
    fake=fake,
    cases=cases,
    collective=Collective(payload=_payload, combine=_combine),
    version=2,
)
def draft_head(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    mix_proj: Tensor | None,
    mix_bias: Tensor | None,
    confidence_proj: Tensor | None,
    confidence_bias: Tensor | None,
    d2t: Tensor | None,
    is_coupled: Tensor,
    wants_logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    head: str,
    vocab_size: int,
    draft_vocab_size: int,
    base_is_drafted: bool,
    softcap: float,
    softcap_place: str,
    logits_divisor: float,
    tp_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the tokens of a block; row k is the one that predicts the token at position + 1 + k.

    Args:
        base_logits: float32 or bfloat16 [g, Vs], columns of this rank; with `d2t` and without
            `base_is_drafted` [g, V] on every rank.
        hidden: float32 or bfloat16 [g, D], final rows; all matrices but the last have its dtype.
        anchor: int32 [1], the token before the first drafted one.
        markov_w1: [N, r] with N >= V, by the target's tokens.
        markov_w2: [Vs, r], this rank's rows of the table of Vd tokens; those of the last ranks may
            be padding.
        mix_proj: [r, D + r] of a gated head, [3 r, 2 r + D] of an rnn head; None of a vanilla one.
        mix_bias: float32 [r] or [3 r], with mix_proj.
        confidence_proj: float32 [1, D + r] or [1, D], or None for no confidences.
        confidence_bias: float32 [1], or None.
        d2t: int32 [Vd], offsets from a draft token to the target's, or None.
        is_coupled: int32 [1]; 0 for noise independent of the target's.
        wants_logits: int32 [1]; 0 where nobody reads the logits, which kernels of several ranks may
            then leave undefined.
        temperature: float32 [1]; 0 takes the argmax and ignores the filters.
        top_k: int32 [1]; 0 is off.
        top_p: float32 [1], in (0, 1].
        min_p: float32 [1], in [0, 1]; 0 is off.
        seed: int64 [1], not negative.
        position: int32 [1], of the anchor.
        head: one of HEADS.
        vocab_size: V, the target's tokens.
        draft_vocab_size: Vd, tokens that can be drafted; V without `d2t`.
        base_is_drafted: whether the columns of base_logits are draft tokens; means nothing without
            d2t.
        softcap: cap of the logits.
        softcap_place: one of SOFTCAP_PLACES.
        logits_divisor: of the base logits.
        tp_size: number of ranks.

    Returns:
        Tokens int32 [g]; logits float32 [g, V], before temperature; confidences float32 [g], or [0]
        without a confidence head. Equal on all ranks.
    """
    arguments = dict(locals())
    return _combine([_payload(**arguments)], **arguments)


def _mixed(
    head: str, h: Tensor, e: Tensor, state: Tensor, proj: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the second table multiplies, [r], and the next row's state, [r]."""
    if proj is None:
        return e, state
    if head == "gated":
        return F.linear(torch.cat([h, e]), proj.float(), bias).sigmoid() * e, state
    gate, candidate, output = F.linear(torch.cat([state, e, h]), proj.float(), bias).chunk(3)
    gate = gate.sigmoid()
    return output.tanh(), gate * state + (1 - gate) * candidate.tanh()
