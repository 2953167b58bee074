"""moe: a mixture-of-experts layer, router and experts in one operator.

    out = experts(x, router(x))

It has the bits of `router` followed by `experts`; a kernel saves the launches between them. Source:
inkling2.md section 5.6.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.experts.op import experts, fit_expert_weights
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.router.op import router
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
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
    return fit_expert_weights(axes, x, gate_up, down, rank, gate_softcap, up_softcap, partial)


def cases() -> list[Case]:
    """Odd sizes, one expert of many, all experts, and one rank's share of both kinds."""

    def make(
        name: str, num_rows: int, width: int, num_hidden: int, num_experts: int, top_k: int,
        *, partial: bool = False, rank: int | None = None, num_ranks: int = 1,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            share = num_experts // num_ranks
            return {
                "x": normal(generator, dtype, num_rows, width),
                "router_weight": normal(
                    generator, torch.float32, num_experts, width, scale=width**-0.5
                ),
                "router_bias": normal(generator, torch.float32, num_experts, scale=0.1),
                "gate_up": normal(
                    generator, dtype, share, 2 * num_hidden, width, scale=width**-0.5
                ),
                "down": normal(generator, dtype, share, width, num_hidden, scale=num_hidden**-0.5),
                "rank": None if rank is None else int32(rank),
                "top_k": top_k,
                "route_scale": 8.0,
                "gate_softcap": 4.0,
                "up_softcap": 25.0,
                "partial": partial,
            }

        # As for `experts`, whose roundings these are.
        return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 8e-3})

    return [
        make("T1_K1_E23", 1, 19, 5, 23, 1),
        make("T3_K2", 3, 33, 17, 9, 2),
        make("T11_all_experts", 11, 24, 7, 3, 3),
        make("T5_partial", 5, 40, 11, 6, 4, partial=True),
        make("T3_rank_of_2", 3, 40, 11, 6, 4, partial=True, rank=1, num_ranks=2),
    ]


@operator("moe", fake=fake, cases=cases)
def moe(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
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
        gate_up: x's dtype [L, 2 * F, D], the gate's F rows first.
        down: x's dtype [L, D, F].
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
        x, routing_weights, expert_ids, gate_up, down, rank, gate_softcap, up_softcap, partial
    )
    return out
