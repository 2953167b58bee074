"""allreduce_conv_mix: reduction, convolution, residual, mix and norms between two layer halves.

    x            = dtype(sum of the ranks' partial results)      only if there are several ranks
    residual_out = residual_dtype(residual + short_conv(x))      starts at short_conv(x) if None
    mixed_i      = residual_mix([*sources, residual_out], query_i)
    normed_i     = dtype(rms_norm(mixed_i, norm_weight_i))       or mixed_i itself, without norms

It has the bits of `all_reduce`, `short_conv`, `residual_add`, `residual_mix` and `rms_norm` one
after the other. Source: inkling2.md sections 5.2, 5.5 and 11. Letters: T tokens, D hidden size, m
queries, W taps, R rows of a ring.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.all_reduce.op import sum_in_rank_order
from inkrt.plugins.caseutil import normal, step_arguments
from inkrt.plugins.registry import Arguments, Case, Collective, operator
from inkrt.plugins.residual_add.op import residual_add
from inkrt.plugins.residual_mix.op import residual_mix
from inkrt.plugins.rms_norm.op import rms_norm
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.short_conv.op import short_conv


def _payload(*, partial: Tensor, **_other: object) -> Tensor:
    return partial


def combine(
    payloads: Sequence[Tensor],
    *,
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
    **_other: object,
) -> tuple[Tensor, Tensor]:
    """The two results from the parts of all ranks; see `allreduce_conv_mix`."""
    assert len(payloads) == tp_size, f"{len(payloads)} payloads for {tp_size} ranks"
    x = sum_in_rank_order(payloads, dtype) if tp_size > 1 else payloads[0]
    update = short_conv(x, conv_weight, conv_state, position, num_tokens, slot)
    residual_out = residual_add(residual, update, residual_dtype)
    mixed = residual_mix([*sources, residual_out], queries, mix_eps)
    if not norm_weights:
        return residual_out, mixed
    normed = [
        rms_norm(row, weight, norm_eps, dtype)
        for row, weight in zip(mixed, norm_weights, strict=True)
    ]
    return residual_out, torch.stack(normed)


def fake(
    partial: Tensor,
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
    """The residual [T, D] and the inputs [m, T, D] of what follows, in float32 without norms."""
    axes = Axes("allreduce_conv_mix")
    axes.require(tp_size >= 1, f"tp_size is {tp_size}, expected >= 1")
    axes.require(dtype in MODEL_DTYPES, f"dtype is {dtype}, expected float32 or bfloat16")
    axes.require(
        residual_dtype in MODEL_DTYPES,
        f"residual_dtype is {residual_dtype}, expected float32 or bfloat16",
    )
    axes.require(mix_eps > 0, f"mix_eps is {mix_eps}, expected > 0")
    axes.require(norm_eps > 0, f"norm_eps is {norm_eps}, expected > 0")
    axes.fit("partial", partial, "T", "D", dtype=torch.float32 if tp_size > 1 else dtype)
    axes.fit("conv_weight", conv_weight, "D", "W", dtype=torch.float32)
    axes.fit("conv_state", conv_state, "slots", "R", "D", dtype=dtype)
    axes.require(
        axes["R"] >= axes["W"] - 1,
        f"conv_state keeps {axes['R']} positions, expected at least W-1={axes['W'] - 1}",
    )
    axes.step(position, num_tokens, slot)
    if residual is not None:
        axes.fit("residual", residual, "T", "D", dtype=MODEL_DTYPES)
    for i, source in enumerate(sources):
        axes.fit(f"sources[{i}]", source, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("queries", queries, "m", "D", dtype=torch.float32)
    axes.require(
        len(norm_weights) in (0, axes["m"]),
        f"norm_weights has {len(norm_weights)} tensors, expected one per query, m={axes['m']}, or "
        f"none",
    )
    for i, weight in enumerate(norm_weights):
        axes.fit(f"norm_weights[{i}]", weight, "D", dtype=MODEL_DTYPES)
    shape = (axes["T"], axes["D"])
    return (
        partial.new_empty(shape, dtype=residual_dtype),
        partial.new_empty((axes["m"], *shape), dtype=dtype if norm_weights else torch.float32),
    )


def cases() -> list[Case]:
    """A single rank: no residual, one and three queries, no and many sources, padding rows.

    Widths of whole fours are those that GPU kernels take.
    """

    def make(
        name: str, *, num_rows: int, num_tokens: int, width: int, num_sources: int,
        num_queries: int, position: int, has_residual: bool, keeps_float32: bool,
        has_norms: bool = True,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            rows = (num_rows, width)
            # A residual that stays float32 comes from a rounded one; see inkling2.md section 4.
            residual_in = dtype if keeps_float32 else torch.float32
            return {
                "partial": normal(generator, dtype, *rows),
                "conv_weight": normal(generator, torch.float32, width, 4, scale=0.5),
                "conv_state": normal(generator, dtype, 3, 16, width),
                **step_arguments(position, num_tokens, slot=2),
                "residual": normal(generator, residual_in, *rows) if has_residual else None,
                "sources": [normal(generator, dtype, *rows) for _ in range(num_sources)],
                "queries": normal(generator, torch.float32, num_queries, width),
                "norm_weights": [
                    1 + normal(generator, dtype, width, scale=0.1)
                    for _ in range(num_queries if has_norms else 0)
                ],
                "mix_eps": 1e-6,
                "norm_eps": 1e-3,
                "residual_dtype": torch.float32 if keeps_float32 else dtype,
                "dtype": dtype,
                "tp_size": 1,
            }

        return Case(name, arguments)

    return [
        make(
            "new_partial_sum",
            num_rows=3,
            num_tokens=3,
            width=33,
            num_sources=2,
            num_queries=1,
            position=0,
            has_residual=False,
            keeps_float32=True,
        ),
        make(
            "before_full_layer",
            num_rows=7,
            num_tokens=7,
            width=50,
            num_sources=4,
            num_queries=3,
            position=14,
            has_residual=True,
            keeps_float32=False,
        ),
        make(
            "padding",
            num_rows=13,
            num_tokens=10,
            width=17,
            num_sources=9,
            num_queries=1,
            position=1,
            has_residual=True,
            keeps_float32=True,
        ),
        make(
            "no_sources",
            num_rows=1,
            num_tokens=1,
            width=5,
            num_sources=0,
            num_queries=1,
            position=99,
            has_residual=True,
            keeps_float32=False,
        ),
        # Sizes that kernels take: slices of 512 columns, the last of them of any width.
        make(
            "three_slices_many_sources",
            num_rows=8,
            num_tokens=8,
            width=1032,
            num_sources=8,
            num_queries=3,
            position=29,
            has_residual=True,
            keeps_float32=False,
        ),
        make(
            "full_width",
            num_rows=2,
            num_tokens=2,
            width=4608,
            num_sources=8,
            num_queries=1,
            position=15,
            has_residual=True,
            keeps_float32=True,
        ),
        make(
            "one_slice_new_sum",
            num_rows=5,
            num_tokens=5,
            width=256,
            num_sources=1,
            num_queries=1,
            position=0,
            has_residual=False,
            keeps_float32=True,
        ),
        make(
            "one_row_most_sources",
            num_rows=1,
            num_tokens=1,
            width=512,
            num_sources=9,
            num_queries=1,
            position=1,
            has_residual=True,
            keeps_float32=True,
        ),
        make(
            "chunk_over_its_ring",
            num_rows=40,
            num_tokens=37,
            width=520,
            num_sources=2,
            num_queries=1,
            position=2,
            has_residual=True,
            keeps_float32=True,
        ),
        make(
            "short_chunk",
            num_rows=14,
            num_tokens=2,
            width=64,
            num_sources=0,
            num_queries=3,
            position=31,
            has_residual=True,
            keeps_float32=False,
        ),
        make(
            "without_norms",
            num_rows=4,
            num_tokens=4,
            width=640,
            num_sources=3,
            num_queries=1,
            position=17,
            has_residual=True,
            keeps_float32=False,
            has_norms=False,
        ),
        make(
            "without_norms_in_whole_slices",
            num_rows=2,
            num_tokens=2,
            width=512,
            num_sources=2,
            num_queries=3,
            position=3,
            has_residual=True,
            keeps_float32=True,
            has_norms=False,
        ),
    ]


@operator(
    "allreduce_conv_mix",
    fake=fake,
    cases=cases,
    mutates=("conv_state",),
    collective=Collective(payload=_payload, combine=combine),
)
def allreduce_conv_mix(
    partial: Tensor,
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
    """Reduce a layer half's output, add it to the residual and make the next half's inputs.

    Args:
        partial: [T, D], this rank's part in float32, or the whole in `dtype` on a single rank.
        conv_weight: float32 [D, W].
        conv_state: `dtype` [slots, R, D], ring of convolution inputs; written.
        position: int32 [1], of the first token.
        num_tokens: int32 [1]; rows at and above it are padding.
        slot: int32 [1].
        residual: [T, D], or None where a new partial sum starts.
        sources: each [T, D], mixed with the new residual, which comes last.
        queries: float32 [m, D].
        norm_weights: m of [D]; none for results that something else norms.
        mix_eps: of the norms of the sources.
        norm_eps: of the weighted norms.
        residual_dtype: of the new residual.
        dtype: of the model.
        tp_size: number of ranks.

    Returns:
        The new residual, `residual_dtype` [T, D], and `dtype` [m, T, D], float32 without norms.
    """
    return combine(
        [partial], conv_weight=conv_weight, conv_state=conv_state, position=position,
        num_tokens=num_tokens, slot=slot, residual=residual, sources=sources, queries=queries,
        norm_weights=norm_weights, mix_eps=mix_eps, norm_eps=norm_eps,
        residual_dtype=residual_dtype, dtype=dtype, tp_size=tp_size,
    )  # fmt: skip
