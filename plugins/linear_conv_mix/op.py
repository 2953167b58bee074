"""linear_conv_mix: an output projection and what stands between it and the next layer half.

    residual_out, normed = allreduce_conv_mix(linear(x, ...), ...)

It has the bits of `linear` followed by `allreduce_conv_mix`. A kernel of several ranks sends the
product's parts to all of them from within, so that none waits for it to end. Letters as there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.allreduce_conv_mix.op import allreduce_conv_mix, combine
from inkrt.plugins.allreduce_conv_mix.op import cases as mix_cases
from inkrt.plugins.allreduce_conv_mix.op import fake as fake_mix
from inkrt.plugins.caseutil import normal
from inkrt.plugins.linear.op import fake as fake_linear
from inkrt.plugins.linear.op import linear
from inkrt.plugins.registry import Arguments, Case, Collective, operator
from inkrt.plugins.shapes import in_name_of


def fake(
    x: Tensor,
    weight: Tensor,
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
    with in_name_of("linear_conv_mix"):
        partial = fake_linear(x, weight, tp_size > 1)
        return fake_mix(
            partial, conv_weight, conv_state, position, num_tokens,
            slot, residual, sources, queries, norm_weights, mix_eps, norm_eps, residual_dtype,
            dtype, tp_size,
        )  # fmt: skip


def cases() -> list[Case]:
    """A single rank: one token, padding rows, three queries; K of odd sizes."""

    def make(case: Case, width: int) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            of_mix = case.arguments(dtype, generator)
            num_rows, num_outputs = of_mix.pop("partial").shape
            return {
                "x": normal(generator, dtype, num_rows, width),
                "weight": normal(generator, dtype, num_outputs, width, scale=width**-0.5),
                **of_mix,
            }

        return Case(case.name, arguments, {torch.float32: 2e-6, torch.bfloat16: 8e-3})

    of_mix = {case.name: case for case in mix_cases()}
    return [
        make(of_mix["before_full_layer"], 21),
        make(of_mix["no_sources"], 33),
        make(of_mix["padding"], 40),
    ]


def _payload(*, x: Tensor, weight: Tensor, tp_size: int, **_other: object) -> Tensor:
    part: Tensor = linear(x, weight, tp_size > 1)
    return part


@operator(
    "linear_conv_mix",
    fake=fake,
    cases=cases,
    mutates=("conv_state",),
    collective=Collective(payload=_payload, combine=combine),
)
def linear_conv_mix(
    x: Tensor,
    weight: Tensor,
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
    """Multiply, reduce, add to the residual and make the inputs of the next layer half.

    Args:
        x: float32 or bfloat16 [T, K].
        weight: [D, K], dtype of x.
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
    partial = linear(x, weight, tp_size > 1)
    out: tuple[Tensor, Tensor] = allreduce_conv_mix(
        partial, conv_weight, conv_state, position, num_tokens,
        slot, residual, sources, queries, norm_weights, mix_eps, norm_eps, residual_dtype,
        dtype, tp_size,
    )  # fmt: skip
    return out
