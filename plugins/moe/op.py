"""moe: a mixture-of-experts layer, router and experts in one operator.

    out = experts(x, router(x))

It has the bits of `router` followed by `experts`; a kernel saves the launches between them. Source:
inkling2.md section 5.6.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.experts.op import (
    WeightForm,
    expert_arguments,
    experts,
    fit_expert_weights,
)
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.router.op import router
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    rank: Tensor | None,
    top_k: int,
    route_scale: float,
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Tensor:
    """[T, D] in x's dtype, or float32 if partial."""
    axes = Axes("moe")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("router_weight", router_weight, "E", "D", dtype=torch.float32)
    axes.fit("router_bias", router_bias, "E", dtype=torch.float32)
    axes.require(1 <= top_k <= axes["E"], f"top_k is {top_k}, expected 1 to E={axes['E']}")
    axes.require(route_scale > 0, f"route_scale is {route_scale}, expected > 0")
    return fit_expert_weights(
        axes, x, (gate_up, gate_up_scales, gate_up_global_scale),
        (down, down_scales, down_global_scale), rank, gate_softcap, up_softcap, partial,
    )  # fmt: skip


_KERNEL_WIDTHS: tuple[tuple[WeightForm, int], ...] = (
    ("dtype", 48), ("nvfp4", 144), ("mxfp8", 96),
)  # fmt: skip


def cases() -> list[Case]:
    """Odd sizes, one expert of many, all experts, and one rank's share of both kinds.

    Then sizes that kernels take, in all three forms: padded K, ranks without a token's experts, all
    tokens with the same experts, as many values and experts as the model has.
    """

    def make(
        name: str, num_rows: int, width: int, num_hidden: int, num_experts: int, top_k: int,
        *, partial: bool = False, rank: int | None = None, num_ranks: int = 1,
        form: WeightForm = "dtype", bias: float = 0.1,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            share = num_experts // num_ranks
            return {
                "x": normal(generator, dtype, num_rows, width),
                "router_weight": normal(
                    generator, torch.float32, num_experts, width, scale=width**-0.5
                ),
                "router_bias": normal(generator, torch.float32, num_experts, scale=bias),
                **expert_arguments(generator, dtype, share, width, num_hidden, form),
                "rank": None if rank is None else int32(rank),
                "top_k": top_k,
                "route_scale": 8.0,
                "gate_softcap": 4.0,
                "up_softcap": 25.0,
                "partial": partial,
            }

        # As for `experts`, whose roundings these are; longer sums in float32 are less exact.
        exact = 1e-6 if width < 1024 else 4e-6
        return Case(name, arguments, {torch.float32: exact, torch.bfloat16: 8e-3})

    return [
        make("T1_K1_E23", 1, 19, 5, 23, 1),
        make("T3_K2", 3, 33, 17, 9, 2),
        make("T11_all_experts", 11, 24, 7, 3, 3),
        make("T5_partial", 5, 40, 11, 6, 4, partial=True),
        make("T3_rank_of_2", 3, 40, 11, 6, 4, partial=True, rank=1, num_ranks=2),
        *(
            make(f"T{num_rows}_{form}_kernel", num_rows, 320, width, 40, 8, form=form)
            for num_rows in (1, 2, 8, 19)
            for form, width in _KERNEL_WIDTHS
        ),
        make("T1_like_nano", 1, 256, 64, 8, 2),
        make("T8_like_nano", 8, 256, 64, 8, 2),
        make("T7_nvfp4_slice", 7, 128, 304, 16, 3, partial=True, form="nvfp4"),
        make("T1_mxfp8_slice", 1, 192, 32, 16, 4, partial=True, form="mxfp8"),
        make("T5_nvfp4_rank_of_4", 5, 64, 640, 32, 8, partial=True, rank=2, num_ranks=4,
             form="nvfp4"),
        # More activations than fit shared memory, two parts of K, the second one short.
        make("T8_nvfp4_two_parts", 8, 128, 672, 12, 8, form="nvfp4"),
        make("T1_mxfp8_rank_of_4", 1, 64, 32, 16, 2, partial=True, rank=3, num_ranks=4,
             form="mxfp8"),
        make("T6_same_experts", 6, 128, 32, 12, 8, bias=10.0),
        make("T1_wide", 1, 4608, 32, 12, 4, form="nvfp4"),
        make("T3_wide", 3, 4608, 32, 9, 4, form="nvfp4"),
        make("T1_many_experts", 1, 64, 16, 384, 8),
        make("T4_many_experts", 4, 64, 16, 384, 8, form="nvfp4"),
        # Warps of the choice with a lane's experts in part, and lanes with eight.
        make("T3_130_experts", 3, 64, 16, 130, 8, form="nvfp4"),
        make("T4_400_experts", 4, 64, 16, 400, 8, form="nvfp4"),
        make("T2_65_experts_of_260", 2, 64, 32, 260, 8, partial=True, rank=1, num_ranks=4,
             form="nvfp4"),
    ]  # fmt: skip


@operator("moe", fake=fake, cases=cases)
def moe(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    rank: Tensor | None,
    top_k: int,
    route_scale: float,
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Tensor:
    """Route every token and apply its experts.

    Args:
        x: [T, D] float32 or bfloat16.
        router_weight: float32 [E, D].
        router_bias: float32 [E].
        gate_up: x's dtype [L, 2 * F, D], the gate's F rows first; or codes, see `experts`.
        gate_up_scales: see `experts`, as the following.
        gate_up_global_scale: float32 [L] or None.
        down: x's dtype [L, D, F], or codes.
        down_scales: see `experts`.
        down_global_scale: float32 [L] or None.
        rank: int32 [1] if the weights are the L experts of this rank, else None (L is E).
        top_k: experts per token.
        route_scale: sum of a token's routing weights.
        gate_softcap: cap of the gate's linear factor.
        up_softcap: cap of the up-projection.
        partial: gate_up and down are one rank's share; see `experts`.

    Returns:
        [T, D] of x's dtype, or float32 if partial.
    """
    routing_weights, expert_ids = router(x, router_weight, router_bias, top_k, route_scale)
    out: Tensor = experts(
        x, routing_weights, expert_ids, gate_up, gate_up_scales, gate_up_global_scale,
        down, down_scales, down_global_scale, rank, gate_softcap, up_softcap, partial,
    )  # fmt: skip
    return out
