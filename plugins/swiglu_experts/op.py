"""swiglu_experts: the routed experts of a layer and their weighted sum.

For the expert e that token t has at rank k of its choice, with weight w[t, k]:

    [g | u] = (x gate_up_e^T) * global_scale_e               float32, not rounded
    a       = dtype( g / (1 + exp2(-g log2(e))) * u )
    y[k]    = dtype( (a down_e^T) * global_scale_e )
    out     = dtype( sum_k fp32(w[t, k]) fp32(y[k]) )        in the order of k

Weights may be NVFP4, or decoded with their global scale (`plugins.nvfp4`); otherwise there is none.
A kernel may use
rcp.approx and ex2.approx (relative error below 2^-22 each); the reference is exact to float32, and
the two differ by less than 2^-20 before a is rounded. In bfloat16 the products of the last sum are
exact in float32, so fused multiply-adds change nothing.

With `partial` this is one rank's part of the sum and stays float32. Ranks share the experts in one
of two ways:
- with `rank`, each holds whole experts, rank r the L experts from r*L on; y is rounded as above;
- without, each holds a slice of every expert's F units, so y is in parts too and stays float32.

Source: flint.md section 5. transformers rounds gate and up, and adds in the order of expert ids.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal, weight_arguments
from inkrt.plugins.narrow import row_by_row
from inkrt.plugins.nvfp4 import fit_weight, float32_matrices
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

LOG2_E = math.log2(math.e)


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
    partial: bool,
) -> Tensor:
    """[T, D] in x's dtype, or float32 if partial."""
    axes = Axes("swiglu_experts")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("routing_weights", routing_weights, "T", "K", dtype=x.dtype)
    axes.fit("expert_ids", expert_ids, "T", "K", dtype=torch.int32)
    fit_experts(
        axes, x, (gate_up, gate_up_scales, gate_up_global_scale),
        (down, down_scales, down_global_scale), rank,
    )  # fmt: skip
    return x.new_empty(x.shape, dtype=torch.float32 if partial else x.dtype)


Weight = tuple[Tensor, Tensor | None, Tensor | None]


def fit_experts(axes: Axes, x: Tensor, gate_up: Weight, down: Weight, rank: Tensor | None) -> None:
    """Check the expert weights against x [T, D], bound before in `axes`.

    Raises:
        BuildError: a shape or dtype does not fit.
    """
    if rank is not None:
        axes.fit("rank", rank, 1, dtype=torch.int32)
    fit_weight(axes, "down", *down, "L", "D", "F", dtype=x.dtype, decoded=True)
    fit_weight(axes, "gate_up", *gate_up, "L", "2F", "D", dtype=x.dtype, decoded=True)
    axes.require(
        axes["2F"] == 2 * axes["F"],
        f"gate_up has {axes['2F']} rows per expert, expected 2F={2 * axes['F']}",
    )


def expert_arguments(
    generator: torch.Generator, dtype: torch.dtype, num_experts: int, width: int, num_hidden: int,
    *, quantized: bool,
) -> Arguments:  # fmt: skip
    """gate_up and down of `num_experts` experts, for cases."""
    shape = (num_experts, 2 * num_hidden, width)
    scale = width**-0.5
    return {
        **weight_arguments("gate_up", generator, dtype, *shape, scale=scale, quantized=quantized),
        **weight_arguments(
            "down", generator, dtype, num_experts, width, num_hidden, scale=num_hidden**-0.5,
            quantized=quantized,
        ),
    }  # fmt: skip


