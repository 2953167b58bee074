"""last_row: the last valid row of a step, for steps that want one token's logits.

    out[0] = x[num_tokens - 1]

Source: prefill of any model; only its last row reaches the language-model head.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, num_tokens: Tensor) -> Tensor:
    """Shape [1, D] in x's dtype."""
    axes = Axes("last_row")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("num_tokens", num_tokens, 1, dtype=torch.int32)
    return x.new_empty(1, x.shape[1])


def _case(name: str, num_rows: int, num_tokens: int) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {"x": normal(generator, dtype, num_rows, 7), "num_tokens": int32(num_tokens)}

    return Case(name, arguments)


def cases() -> list[Case]:
    """A full step, a padded one, and steps whose first row is the last."""
    return [
        _case("full", 11, 11),
        _case("padded", 11, 6),
        _case("one valid row", 5, 1),
        _case("one row", 1, 1),
    ]


@operator("last_row", fake=fake, cases=cases)
def last_row(x: Tensor, num_tokens: Tensor) -> Tensor:
    """Copy row num_tokens - 1.

    Args:
        x: float32 or bfloat16 [T, D].
        num_tokens: int32 [1], in 1..T.

    Returns:
        [1, D] in x's dtype; a copy.
    """
    count = int(num_tokens)
    return x[count - 1 : count].clone()
