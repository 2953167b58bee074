"""experts: the routed experts of a layer (softcapped SwiGLU) and their weighted sum.

For each expert e that token t is routed to with weight w:

    [g | u] = x gate_up_e^T                                          rounded to x's dtype
    a       = cap(g; gate_softcap) * sigmoid(g) * cap(u; up_softcap)  float32, rounded to x's dtype
    d       = a down_e^T                                             rounded to x's dtype
    out_t   = sum_e fp32(d_e) * w_e          float32, ascending expert id, rounded once

with cap(v; c) = c tanh(v / c); the sigmoid sees the raw gate. Source: inkling2.md section 5.6.

With `partial` this is one rank's part of the sum: it stays float32, and the ranks' parts are added
before they are rounded. Ranks share the experts in one of two ways:
- with `rank`, each holds whole experts, rank r the L experts from r*L on. Every d is rounded as
  above, so the sum over ranks differs from a single rank's in the order of additions only;
- without, each holds a slice of every expert's F hidden units (gate and up rows, down columns), so
  d is in parts too and stays float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.registry import Arguments, Case, operator, row_by_row
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
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
    return fit_expert_weights(axes, x, gate_up, down, rank, gate_softcap, up_softcap, partial)


def fit_expert_weights(
    axes: Axes,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
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
    axes.fit("down", down, "L", "D", "F", dtype=x.dtype)
    axes.fit("gate_up", gate_up, "L", "2F", "D", dtype=x.dtype)
    axes.require(
        axes["2F"] == 2 * axes["F"],
        f"gate_up has {axes['2F']} rows per expert, expected 2F={2 * axes['F']}",
    )
    axes.require(gate_softcap > 0, f"gate_softcap is {gate_softcap}, expected > 0")
    axes.require(up_softcap > 0, f"up_softcap is {up_softcap}, expected > 0")
    return x.new_empty(x.shape, dtype=torch.float32 if partial else x.dtype)


def cases() -> list[Case]:
    """Odd sizes, caps that bite, experts nobody is routed to, one rank's share of both kinds."""

    def make(
        name: str, num_rows: int, width: int, num_hidden: int, num_experts: int, top_k: int,
        *, scale: float = 1.0, partial: bool = False, rank: int | None = None, num_ranks: int = 1,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            share = num_experts // num_ranks
            shuffled = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=-1)
            return {
                "x": normal(generator, dtype, num_rows, width, scale=scale),
                "routing_weights": torch.rand(num_rows, top_k, generator=generator) * 2,
                "expert_ids": shuffled[:, :top_k].to(torch.int32),
                "gate_up": normal(
                    generator, dtype, share, 2 * num_hidden, width, scale=width**-0.5
                ),
                "down": normal(generator, dtype, share, width, num_hidden, scale=num_hidden**-0.5),
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
    ]


def _cap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def _expert(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_softcap: float, up_softcap: float, is_slice: bool
) -> Tensor:
    """One expert on the n tokens routed to it: [n, D] -> [n, D]; float32 if only a slice of it."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    gate, up = gate.float(), up.float()
    activation = (_cap(gate, gate_softcap) * torch.sigmoid(gate) * _cap(up, up_softcap)).to(x.dtype)
    if is_slice:
        return F.linear(activation.float(), down.float())
    return F.linear(activation, down)


def _sum_experts(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    rank: Tensor | None,
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32)
    # A definition may leave the sum over ranks to the builder's placement of collectives; what runs
    # is one rank.
    assert partial or rank is None, "a rank's share of the experts gives a partial sum only"
    first = 0 if rank is None else int(rank) * len(down)
    is_slice = partial and rank is None
    for expert in sorted(set(expert_ids.flatten().tolist())):
        own = expert - first
        if not 0 <= own < len(down):
            continue
        # Tokens in ascending order: the matrix product sees its rows as the reference model's does.
        token, place = (expert_ids == expert).nonzero(as_tuple=True)
        y = _expert(x[token], gate_up[own], down[own], gate_softcap, up_softcap, is_slice)
        total[token] += y.float() * routing_weights[token, place, None]
    return total if partial else total.to(x.dtype)


@operator("experts", fake=fake, cases=cases)
def experts(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
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
        gate_up: x's dtype [L, 2 * F, D], the gate's F rows first.
        down: x's dtype [L, D, F].
        rank: int32 [1] if the weights are the L experts of this rank, else None (L is all).
        gate_softcap: cap of the gate's linear factor.
        up_softcap: cap of the up-projection.
        partial: the weights are one rank's share; see the module docstring.

    Returns:
        [T, D] of x's dtype, or float32 if partial.
    """
    return row_by_row(
        lambda x, w, ids: _sum_experts(
            x, w, ids, gate_up, down, rank, gate_softcap, up_softcap, partial
        ),
        x,
        routing_weights,
        expert_ids,
    )
