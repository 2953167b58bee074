"""experts: the routed experts of a layer (softcapped SwiGLU) and their weighted sum.

For each expert e that token t is routed to with weight w:

    [g | u] = x gate_up_e^T                                          rounded to x's dtype
    a       = cap(g; gate_softcap) * sigmoid(g) * cap(u; up_softcap)  float32, rounded to x's dtype
    d       = a down_e^T                                             rounded to x's dtype
    out_t   = sum_e fp32(d_e) * w_e          float32, ascending expert id, rounded once

with cap(v; c) = c tanh(v / c); the sigmoid sees the raw gate. Source: inkling2.md section 5.6.

Weights may be NVFP4 (`plugins.nvfp4`, a global scale for each expert), decoded with their global
scales, or MXFP8 (`plugins.mxfp8`).
Their values without the global scale are those of the products; it multiplies the float32 sums,
before they are rounded.

With `partial` this is one rank's part of the sum: it stays float32, and the ranks' parts are added
before they are rounded. Ranks share the experts in one of two ways:
- with `rank`, each holds whole experts, rank r the L experts from r*L on. Every d is rounded as
  above, so the sum over ranks differs from a single rank's in the order of additions only;
- without, each holds a slice of every expert's F hidden units (gate and up rows, down columns), so
  d is in parts too and stays float32.
"""

from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins import mxfp8, nvfp4
from inkrt.plugins.caseutil import int32, mxfp8_arguments, normal, weight_arguments
from inkrt.plugins.narrow import elementwise_rows, linear_rows
from inkrt.plugins.registry import MAX_VERIFY_TOKENS, Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    rank: Tensor | None,
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Tensor:
    """[T, D] in x's dtype, or float32 if partial."""
    axes = Axes("experts")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("routing_weights", routing_weights, "T", "K", dtype=torch.float32)
    axes.fit("expert_ids", expert_ids, "T", "K", dtype=torch.int32)
    return fit_expert_weights(
        axes, x, (gate_up, gate_up_scales, gate_up_global_scale),
        (down, down_scales, down_global_scale), rank, gate_softcap, up_softcap, partial,
    )  # fmt: skip


# A weight as an operator takes it: matrices or codes, scales, global scales.
Weight = tuple[Tensor, Tensor | None, Tensor | None]


