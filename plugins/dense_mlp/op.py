"""dense_mlp: addition, norm and gated MLP of a layer without experts.

    residual, z = add_rms_norm(x, delta, norm_weight)
    out         = linear(silu_mul(linear(z, gate_up)), down)

It has the bits of those operators one after the other; weights may be NVFP4 (`plugins.nvfp4`).
Source: flint.md sections 4 and 5, layers 0 and 1.
"""

import torch
from torch import Tensor

from inkrt.plugins.add_rms_norm.op import add_rms_norm, fit_add_norm
from inkrt.plugins.caseutil import normal, weight_arguments
from inkrt.plugins.linear_nvfp4.op import project
from inkrt.plugins.nvfp4 import fit_weight
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import Axes
from inkrt.plugins.silu_mul.op import silu_mul


def fake(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    eps: float,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    """The residual [T, D] in x's dtype and the output [T, D], float32 if partial."""
    axes = Axes("dense_mlp")
    fit_add_norm(axes, x, delta, norm_weight, eps, "norm_weight")
    fit_weight(axes, "down", down, down_scales, down_global_scale, "D", "F", dtype=x.dtype)
    fit_weight(
        axes, "gate_up", gate_up, gate_up_scales, gate_up_global_scale, "2F", "D", dtype=x.dtype
    )
    axes.require(
        axes["2F"] == 2 * axes["F"], f"gate_up has {axes['2F']} rows, expected 2F={2 * axes['F']}"
    )
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32 if partial else x.dtype)


def cases() -> list[Case]:
    """Both forms of weights, a first layer without an update, one rank's part."""

    def make(
        name: str, num_rows: int, width: int, num_hidden: int, *, has_delta: bool = True,
        quantized: bool = False, partial: bool = False,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            shape = (2 * num_hidden, width)
            return {
                "x": normal(generator, dtype, num_rows, width),
                "delta": normal(generator, dtype, num_rows, width) if has_delta else None,
                "norm_weight": 1 + normal(generator, dtype, width, scale=0.2),
                **weight_arguments(
                    "gate_up", generator, dtype, *shape, scale=width**-0.5, quantized=quantized
                ),
                **weight_arguments(
                    "down", generator, dtype, width, num_hidden, scale=num_hidden**-0.5,
                    quantized=quantized,
                ),
                "eps": 1e-5,
                "partial": partial,
            }  # fmt: skip

        # bfloat16 rounds the norm, gates and ups, their product and the output.
        return Case(name, arguments, {torch.float32: 2e-6, torch.bfloat16: 9e-3})

    return [
        make("decode", 1, 33, 21),
        make("no update", 3, 40, 17, has_delta=False),
        make("prefill", 11, 24, 50),
        make("nvfp4", 5, 64, 48, quantized=True),
        make("nvfp4 prefill", 9, 32, 16, quantized=True),
        make("partial", 4, 33, 10, partial=True),
        make("nvfp4 partial", 10, 16, 32, partial=True, quantized=True),
    ]


@operator("dense_mlp", fake=fake, cases=cases)
def dense_mlp(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    eps: float,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream and apply the layer's MLP to its norm.

    Args:
        x: [T, D] float32 or bfloat16, the residual stream.
        delta: [T, D], the last sub-layer's output, or None for zero.
        norm_weight: [D].
        gate_up: x's dtype [2 * F, D], the gate's F rows first; or NVFP4.
        gate_up_scales: see `plugins.nvfp4`, as the following.
        gate_up_global_scale: float32 [1] or None; gate and up share one.
        down: x's dtype [D, F], or NVFP4.
        down_scales: see `plugins.nvfp4`.
        down_global_scale: float32 [1] or None.
        eps: of the norm.
        partial: whether gate_up and down are one rank's share and the output its unrounded part.

    Returns:
        The new residual, x's dtype [T, D], and the output [T, D], float32 if partial.
    """
    residual, z = add_rms_norm(x, delta, norm_weight, eps, x.dtype)
    activation = silu_mul(project(z, gate_up, gate_up_scales, gate_up_global_scale, False))
    return residual, project(activation, down, down_scales, down_global_scale, partial)
