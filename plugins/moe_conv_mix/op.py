"""moe_conv_mix: a mixture of experts, what stands between it and the next layer, and its products.

    residual_out, normed = allreduce_conv_mix(moe(x, ...), ...)
    outs[i] = linear(normed[query_of[i]], weights[i])

It has the bits of `moe`, `allreduce_conv_mix` and `linear` one after the other. A kernel of several
ranks sends the product's parts to all of them from within, so that none waits for it to end, and
goes on with the next layer's input projections, if there are any. Letters as there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inkrt.plugins.allreduce_conv_mix.op import allreduce_conv_mix, combine
from inkrt.plugins.allreduce_conv_mix.op import cases as mix_cases
from inkrt.plugins.allreduce_conv_mix.op import fake as fake_mix
from inkrt.plugins.caseutil import normal
from inkrt.plugins.linear.op import linear
from inkrt.plugins.linear_group.op import MAX_WEIGHTS
from inkrt.plugins.moe.op import cases as moe_cases
from inkrt.plugins.moe.op import fake as fake_moe
from inkrt.plugins.moe.op import moe
from inkrt.plugins.registry import Arguments, Case, Collective, operator
from inkrt.plugins.shapes import Axes, in_name_of


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
    conv_weight: Tensor,
    conv_state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    residual: Tensor | None,
    sources: Sequence[Tensor],
    queries: Tensor,
    norm_weights: Sequence[Tensor],
    mix_eps: float,
    norm_eps: float,
    residual_dtype: torch.dtype,
    dtype: torch.dtype,
    tp_size: int,
    weights: Sequence[Tensor],
    query_of: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual [T, D], the inputs [m, T, D] of what follows, and its products in a row."""
    axes = Axes("moe_conv_mix")
    axes.require(
        len(weights) <= MAX_WEIGHTS, f"{len(weights)} weights, expected up to {MAX_WEIGHTS}"
    )
    axes.require(
        len(query_of) == len(weights) and all(0 <= index < queries.shape[0] for index in query_of),
        f"query_of is {list(query_of)}, expected an index below {queries.shape[0]} for each of "
        f"{len(weights)} weights",
    )
    axes.fit("x", x, "T", "D")
    for number, weight in enumerate(weights):
        axes.fit(f"weights[{number}]", weight, f"N{number}", "D", dtype=dtype)
    with in_name_of("moe_conv_mix"):
        partial = fake_moe(
            x, router_weight, router_bias, gate_up, gate_up_scales, gate_up_global_scale, down,
            down_scales, down_global_scale, rank, top_k, route_scale, gate_softcap, up_softcap,
            tp_size > 1,
        )  # fmt: skip
        residual_out, normed = fake_mix(
            partial, conv_weight, conv_state, position, num_tokens,
            slot, residual, sources, queries, norm_weights, mix_eps, norm_eps, residual_dtype,
            dtype, tp_size,
        )  # fmt: skip
    num_products = x.shape[0] * sum(weight.shape[0] for weight in weights)
    return residual_out, normed, normed.new_empty(num_products)


def cases() -> list[Case]:
    """A single rank: those of `moe` for one token and for several, with a mix of its width."""

    def make(of_moe: Case, of_mix: Case, rows: Sequence[int] = ()) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            product, mix = (case.arguments(dtype, generator) for case in (of_moe, of_mix))
            product["x"] = normal(generator, dtype, *mix["partial"].shape)
            del product["partial"], mix["partial"]
            num_queries, width = mix["queries"].shape
            weights = [normal(generator, dtype, n, width, scale=width**-0.5) for n in rows]
            query_of = [i % num_queries for i in range(len(rows))]
            return {**product, **mix, "weights": weights, "query_of": query_of}

        rtol = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2}
        name = f"{of_moe.name}_{of_mix.name}{'_products' if rows else ''}"
        return Case(name, arguments, rtol)

    of_moe = {case.name: case for case in moe_cases()}
    of_mix = {case.name: case for case in mix_cases()}
    return [
        make(of_moe["T1_many_experts"], of_mix["short_chunk"], (33, 5, 17)),
        make(of_moe["T8_like_nano"], of_mix["one_slice_new_sum"]),
        make(of_moe["T4_many_experts"], of_mix["short_chunk"]),
    ]


