"""moe_conv_mix: a mixture of experts and what stands between it and the next layer.

    residual_out, normed = allreduce_conv_mix(moe(x, ...), ...)

It has the bits of `moe` followed by `allreduce_conv_mix`. A kernel of several ranks sends the
product's parts to all of them from within, so that none waits for it to end. Letters as there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.allreduce_conv_mix.op import allreduce_conv_mix, combine
from inkrt.plugins.allreduce_conv_mix.op import cases as mix_cases
from inkrt.plugins.allreduce_conv_mix.op import fake as fake_mix
from inkrt.plugins.caseutil import normal
from inkrt.plugins.moe.op import cases as moe_cases
from inkrt.plugins.moe.op import fake as fake_moe
from inkrt.plugins.moe.op import moe
from inkrt.plugins.registry import Arguments, Case, Collective, operator
from inkrt.plugins.shapes import in_name_of


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
) -> tuple[Tensor, Tensor]:
    """The residual [T, D] and the inputs [m, T, D] of what follows."""
    with in_name_of("moe_conv_mix"):
        partial = fake_moe(
            x, router_weight, router_bias, gate_up, gate_up_scales, gate_up_global_scale, down,
            down_scales, down_global_scale, rank, top_k, route_scale, gate_softcap, up_softcap,
            tp_size > 1,
        )  # fmt: skip
        return fake_mix(
            partial, conv_weight, conv_state, position, num_tokens,
            slot, residual, sources, queries, norm_weights, mix_eps, norm_eps, residual_dtype,
            dtype, tp_size,
        )  # fmt: skip


def cases() -> list[Case]:
    """A single rank: those of `moe` for one token and for several, with a mix of its width."""

    def make(of_moe: Case, of_mix: Case) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            product, mix = (case.arguments(dtype, generator) for case in (of_moe, of_mix))
            product["x"] = normal(generator, dtype, *mix["partial"].shape)
            del product["partial"], mix["partial"]
            return {**product, **mix}

        rtol = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2}
        return Case(f"{of_moe.name}_{of_mix.name}", arguments, rtol)

    of_moe = {case.name: case for case in moe_cases()}
    of_mix = {case.name: case for case in mix_cases()}
    return [
        make(of_moe["T8_like_nano"], of_mix["one_slice_new_sum"]),
        make(of_moe["T1_many_experts"], of_mix["short_chunk"]),
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


@operator(
    "moe_conv_mix",
    fake=fake,
    cases=cases,
    mutates=("conv_state",),
    collective=Collective(payload=_payload, combine=combine),
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
) -> tuple[Tensor, Tensor]:
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

    Returns:
        The new residual, `residual_dtype` [T, D], and `dtype` [m, T, D].
    """
    partial = moe(
        x, router_weight, router_bias, gate_up, gate_up_scales, gate_up_global_scale, down,
        down_scales, down_global_scale, rank, top_k, route_scale, gate_softcap, up_softcap,
        tp_size > 1,
    )  # fmt: skip
    out: tuple[Tensor, Tensor] = allreduce_conv_mix(
        partial, conv_weight, conv_state, position, num_tokens,
        slot, residual, sources, queries, norm_weights, mix_eps, norm_eps, residual_dtype,
        dtype, tp_size,
    )  # fmt: skip
    return out
