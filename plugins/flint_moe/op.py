"""flint_moe: chooses the experts of every token and adds up routed and shared experts.

    weights, ids = router_top_k(logits, top_k)
    routed       = swiglu_experts(x, weights, ids)              rounded to the model dtype
    out          = routed + linear(shared, shared_down)         each rounded, and their sum

It has the bits of those operators one after the other, `residual_add` being the last; inputs are
what `norm_router_shared` gives. With `partial` both terms are one rank's parts in float32, and so
is their sum: ranks round once, after adding all parts. Weights may be NVFP4 (`plugins.nvfp4`).
Source: flint.md sections 4 and 5.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal, weight_arguments
from inkrt.plugins.linear_nvfp4.op import project
from inkrt.plugins.nvfp4 import fit_weight
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.residual_add.op import residual_add
from inkrt.plugins.router_top_k.op import router_top_k
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.swiglu_experts.op import expert_arguments, fit_experts, swiglu_experts


def fake(
    x: Tensor,
    logits: Tensor,
    shared: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    shared_down: Tensor,
    shared_down_scales: Tensor | None,
    shared_down_global_scale: Tensor | None,
    rank: Tensor | None,
    top_k: int,
    partial: bool,
) -> Tensor:
    """[T, D] in x's dtype, or float32 if partial."""
    axes = Axes("flint_moe")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("logits", logits, "T", "E", dtype=x.dtype)
    axes.fit("shared", shared, "T", "Fs", dtype=x.dtype)
    axes.require(1 <= top_k <= axes["E"], f"top_k is {top_k}, expected 1 to E={axes['E']}")
    fit_experts(
        axes, x, (gate_up, gate_up_scales, gate_up_global_scale),
        (down, down_scales, down_global_scale), rank,
    )  # fmt: skip
    fit_weight(
        axes, "shared_down", shared_down, shared_down_scales, shared_down_global_scale,
        "D", "Fs", dtype=x.dtype,
    )  # fmt: skip
    return x.new_empty(x.shape, dtype=torch.float32 if partial else x.dtype)


def cases() -> list[Case]:
    """Both forms of weights, one expert of many, all experts, one rank's share of both kinds."""

    def make(
        name: str, num_rows: int, width: int, num_hidden: int, num_experts: int, top_k: int,
        *, quantized: bool = False, partial: bool = False, rank: int | None = None,
        num_ranks: int = 1,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            share = num_experts // num_ranks
            num_shared = 2 * num_hidden
            return {
                "x": normal(generator, dtype, num_rows, width),
                "logits": normal(generator, dtype, num_rows, num_experts, scale=2.0),
                "shared": normal(generator, dtype, num_rows, num_shared),
                **expert_arguments(generator, dtype, share, width, num_hidden, quantized=quantized),
                **weight_arguments(
                    "shared_down", generator, dtype, width, num_shared, scale=num_shared**-0.5,
                    quantized=quantized,
                ),
                "rank": None if rank is None else int32(rank),
                "top_k": top_k,
                "partial": partial,
            }  # fmt: skip

        # As for `swiglu_experts`, whose roundings these are but for the last.
        return Case(name, arguments, {torch.float32: 2e-6, torch.bfloat16: 9e-3})

    return [
        make("T1_K1_E23", 1, 19, 5, 23, 1),
        make("T3_K2", 3, 33, 17, 9, 2),
        make("T11_all_experts", 11, 24, 7, 3, 3),
        make("T1_nvfp4", 1, 64, 16, 16, 6, quantized=True),
        make("T9_nvfp4", 9, 32, 48, 8, 6, quantized=True),
        make("T5_partial", 5, 40, 11, 6, 4, partial=True),
        make("T3_rank_of_2", 3, 40, 11, 6, 4, partial=True, rank=1, num_ranks=2),
        make("T2_nvfp4_rank_of_2", 2, 32, 16, 6, 4, partial=True, rank=0, num_ranks=2,
             quantized=True),
    ]  # fmt: skip


@operator("flint_moe", fake=fake, cases=cases)
def flint_moe(
    x: Tensor,
    logits: Tensor,
    shared: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    shared_down: Tensor,
    shared_down_scales: Tensor | None,
    shared_down_global_scale: Tensor | None,
    rank: Tensor | None,
    top_k: int,
    partial: bool,
) -> Tensor:
    """Apply the routed experts and what is left of the shared one.

    Args:
        x: [T, D] float32 or bfloat16, input of the experts; all activations have its dtype.
        logits: [T, E], of the router.
        shared: [T, Fs], activation of the shared expert.
        gate_up: x's dtype [L, 2 * F, D], the gate's F rows first; or NVFP4.
        gate_up_scales: see `plugins.nvfp4`, as the following.
        gate_up_global_scale: float32 [L] or None.
        down: x's dtype [L, D, F], or NVFP4.
        down_scales: see `plugins.nvfp4`.
        down_global_scale: float32 [L] or None.
        shared_down: x's dtype [D, Fs], or NVFP4.
        shared_down_scales: see `plugins.nvfp4`.
        shared_down_global_scale: float32 [1] or None.
        rank: int32 [1] if gate_up and down are the L experts of this rank, else None (L is E).
        top_k: experts per token.
        partial: the weights are one rank's share; see `swiglu_experts`.

    Returns:
        [T, D] of x's dtype, or float32 if partial.
    """
    weights, ids = router_top_k(logits, top_k)
    routed = swiglu_experts(
        x, weights, ids, gate_up, gate_up_scales, gate_up_global_scale,
        down, down_scales, down_global_scale, rank, partial,
    )  # fmt: skip
    down_shared = project(
        shared, shared_down, shared_down_scales, shared_down_global_scale, partial
    )
    out: Tensor = residual_add(routed, down_shared, torch.float32 if partial else x.dtype)
    return out