def _payload(
    *,
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
    tp_size: int,
    **_other: object,
) -> Tensor:
    part: Tensor = moe(
        x, router_weight, router_bias, gate_up, gate_up_scales, gate_up_global_scale, down,
        down_scales, down_global_scale, rank, top_k, route_scale, gate_softcap, up_softcap,
        tp_size > 1,
    )  # fmt: skip
    return part


def _combine(payloads: Sequence[Tensor], **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    residual_out, normed = combine(payloads, **arguments)
    return _with_products(residual_out, normed, arguments["weights"], arguments["query_of"])


def _with_products(
    residual_out: Tensor, normed: Tensor, weights: Sequence[Tensor], query_of: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    products = [
        linear(normed[index], weight, False).flatten()
        for index, weight in zip(query_of, weights, strict=True)
    ]
    return residual_out, normed, torch.cat(products) if products else normed.new_empty(0)


@operator(
    "moe_conv_mix",
    fake=fake,
    cases=cases,
    mutates=("conv_state",),
    collective=Collective(payload=_payload, combine=_combine),
)
def moe_conv_mix(
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
    conv_weight: Tensor,
    conv_state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    residual: Tensor | None,
    sources: Sequence[Tensor],
    queries: Tensor,
    norm_weights: Sequence[Tensor],
    mix_eps: float,
    norm_eps: float,
    residual_dtype: torch.dtype,
    dtype: torch.dtype,
    tp_size: int,
    weights: Sequence[Tensor],
    query_of: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the experts, reduce, add to the residual and make the inputs of the next layer.

    Args:
        x: [T, D] float32 or bfloat16.
        router_weight: see `moe`, as the following.
        router_bias: float32 [E].
        gate_up: of the experts.
        gate_up_scales: or None.
        gate_up_global_scale: or None.
        down: of the experts.
        down_scales: or None.
        down_global_scale: or None.
        rank: or None.
        top_k: experts per token.
        route_scale: sum of a token's routing weights.
        gate_softcap: cap of the gate's linear factor.
        up_softcap: cap of the up-projection.
        conv_weight: see `allreduce_conv_mix`, as the following.
        conv_state: written.
        position: of the first token.
        num_tokens: rows that are there.
        slot: of the ring.
        residual: or None.
        sources: mixed with the new residual.
        queries: of the mix.
        norm_weights: one per query, or none.
        mix_eps: of the norms of the sources.
        norm_eps: of the weighted norms.
        residual_dtype: of the new residual.
        dtype: of the model.
        tp_size: number of ranks.
        weights: of what follows, `dtype` [N_i, D] each; at most 8, or none.
        query_of: for each weight which of the m inputs it multiplies.

    Returns:
        The new residual, `residual_dtype` [T, D], `dtype` [m, T, D], and of all weights, one after
        the other, `dtype` [T, N_i], as one vector: an operator that writes state gives no list.
    """
    partial = moe(
        x, router_weight, router_bias, gate_up, gate_up_scales, gate_up_global_scale, down,
        down_scales, down_global_scale, rank, top_k, route_scale, gate_softcap, up_softcap,
        tp_size > 1,
    )  # fmt: skip
    residual_out, normed = allreduce_conv_mix(
        partial, conv_weight, conv_state, position, num_tokens,
        slot, residual, sources, queries, norm_weights, mix_eps, norm_eps, residual_dtype,
        dtype, tp_size,
    )  # fmt: skip
    return _with_products(residual_out, normed, weights, query_of)
