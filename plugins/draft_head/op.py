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
Source: dspark.md sections 2.6 to 2.8, 6.1 and 6.7.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.draft_sample.op import draw_draft
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.sample.op import fit_sampling, sampling_arguments
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

HEADS = ("vanilla", "gated", "rnn")
SOFTCAP_PLACES = ("none", "before_bias", "after_bias")


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
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    head: str,
    vocab_size: int,
    base_is_drafted: bool,
    softcap: float,
    softcap_place: str,
    logits_divisor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int32 [g], logits float32 [g, V] and confidences float32 [g], or [0] without."""
    axes = Axes("draft_head")
    base_is_drafted = base_is_drafted and d2t is not None
    axes.fit("hidden", hidden, "g", "D", dtype=MODEL_DTYPES)
    axes.fit("markov_w1", markov_w1, "N", "r", dtype=hidden.dtype)
    axes.fit("markov_w2", markov_w2, "Vd", "r", dtype=hidden.dtype)
    columns = axes["Vd"] if base_is_drafted else vocab_size
    axes.fit("base_logits", base_logits, "g", columns, dtype=MODEL_DTYPES)
    axes.fit("anchor", anchor, 1, dtype=torch.int32)
    axes.fit("is_coupled", is_coupled, 1, dtype=torch.int32)
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
        axes.fit("d2t", d2t, "Vd", dtype=torch.int32)
    axes.require(
        axes["N"] >= vocab_size >= axes["Vd"] and (d2t is not None or vocab_size == axes["Vd"]),
        f"vocab_size is {vocab_size}, expected at most {axes['N']} and, without d2t, {axes['Vd']}",
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


def _case(
    name: str,
    head: str,
    *,
    num_rows: int = 7,
    num_drafted: int | None = None,
    base_is_drafted: bool = False,
    is_coupled: bool = False,
    confidence: str = "hidden, markov, bias",
    softcap_place: str = "none",
    logits_divisor: float = 1.0,
    levels: int = 0,
    num_padding: int = 0,
    position: int = 1000,
    sizes: tuple[int, int, int] = (33, 14, 131),
    **sampling: Any,
) -> Case:
    hidden_size, rank, vocab_size = sizes

    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            return normal(generator, dtype, rows, columns, scale=gain * columns**-0.5)

        drafted = num_drafted or vocab_size
        ids = torch.randperm(vocab_size, generator=generator)[:drafted].sort().values
        columns = drafted if base_is_drafted else vocab_size
        base = normal(generator, dtype, num_rows, columns + num_padding, scale=2.0)[:, :columns]
        second = weight(drafted, rank, 3.0)
        if levels:  # few distinct values and no bias: ties everywhere
            base, second = (base * levels / 6).round(), second * 0
        mixes = {"gated": (rank, hidden_size + rank), "rnn": (3 * rank, 2 * rank + hidden_size)}
        size = mixes.get(head)
        read = hidden_size + (rank if "markov" in confidence else 0)
        has_bias = "bias" in confidence
        return {
            "base_logits": base,
            "hidden": normal(generator, dtype, num_rows, hidden_size),
            "anchor": int32(17),
            "markov_w1": normal(generator, dtype, vocab_size + 5, rank),
            "markov_w2": second,
            "mix_proj": weight(*size, 2.0) if size else None,
            "mix_bias": normal(generator, torch.float32, size[0]) if size else None,
            "confidence_proj": weight(1, read, 2.0).float() if confidence else None,
            "confidence_bias": normal(generator, torch.float32, 1) if has_bias else None,
            "d2t": (ids - torch.arange(drafted)).int() if num_drafted else None,
            "is_coupled": int32(int(is_coupled)),
            **sampling_arguments(**sampling),
            "position": int32(position),
            "head": head,
            "vocab_size": vocab_size,
            "base_is_drafted": base_is_drafted,
            "softcap": 4.0,
            "softcap_place": softcap_place,
            "logits_divisor": logits_divisor,
        }

    # All is float32 whatever the inputs, so bfloat16 has no looser bound.
    return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 1e-6})


def cases() -> list[Case]:
    """Heads, draws with both noises and all filters, softcaps, trimmed tokens, confidences.

    Those with `sizes` (of hidden rows, rank and vocabulary) are what kernels take.
    """
    filters: dict[str, Any] = {
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "seed": 2**63 - 1,
    }
    wide = (264, 64, 1003)
    return [
        _case("vanilla, greedy", "vanilla", temperature=0.0),
        _case("gated, greedy", "gated", temperature=0.0),
        _case("rnn, greedy", "rnn", temperature=0.0),
        _case("ties take the lowest id", "vanilla", temperature=0.0, levels=2),
        _case("rnn, own noise", "rnn", seed=2**62 + 12345, position=1_048_570),
        _case("rnn, coupled", "rnn", seed=2**62 + 12345, is_coupled=True, position=0),
        _case("gated, all filters", "gated", **filters),
        _case("rnn, all filters, coupled", "rnn", is_coupled=True, **filters),
        _case("softcap before the bias", "vanilla", softcap_place="before_bias", seed=3),
        _case("softcap behind the bias", "rnn", softcap_place="after_bias", seed=4),
        _case("divided", "gated", softcap_place="before_bias", logits_divisor=24.0, seed=5),
        _case("trimmed", "rnn", num_drafted=40, seed=6, is_coupled=True),
        _case("trimmed, own base", "vanilla", num_drafted=40, base_is_drafted=True, top_k=60),
        _case("no confidence", "vanilla", confidence="", temperature=0.7),
        _case("confidence of the row alone", "gated", confidence="hidden", top_p=0.5),
        _case("confidence without bias", "rnn", confidence="hidden, markov", num_rows=16),
        _case("one row", "rnn", num_rows=1, temperature=0.0, confidence="hidden, bias"),
        _case("wide, rnn, greedy", "rnn", sizes=wide, temperature=0.0, softcap_place="before_bias"),
        _case("wide, rnn, coupled", "rnn", sizes=wide, seed=2**62 + 12345, is_coupled=True),
        _case("wide, rnn, own noise", "rnn", sizes=wide, seed=2**62 + 12345, temperature=2.5),
        _case("wide, rnn, all filters", "rnn", sizes=wide, **filters),
        _case("wide, gated, all filters, coupled", "gated", sizes=wide, is_coupled=True, **filters),
        _case("wide, gated, divided", "gated", sizes=(520, 256, 65), seed=5, num_rows=8,
              softcap_place="after_bias", logits_divisor=24.0),
        _case("wide, vanilla, ties", "vanilla", sizes=(40, 128, 300), temperature=0.0, levels=2,
              confidence=""),
        _case("wide, vanilla, top-p", "vanilla", sizes=(40, 128, 300), top_p=0.7, num_rows=3),
        _case("wide, trimmed", "rnn", sizes=(4104, 64, 300), num_drafted=77, seed=6,
              is_coupled=True, confidence="hidden", num_rows=4),
        _case("wide, trimmed, own base, top-k", "vanilla", sizes=(64, 192, 300), num_drafted=77,
              base_is_drafted=True, top_k=60, num_rows=5, confidence="hidden, markov"),
        _case("wide, 16 rows", "gated", sizes=(64, 64, 131), num_rows=16, position=0, min_p=0.1),
        _case("wide, columns of padding", "vanilla", sizes=(64, 64, 97), num_padding=6, seed=8,
              num_rows=2),
        _case("wide, one row", "rnn", sizes=(64, 64, 33), num_rows=1, temperature=0.0),
    ]  # fmt: skip


@operator("draft_head", fake=fake, cases=cases)
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
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    head: str,
    vocab_size: int,
    base_is_drafted: bool,
    softcap: float,
    softcap_place: str,
    logits_divisor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the tokens of a block; row k is the one that predicts the token at position + 1 + k.

    Args:
        base_logits: float32 or bfloat16 [g, V], or [g, Vd] with `base_is_drafted`.
        hidden: float32 or bfloat16 [g, D], final rows; all matrices but the last have its dtype.
        anchor: int32 [1], the token before the first drafted one.
        markov_w1: [N, r] with N >= V, by the target's tokens.
        markov_w2: [Vd, r]; without `d2t`, Vd = V.
        mix_proj: [r, D + r] of a gated head, [3 r, 2 r + D] of an rnn head; None of a vanilla one.
        mix_bias: float32 [r] or [3 r], with mix_proj.
        confidence_proj: float32 [1, D + r] or [1, D], or None for no confidences.
        confidence_bias: float32 [1], or None.
        d2t: int32 [Vd], offsets from a draft token to the target's, or None.
        is_coupled: int32 [1]; 0 for noise independent of the target's.
        temperature: float32 [1]; 0 takes the argmax and ignores the filters.
        top_k: int32 [1]; 0 is off.
        top_p: float32 [1], in (0, 1].
        min_p: float32 [1], in [0, 1]; 0 is off.
        seed: int64 [1], not negative.
        position: int32 [1], of the anchor.
        head: one of HEADS.
        vocab_size: V, the target's tokens.
        base_is_drafted: whether the columns of base_logits are draft tokens; means nothing without
            d2t.
        softcap: cap of the logits.
        softcap_place: one of SOFTCAP_PLACES.
        logits_divisor: of the base logits.

    Returns:
        Tokens int32 [g]; logits float32 [g, V], before temperature; confidences float32 [g], or [0]
        without a confidence head.
    """
    num_rows = len(hidden)
    ids = torch.arange(len(markov_w2))
    base = base_logits.float() / logits_divisor
    if softcap_place == "before_bias":
        base = softcap * torch.tanh(base / softcap)
    if d2t is not None:
        ids = ids + d2t
        base = base if base_is_drafted else base[:, ids]
    sampling = (temperature, top_k, top_p, min_p, seed)
    logits = torch.full((num_rows, vocab_size), -torch.inf)
    tokens = torch.empty(num_rows, dtype=torch.int32)
    confidences = torch.empty(0 if confidence_proj is None else num_rows)
    second = markov_w2.float()
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