def fit_expert_weights(
    axes: Axes,
    x: Tensor,
    gate_up: Weight,
    down: Weight,
    rank: Tensor | None,
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Tensor:
    """Check the expert weights against x [T, D], bound before in `axes`; returns the fake output.

    Raises:
        BuildError: a shape, a dtype or a cap does not fit.
    """
    if rank is not None:
        axes.fit("rank", rank, 1, dtype=torch.int32)
    _fit_weight(axes, "down", down, "L", "D", "F", dtype=x.dtype)
    _fit_weight(axes, "gate_up", gate_up, "L", "2F", "D", dtype=x.dtype)
    axes.require(
        axes["2F"] == 2 * axes["F"],
        f"gate_up has {axes['2F']} rows per expert, expected 2F={2 * axes['F']}",
    )
    axes.require(gate_softcap > 0, f"gate_softcap is {gate_softcap}, expected > 0")
    axes.require(up_softcap > 0, f"up_softcap is {up_softcap}, expected > 0")
    return x.new_empty(x.shape, dtype=torch.float32 if partial else x.dtype)


def _fit_weight(axes: Axes, name: str, weight: Weight, *letters: str, dtype: torch.dtype) -> None:
    """Check a weight of any of the three forms; `letters` as for `nvfp4.fit_weight`."""
    codes, scales, global_scale = weight
    if scales is not None and global_scale is None:
        mxfp8.fit_weight(axes, name, codes, scales, *letters)
    else:
        nvfp4.fit_weight(
            axes, name, codes, scales, global_scale, *letters, dtype=dtype, decoded=True
        )


WeightForm = Literal["dtype", "nvfp4", "mxfp8", "scaled"]


def expert_arguments(
    generator: torch.Generator, dtype: torch.dtype, num_experts: int, width: int, num_hidden: int,
    form: WeightForm,
) -> Arguments:  # fmt: skip
    """gate_up and down of `num_experts` experts, for cases."""
    arguments: Arguments = {}
    for name, rows, columns in (("gate_up", 2 * num_hidden, width), ("down", width, num_hidden)):
        make = mxfp8_arguments if form == "mxfp8" else weight_arguments
        options = {} if form == "mxfp8" else {"quantized": form == "nvfp4"}
        arguments |= make(
            name, generator, dtype, num_experts, rows, columns, scale=columns**-0.5, **options
        )
        if form == "scaled":
            factors = torch.rand(num_experts, generator=generator) + 0.5
            arguments[f"{name}_global_scale"] = factors
    return arguments


def cases() -> list[Case]:
    """Odd sizes, caps that bite, experts nobody is routed to, one rank's share of both kinds.

    All forms of weights.
    """

    def make(
        name: str, num_rows: int, width: int, num_hidden: int, num_experts: int, top_k: int,
        *, scale: float = 1.0, partial: bool = False, rank: int | None = None, num_ranks: int = 1,
        form: WeightForm = "dtype",
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            share = num_experts // num_ranks
            shuffled = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=-1)
            return {
                "x": normal(generator, dtype, num_rows, width, scale=scale),
                "routing_weights": torch.rand(num_rows, top_k, generator=generator) * 2,
                "expert_ids": shuffled[:, :top_k].to(torch.int32),
                **expert_arguments(generator, dtype, share, width, num_hidden, form),
                "rank": None if rank is None else int32(rank),
                "gate_softcap": 4.0,
                "up_softcap": 25.0,
                "partial": partial,
            }

        # bfloat16 rounds four times on the way (gate and up, activation, down, sum): 8e-3 is twice
        # the relative error of one worst-case rounding.
        return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 8e-3})

    return [
        make("T1_K1", 1, 5, 3, 4, 1),
        make("T3_K2_E9", 3, 33, 17, 9, 2),
        make("T11_beyond_caps", 11, 48, 20, 5, 3, scale=30.0),
        make("T4_all_experts", 4, 24, 7, 3, 3),
        make("T5_partial", 5, 40, 11, 6, 2, partial=True),
        make("T13_partial", 13, 40, 11, 6, 2, partial=True),
        make("T5_rank_of_3", 5, 40, 11, 6, 4, partial=True, rank=2, num_ranks=3),
        make("T13_first_of_2", 13, 40, 11, 6, 2, partial=True, rank=0, num_ranks=2),
        make("T4_nvfp4", 4, 48, 32, 7, 3, form="nvfp4"),
        make("T9_nvfp4_partial", 9, 32, 16, 6, 2, partial=True, form="nvfp4"),
        make("T4_scaled", 4, 24, 7, 5, 3, form="scaled"),
        make("T9_scaled_partial", 9, 32, 17, 6, 2, partial=True, form="scaled"),
        make("T2_mxfp8", 2, 64, 32, 5, 2, form="mxfp8"),
        make("T9_mxfp8_rank_of_2", 9, 32, 64, 6, 3, partial=True, rank=1, num_ranks=2,
             form="mxfp8"),
    ]  # fmt: skip


