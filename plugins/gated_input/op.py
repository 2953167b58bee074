"""gated_input: inputs of a sub-layer that messages enter, in the later passes of a looped model.

    m_i  = residual_mix(former, message_query_(first + i))        the message
    r_i  = dtype(down_i [RMS(u_i), RMS(m_i)])                     its input rounded to dtype, too
    o_i  = (1 - tanh(forget_i r_i)) u_i + tanh(gain_i r_i) m_i
    x_i  = dtype(norm_weight_i RMS(o_i))

u_i is row i of `mixed`, or its only row. RMS(x) = x / sqrt(mean(x^2) + eps). What is not said to be
rounded is float32; products and sums of o_i are rounded one by one. Nothing mixes tokens.
Source: `Inkling2LoopMessageGate`, `Inkling2LoopMessageAttentionResidual` of transformers. Letters:
T tokens, D hidden size, m mixed inputs, n sources of messages, g results, r rank of the gates, M
messages of a layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import elementwise, linear_rows
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.residual_mix.op import residual_mix
from inkrt.plugins.rms_norm.op import rms_norm
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    mixed: Tensor,
    former: Sequence[Tensor],
    message_queries: Tensor,
    down: Tensor,
    forget: Tensor,
    gain: Tensor,
    norm_weights: Sequence[Tensor],
    first: int,
    mix_eps: float,
    gate_eps: float,
    norm_eps: float,
) -> Tensor:
    """Shape [g, T, D], of the gates' dtype."""
    axes = Axes("gated_input")
    dtype = down.dtype
    axes.fit("down", down, "g", "r", "2D", dtype=MODEL_DTYPES)
    axes.fit("mixed", mixed, "m", "T", "D", dtype=torch.float32)
    axes.require(
        axes["2D"] == 2 * axes["D"],
        f"down has {axes['2D']} columns, expected 2D={2 * axes['D']}",
    )
    axes.require(len(former) > 0, "former is empty, expected at least one tensor")
    for index, source in enumerate(former):
        axes.fit(f"former[{index}]", source, "T", "D", dtype=dtype)
    axes.fit("message_queries", message_queries, "M", "D", dtype=torch.float32)
    axes.require(
        0 <= first <= axes["M"] - axes["g"],
        f"first is {first}, expected 0 to M-g={axes['M'] - axes['g']}",
    )
    for name, weight in (("forget", forget), ("gain", gain)):
        axes.fit(name, weight, "g", "D", "r", dtype=dtype)
    for index, weight in enumerate(norm_weights):
        axes.fit(f"norm_weights[{index}]", weight, "D", dtype=dtype)
    for name, count in (("mixed", axes["m"]), ("norm_weights", len(norm_weights))):
        axes.require(
            count in (1, axes["g"]), f"{name} has {count} entries, expected 1 or g={axes['g']}"
        )
    for name, eps in (("mix_eps", mix_eps), ("gate_eps", gate_eps), ("norm_eps", norm_eps)):
        axes.require(eps > 0, f"{name} is {eps}, expected > 0")
    return mixed.new_empty(axes["g"], axes["T"], axes["D"], dtype=dtype)


def _case(
    name: str, *, tokens: int, width: int, rank: int, mixed: int, results: int, sources: int,
    norms: int, first: int = 0,
) -> Case:  # fmt: skip
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        def gate() -> torch.Tensor:
            return normal(generator, dtype, results, width, rank, scale=rank**-0.5)

        return {
            "mixed": normal(generator, torch.float32, mixed, tokens, width),
            # Growing scales: norms must take them out.
            "former": [
                normal(generator, dtype, tokens, width, scale=3.0**j) for j in range(sources)
            ],
            "message_queries": normal(generator, torch.float32, 4, width),
            "down": normal(generator, dtype, results, rank, 2 * width, scale=(2 * width) ** -0.5),
            "forget": gate(),
            "gain": gate(),
            "norm_weights": [1 + normal(generator, dtype, width, scale=0.1) for _ in range(norms)],
            "first": first,
            "mix_eps": 1e-6,
            "gate_eps": 1e-2,
            "norm_eps": 1e-3,
        }

    # In bfloat16 a rounding of the gates' input or of r moves the gates.
    return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 6e-3})


def cases() -> list[Case]:
    """Inputs of sliding, full and expert sub-layers; one and three sources; sizes of kernels."""
    return [
        _case("sliding", tokens=3, width=33, rank=5, mixed=1, results=3, sources=2, norms=1),
        _case("full", tokens=1, width=20, rank=3, mixed=3, results=3, sources=2, norms=3),
        _case(
            "experts", tokens=11, width=17, rank=1, mixed=1, results=1, sources=1, norms=1, first=3
        ),
        _case("kernel", tokens=3, width=256, rank=16, mixed=1, results=3, sources=2, norms=1),
        _case("kernel_full", tokens=2, width=512, rank=64, mixed=3, results=3, sources=3, norms=3),
        _case(
            "kernel_one",
            tokens=9,
            width=768,
            rank=8,
            mixed=1,
            results=1,
            sources=1,
            norms=1,
            first=3,
        ),
        _case("kernel_wide", tokens=2, width=2304, rank=64, mixed=1, results=3, sources=2, norms=1),
        _case("kernel_rank", tokens=1, width=384, rank=256, mixed=1, results=1, sources=2, norms=1),
    ]


@operator("gated_input", fake=fake, cases=cases)
def gated_input(
    mixed: Tensor,
    former: Sequence[Tensor],
    message_queries: Tensor,
    down: Tensor,
    forget: Tensor,
    gain: Tensor,
    norm_weights: Sequence[Tensor],
    first: int,
    mix_eps: float,
    gate_eps: float,
    norm_eps: float,
) -> Tensor:
    """Let messages of the pass before into the inputs of a sub-layer, and norm these.

    Args:
        mixed: float32 [m, T, D], m is 1 or g.
        former: n tensors [T, D] of the gates' dtype: the block sums of the pass before.
        message_queries: float32 [M, D], of all messages of the layer, as a product's bits depend on
            its shape.
        down: float32 or bfloat16 [g, r, 2D], the columns of u first.
        forget: [g, D, r], dtype of `down`.
        gain: [g, D, r], dtype of `down`.
        norm_weights: 1 or g of [D].
        first: message of the first result.
        mix_eps: of the norms of `former`.
        gate_eps: of the norms of the gates' inputs.
        norm_eps: of the weighted norms.

    Returns:
        [g, T, D] of the gates' dtype.
    """
    dtype, num_results = down.dtype, len(down)
    messages = residual_mix(former, message_queries, mix_eps)[first : first + num_results]
    out = []
    for i, m_TD in enumerate(messages):
        u_TD = mixed[i if len(mixed) == num_results else 0]
        halves = [rms_norm(x, None, gate_eps, torch.float32) for x in (u_TD, m_TD)]
        r_Tr = linear_rows(torch.cat(halves, dim=-1).to(dtype), down[i]).float()
        phi_TD = elementwise(torch.tanh, linear_rows(r_Tr, forget[i].float()))
        gamma_TD = elementwise(torch.tanh, linear_rows(r_Tr, gain[i].float()))
        gated_TD = (1 - phi_TD) * u_TD + gamma_TD * m_TD
        weight = norm_weights[i if len(norm_weights) == num_results else 0]
        out.append(rms_norm(gated_TD, weight, norm_eps, dtype))
    return torch.stack(out)
