"""short_conv: short causal depthwise convolution with a residual, over a step and its past.

    out[t,c] = (sum_j weight[c,j] * x[t-(W-1)+j, c] + x[t,c]) / sqrt(W+1)

Without `is_scaled` nothing is divided. Weight index W-1 is the current token. Float32 inside with
fused multiply-adds in the order of j, one rounding to the dtype of x. Inputs at negative positions
are zero. The state ring keeps past inputs.

Values are bit-equal to transformers', their layout is not: a prefill there leaves the token the
fastest dimension, which makes the norm per head of K and V that follows add in another order. So
those norms differ in their last float32 bit (relative error of the attention 1e-7; in bfloat16 it
rarely crosses a rounding boundary). One-row steps have no such difference.
Source: Inkling-2 K and V of sliding layers, attention and MLP outputs, `Inkling2ShortConvolution`
of transformers; all four of Inkling, unscaled, `InklingShortConvolution`.
"""

import math

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, step_arguments
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import with_older_rows, write_step


def fake(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor | None,
    slot: Tensor,
    is_scaled: bool = True,  # noqa: ARG001
) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("short_conv")
    axes.fit("x", x, "T", "C", dtype=MODEL_DTYPES)
    axes.fit("weight", weight, "C", "W", dtype=torch.float32)
    axes.fit("state", state, "slots", "R", "C", dtype=x.dtype)
    axes.step(position, num_tokens, slot)
    axes.require(
        axes["R"] >= axes["W"] - 1,
        f"state keeps {axes['R']} positions, expected at least W-1={axes['W'] - 1}",
    )
    return x.new_empty(x.shape)


def _case(
    name: str,
    num_rows: int,
    position: int,
    *,
    num_tokens: int | None = None,
    channels: int = 7,
    taps: int = 4,
    ring: int = 5,
    slot: int = 0,
    is_scaled: bool = True,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, num_rows, channels),
            "weight": normal(generator, torch.float32, channels, taps),
            "state": normal(generator, dtype, 3, ring, channels),
            **step_arguments(position, num_tokens or num_rows, slot),
            "is_scaled": is_scaled,
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """First token with a used ring, ring wrap, padding, a step wider than the ring, tap counts."""
    return [
        _case("first token", 1, 0, slot=1),
        _case("third token", 1, 2, channels=55),
        _case("verify across the ring's end", 5, 8, slot=2),
        _case("padded verify", 8, 4, num_tokens=3, ring=16),
        _case("prefill wider than the ring", 11, 0, channels=33),
        _case("padded chunk", 13, 6, num_tokens=9, ring=16, slot=1),
        _case("two taps, smallest ring", 3, 3, taps=2, ring=1),
        _case("unscaled", 5, 8, slot=2, is_scaled=False),
        _case("unscaled padded chunk", 13, 6, num_tokens=9, ring=16, is_scaled=False),
        _case("of fours across the ring's end", 8, 28, channels=132, ring=16, slot=2),
        _case("chunk of fours", 30, 2, num_tokens=27, channels=64, ring=16),
        _case("short chunk of fours", 30, 14, num_tokens=2, channels=64, ring=16, is_scaled=False),
    ]


@operator("short_conv", fake=fake, cases=cases, mutates=("state",))
def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor | None,
    slot: Tensor,
    is_scaled: bool = True,
) -> Tensor:
    """Convolve the rows of a step and remember its last inputs.

    Args:
        x: float32 or bfloat16 [T, C].
        weight: float32 [C, W].
        state: [slots, R, C], dtype of x, R >= W-1; a ring of inputs by position. Written.
        position: int32 [1], of row 0.
        num_tokens: int32 [1], valid rows; the others are computed but not remembered. None for a
            step that remembers nothing.
        slot: int32 [1].
        is_scaled: whether the sum is divided by sqrt(W+1).

    Returns:
        [T, C] in x's dtype.
    """
    taps = weight.shape[1]
    inputs = with_older_rows(state, x, taps - 1, position, slot).double()
    # A product of two float32 is exact in float64, so each step rounds like a fused multiply-add.
    products = (inputs.unfold(0, taps, 1) * weight.double()).unbind(-1)  # W of [T, C]
    mixed = products[0].float()
    for product in products[1:]:
        mixed += product
    out = mixed + x.float()
    if is_scaled:
        out = out / math.sqrt(taps + 1)
    if num_tokens is not None:
        write_step(state, x, position, num_tokens, slot)
    return out.to(x.dtype)