def cases() -> list[Case]:
    """Odd sizes, both forms of weights, experts nobody is routed to, one rank's share."""

    def make(
        name: str, num_rows: int, width: int, num_hidden: int, num_experts: int, top_k: int,
        *, scale: float = 1.0, quantized: bool = False, partial: bool = False,
        rank: int | None = None, num_ranks: int = 1, decoded: bool = False,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            shuffled = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=-1)
            share = num_experts // num_ranks
            factors = {
                f"{name}_global_scale": 0.5 + torch.rand(share, generator=generator)
                for name in (("gate_up", "down") if decoded else ())
            }
            return {
                "x": normal(generator, dtype, num_rows, width, scale=scale),
                "routing_weights": torch.rand(num_rows, top_k, generator=generator).to(dtype),
                "expert_ids": shuffled[:, :top_k].to(torch.int32),
                **expert_arguments(generator, dtype, share, width, num_hidden, quantized=quantized),
                **factors,
                "rank": None if rank is None else int32(rank),
                "partial": partial,
            }

        # bfloat16 rounds the activation, the expert's output and the sum.
        return Case(name, arguments, {torch.float32: 2e-6, torch.bfloat16: 7e-3})

    return [
        make("T1_K1", 1, 5, 3, 4, 1),
        make("T3_K2_E9", 3, 33, 17, 9, 2),
        make("T11_saturated", 11, 48, 20, 7, 6, scale=30.0),
        make("T1_nvfp4", 1, 64, 32, 8, 6, quantized=True),
        make("T13_nvfp4", 13, 32, 48, 5, 3, quantized=True),
        make("T3_decoded", 3, 33, 17, 5, 2, decoded=True),
        make("T5_partial", 5, 40, 11, 6, 2, partial=True),
        make("T9_partial_nvfp4", 9, 32, 16, 6, 2, partial=True, quantized=True),
        make("T5_rank_of_3", 5, 40, 11, 6, 4, partial=True, rank=2, num_ranks=3),
        make("T4_nvfp4_rank_of_2", 4, 16, 16, 6, 2, partial=True, rank=1, num_ranks=2,
             quantized=True),
    ]  # fmt: skip


@operator("swiglu_experts", fake=fake, cases=cases)
def swiglu_experts(
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
    partial: bool,
) -> Tensor:
    """Apply to every token the experts it is routed to.

    Args:
        x: [T, D] float32 or bfloat16.
        routing_weights: x's dtype [T, K].
        expert_ids: int32 [T, K], different within a row.
        gate_up: x's dtype [L, 2 * F, D], the gate's F rows first; or codes of NVFP4.
        gate_up_scales: see `plugins.nvfp4`.
        gate_up_global_scale: float32 [L] or None; gate and up of an expert share one.
        down: x's dtype [L, D, F], or NVFP4.
        down_scales: see `plugins.nvfp4`.
        down_global_scale: float32 [L] or None.
        rank: int32 [1] if the weights are the L experts of this rank, else None (L is all).
        partial: the weights are one rank's share; see the module docstring.

    Returns:
        [T, D] of x's dtype, or float32 if partial.
    """
    # A definition may leave the sum over ranks to the builder's placement of collectives; what runs
    # is one rank.
    assert partial or rank is None, "a rank's share of the experts gives a partial sum only"
    first = 0 if rank is None else int(rank) * len(down)
    is_slice = partial and rank is None

    def expert(own: int, rows: Tensor) -> Tensor:
        """Output of one expert on the n tokens routed to it, float32 [n, D]."""
        gate_up_scale = None if gate_up_scales is None else gate_up_scales[own]
        down_scale = None if down_scales is None else down_scales[own]
        both = F.linear(rows.float(), float32_matrices(gate_up[own], gate_up_scale))
        if gate_up_global_scale is not None:
            both = both * gate_up_global_scale[own]
        gate, up = both.chunk(2, dim=-1)
        activation = (gate / (1 + torch.exp2(-gate * LOG2_E)) * up).to(x.dtype)
        y = F.linear(activation.float(), float32_matrices(down[own], down_scale))
        if down_global_scale is not None:
            y = y * down_global_scale[own]
        return y if is_slice else y.to(x.dtype).float()

    def sum_experts(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        outputs = torch.zeros(*ids.shape, x.shape[1])
        for index in sorted(set(ids.flatten().tolist())):
            if 0 <= index - first < len(down):
                token, place = (ids == index).nonzero(as_tuple=True)
                outputs[token, place] = expert(index - first, rows[token])
        total = torch.zeros(rows.shape, dtype=torch.float32)
        for place in range(ids.shape[1]):
            total += weights[:, place, None].float() * outputs[:, place]
        return total if partial else total.to(x.dtype)

    return row_by_row(sum_experts, x, routing_weights, expert_ids)
