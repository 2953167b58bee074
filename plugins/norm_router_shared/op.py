"""norm_router_shared: what every token of an expert layer computes before its experts are known.

    residual, z = add_rms_norm(x, delta, norm_weight)
    logits      = linear(z, router)                             rounded to the model dtype
    shared      = silu_mul(linear(z, shared_gate_up))           [T, Fs], input of the shared down

It has the bits of those operators one after the other. The choice of experts is left to the
operator that applies them (`flint_moe`): choosing needs all logits, so inside a kernel it would be
a point where all blocks wait. The shared expert's gate and up read the same z and fill the machine
while the small router runs. The router is never NVFP4; the shared expert may be (`plugins.nvfp4`).
Source: flint.md sections 4, 5 and 11.
"""

import torch
from torch import Tensor

from inkrt.plugins.add_rms_norm.op import add_rms_norm, fit_add_norm
from inkrt.plugins.caseutil import normal, weight_arguments
from inkrt.plugins.linear.op import linear
from inkrt.plugins.linear_nvfp4.op import project
from inkrt.plugins.nvfp4 import fit_weight
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import Axes
from inkrt.plugins.silu_mul.op import silu_mul


def fake(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    router: Tensor,
    shared_gate_up: Tensor,
    shared_gate_up_scales: Tensor | None,
    shared_gate_up_global_scale: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Residual and z [T, D], logits [T, E], shared [T, Fs]; all in x's dtype."""
    axes = Axes("norm_router_shared")
    fit_add_norm(axes, x, delta, norm_weight, eps, "norm_weight")
    axes.fit("router", router, "E", "D", dtype=x.dtype)
    fit_weight(
        axes, "shared_gate_up", shared_gate_up, shared_gate_up_scales, shared_gate_up_global_scale,
        "2Fs", "D", dtype=x.dtype,
    )  # fmt: skip
    axes.require(
        axes["2Fs"] % 2 == 0,
        f"shared_gate_up has {axes['2Fs']} rows, expected as many gates as ups",
    )
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        x.new_empty(axes["T"], axes["E"]),
        x.new_empty(axes["T"], axes["2Fs"] // 2),
    )


def cases() -> list[Case]:
    """Both forms of the shared weight, with and without an update, decode to prefill."""

    def make(
        name: str, num_rows: int, width: int, num_experts: int, num_hidden: int,
        *, has_delta: bool = True, quantized: bool = False,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {
                "x": normal(generator, dtype, num_rows, width),
                "delta": normal(generator, dtype, num_rows, width) if has_delta else None,
                "norm_weight": 1 + normal(generator, dtype, width, scale=0.2),
                "router": normal(generator, dtype, num_experts, width, scale=width**-0.5),
                **weight_arguments(
                    "shared_gate_up", generator, dtype, 2 * num_hidden, width, scale=width**-0.5,
                    quantized=quantized,
                ),
                "eps": 1e-6,
            }  # fmt: skip

        # bfloat16 rounds the norm, then logits, gates and ups, and the product of the latter two.
        return Case(name, arguments, {torch.float32: 2e-6, torch.bfloat16: 7e-3})

    return [
        make("decode", 1, 33, 9, 21),
        make("no update", 3, 40, 256, 5, has_delta=False),
        make("prefill", 11, 24, 16, 50),
        make("nvfp4", 5, 64, 19, 48, quantized=True),
        make("nvfp4 prefill", 13, 48, 16, 17, quantized=True),
    ]


@operator("norm_router_shared", fake=fake, cases=cases)
def norm_router_shared(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    router: Tensor,
    shared_gate_up: Tensor,
    shared_gate_up_scales: Tensor | None,
    shared_gate_up_global_scale: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add an update to the residual stream, and start the expert layer on its norm.

    Args:
        x: [T, D] float32 or bfloat16, the residual stream.
        delta: [T, D], the last sub-layer's output, or None for zero.
        norm_weight: [D].
        router: x's dtype [E, D].
        shared_gate_up: x's dtype [2 * Fs, D], the gate's rows first; or NVFP4.
        shared_gate_up_scales: see `plugins.nvfp4`.
        shared_gate_up_global_scale: float32 [1] or None; gate and up share one.
        eps: of the norm.

    Returns:
        The new residual [T, D], its norm [T, D], router logits [T, E], and the shared expert's
        activation [T, Fs]; all in x's dtype.
    """
    residual, z = add_rms_norm(x, delta, norm_weight, eps, x.dtype)
    gate_up = project(z, shared_gate_up, shared_gate_up_scales, shared_gate_up_global_scale, False)
    return residual, z, linear(z, router, False), silu_mul(gate_up)
