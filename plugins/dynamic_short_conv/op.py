"""dynamic_short_conv: short causal convolution whose taps depend on the current token.

    w[t,c,lag] = static_weight[lag,c] + dynamic_weight[t, head(c), lag]
    out[t,c]   = (sum_lag w[t,c,lag] * x[t-lag,c] + x[t,c]) / sqrt(2W+1)

Lag 0 is the current token (`short_conv` counts the other way). Dynamic taps are shared by the
channels of a head. Float32 inside, one rounding to the dtype of x; inputs at negative positions are
zero. The state ring keeps past inputs.
Source: Inkling-2 K and V of full-attention layers; `Inkling2DynamicShortConvolution` of
transformers, whose projection of the dynamic taps is a `linear` here.
"""

import math

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, step_arguments
from inkrt.plugins.registry import MAX_VERIFY_TOKENS, Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import with_older_rows, write_step


def fake(
    x: Tensor,
    static_weight: Tensor,
    dynamic_weight: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("dynamic_short_conv")
    axes.fit("x", x, "T", "C", dtype=MODEL_DTYPES)
    axes.fit("static_weight", static_weight, "W", "C", dtype=MODEL_DTYPES)
    axes.fit("dynamic_weight", dynamic_weight, "T", "heads*W", dtype=MODEL_DTYPES)
    axes.fit("state", state, "slots", "R", "C", dtype=x.dtype)
    axes.step(position, num_tokens, slot)
    taps, columns = axes["W"], axes["heads*W"]
    axes.require(
        columns > 0 and columns % taps == 0 and axes["C"] % (columns // taps) == 0,
        f"dynamic_weight has {columns} columns, expected W={taps} for each of a number of heads "
        f"that divides C={axes['C']}",
    )
    axes.require(
        axes["R"] >= taps - 1,
        f"state keeps {axes['R']} positions, expected at least W-1={taps - 1}",
    )
    return x.new_empty(x.shape)


def _case(
    name: str,
    num_rows: int,
    position: int,
    *,
    num_tokens: int | None = None,
    heads: int = 3,
    head_dim: int = 5,
    taps: int = 4,
    ring: int = 5,
    slot: int = 0,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, num_rows, heads * head_dim),
            "static_weight": normal(generator, dtype, taps, heads * head_dim),
            "dynamic_weight": normal(generator, dtype, num_rows, heads * taps),
            "state": normal(generator, dtype, 3, ring, heads * head_dim),
            **step_arguments(position, num_tokens or num_rows, slot),
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """First token with a used ring, ring wrap, padding, a step wider than the ring, tap counts."""
    return [
        _case("first token", 1, 0, slot=1),
        _case("second token", 1, 1, heads=2, head_dim=9),
        _case("verify across the ring's end", 5, 8, slot=2),
        _case("padded verify", 8, 4, num_tokens=3, ring=16),
        _case("prefill wider than the ring", 11, 0, heads=1, head_dim=13),
        _case("padded chunk", 13, 6, num_tokens=9, ring=16, slot=1),
        _case("two taps, smallest ring", 3, 3, taps=2, ring=1),
    ]


@operator("dynamic_short_conv", fake=fake, cases=cases, mutates=("state",))
def dynamic_short_conv(
    x: Tensor,
    static_weight: Tensor,
    dynamic_weight: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
) -> Tensor:
    """Convolve the rows of a step, each with its own taps, and remember its last inputs.

    Args:
        x: float32 or bfloat16 [T, C]; C is heads * channels of a head.
        static_weight: float32 or bfloat16 [W, C].
        dynamic_weight: float32 or bfloat16 [T, heads*W], tap fastest.
        state: [slots, R, C], dtype of x, R >= W-1; a ring of inputs by position. Written.
        position: int32 [1], of row 0.
        num_tokens: int32 [1], valid rows; the others are computed but not remembered.
        slot: int32 [1].

    Returns:
        [T, C] in x's dtype.
    """
    num_rows, num_older = len(x), static_weight.shape[0] - 1
    inputs = with_older_rows(state, x, num_older, position, slot).float()
    static, dynamic = static_weight.float(), dynamic_weight.float()
    if num_rows <= MAX_VERIFY_TOKENS:
        windows = [inputs[i : i + num_older + 1].clone() for i in range(num_rows)]
        out = torch.cat(
            [_convolve(w, static, dynamic[i : i + 1].clone()) for i, w in enumerate(windows)]
        )
    else:
        out = _convolve(inputs, static, dynamic)
    write_step(state, x, position, num_tokens, slot)
    return out.to(x.dtype)


def _convolve(inputs: Tensor, static: Tensor, dynamic: Tensor) -> Tensor:
    """Outputs [n, C] of inputs [W-1 + n, C] with taps [W, C] and [n, heads*W], float32."""
    num_rows = len(dynamic)
    taps, channels = static.shape
    heads = dynamic.shape[1] // taps
    # The last dimension is the lag, from the current token back.
    weight = static.T.reshape(heads, -1, taps) + dynamic.reshape(num_rows, heads, 1, taps)
    lagged = inputs.unfold(0, taps, 1).flip(-1).reshape(num_rows, heads, -1, taps)
    mixed = (lagged * weight).sum(-1).view(num_rows, channels)
    return (mixed + inputs[taps - 1 :]) / math.sqrt(2 * taps + 1)