@operator("experts", fake=fake, cases=cases)
def experts(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    rank: Tensor | None,
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Tensor:
    """Apply to every token the experts it is routed to.

    Args:
        x: [T, D] float32 or bfloat16.
        routing_weights: float32 [T, K].
        expert_ids: int32 [T, K], different within a row.
        gate_up: x's dtype [L, 2 * F, D], the gate's F rows first; or codes.
        gate_up_scales: uint8 or None, see `plugins.nvfp4` and `plugins.mxfp8`.
        gate_up_global_scale: float32 [L] of NVFP4, decoded or not, else None; gate and up of an
            expert share one.
        down: x's dtype [L, D, F], or codes.
        down_scales: see gate_up_scales.
        down_global_scale: see gate_up_global_scale.
        rank: int32 [1] if the weights are the L experts of this rank, else None (L is all).
        gate_softcap: cap of the gate's linear factor.
        up_softcap: cap of the up-projection.
        partial: the weights are one rank's share; see the module docstring.

    Returns:
        [T, D] of x's dtype, or float32 if partial.
    """
    # A definition may leave the sum over ranks to the builder's placement of collectives; what runs
    # is one rank.
    assert partial or rank is None, "a rank's share of the experts gives a partial sum only"
    is_slice = partial and rank is None
    is_narrow = len(x) <= MAX_VERIFY_TOKENS
    linear = linear_rows if is_narrow else F.linear
    own, counts, pairs = _by_expert(expert_ids, 0 if rank is None else int(rank) * len(down), down)
    tokens = pairs // expert_ids.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float32)

    def multiply(rows: Tensor, weight: Weight, expert: int, dtype: torch.dtype) -> Tensor:
        """A product with one expert's matrix, rounded to `dtype` at the end."""
        codes, scales, global_scale = (None if w is None else w[expert] for w in weight)
        assert codes is not None
        if global_scale is not None:
            values = nvfp4.float32_matrices(codes, scales)
            return (linear(rows.float(), values) * global_scale).to(dtype)
        if scales is None:
            return linear(rows.to(dtype), codes.to(dtype))
        return linear(rows.to(dtype), mxfp8.dequantize(codes, scales, dtype))

    # Tokens in ascending order: the matrix product sees its rows as the reference model's does.
    gate_ups = (gate_up, gate_up_scales, gate_up_global_scale)
    hidden = [
        multiply(x[t], gate_ups, e, x.dtype)
        for e, t in zip(own, torch.split(tokens, counts), strict=True)
    ]
    if is_narrow and own:
        # All experts at once.
        together = _gated(elementwise_rows, torch.cat(hidden), gate_softcap, up_softcap)
        gated = list(torch.split(together, counts))
    else:
        gated = [_gated(_whole, both, gate_softcap, up_softcap) for both in hidden]
    downs = (down, down_scales, down_global_scale)
    dtype = torch.float32 if is_slice else x.dtype
    outputs = [multiply(a, downs, e, dtype) for e, a in zip(own, gated, strict=True)]
    if own:
        weights = routing_weights.flatten()[pairs, None]
        # One after the other, so a token's experts by ascending id.
        total.index_add_(0, tokens, torch.cat(outputs).float() * weights)
    return total if partial else total.to(x.dtype)


def _by_expert(
    expert_ids: Tensor, first: int, weights: Tensor
) -> tuple[list[int], list[int], Tensor]:
    """Sort the choices of tokens by expert.

    Args:
        expert_ids: int32 [T, K].
        first: id of the first of the weights' experts.
        weights: [L, ...].

    Returns:
        Indices into the weights of the chosen experts, ascending; how many tokens chose each; and
        int64 [sum], which elements of the flattened ids these choices are, tokens ascending.
    """
    local = expert_ids.flatten() - first
    count = Counter(local.tolist())
    own = sorted(expert for expert in count if 0 <= expert < len(weights))
    counts = [count[expert] for expert in own]
    begin = sum(number for expert, number in count.items() if expert < 0)
    return own, counts, local.argsort(stable=True)[begin : begin + sum(counts)]


def _gated(
    apply: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
    both: Tensor,
    gate_softcap: float,
    up_softcap: float,
) -> Tensor:
    """Activation [n, F] of gate and up [n, 2 * F]; `apply` evaluates a function of elements."""
    gate, up = both.float().chunk(2, dim=-1)
    capped_gate = apply(torch.tanh, gate / gate_softcap) * gate_softcap
    capped_up = apply(torch.tanh, up / up_softcap) * up_softcap
    return (capped_gate * apply(torch.sigmoid, gate) * capped_up).to(both.dtype)


def _whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)
