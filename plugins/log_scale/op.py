"""log_scale: grows head vectors with the logarithm of the position, beyond a floor.

    tau(p) = 1 + alpha * ln(max((p + 1) / n_floor, 1))
    out[i] = x[i] * tau(position + i)

Float32 inside, one rounding to the dtype of x. Queries of full attention are rounded before it too
(see `l2_clip`); that double rounding is the model's.
Source: Inkling-2 full attention, `Inkling2LogScale` of transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.narrow import elementwise
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import step_positions


def fake(x: Tensor, position: Tensor, n_floor: int, alpha: float) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("log_scale")
    axes.fit("x", x, "T", "H", "d", dtype=MODEL_DTYPES)
    axes.fit("position", position, 1, dtype=torch.int32)
    axes.require(n_floor > 0, f"n_floor is {n_floor}, expected > 0")
    axes.require(alpha >= 0, f"alpha is {alpha}, expected >= 0")
    return x.new_empty(x.shape)


def _case(name: str, *shape: int, position: int, n_floor: int) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, *shape),
            "position": int32(position),
            "n_floor": n_floor,
            "alpha": 0.1,
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """First token, a step across the floor, far beyond it, and the model's last position."""
    return [
        _case("first token", 1, 6, 8, position=0, n_floor=5),
        _case("across the floor", 5, 3, 7, position=2, n_floor=5),
        _case("prefill", 11, 2, 9, position=0, n_floor=5),
        _case("last position", 3, 2, 5, position=1048573, n_floor=128000),
    ]


@operator("log_scale", fake=fake, cases=cases)
def log_scale(x: Tensor, position: Tensor, n_floor: int, alpha: float) -> Tensor:
    """Multiply row i by tau(position + i).

    Args:
        x: float32 or bfloat16 [T, H, d].
        position: int32 [1], of row 0.
        n_floor: number of tokens up to which tau is 1.
        alpha: growth of tau per e-fold.

    Returns:
        Shape and dtype of x.
    """
    positions = step_positions(position, len(x))
    tau = 1.0 + alpha * elementwise(torch.log, ((positions + 1).float() / n_floor).clamp(min=1.0))
    return (x.float() * tau[:, None, None]).to(x.dtype)
