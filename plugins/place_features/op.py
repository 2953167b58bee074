"""place_features: rows of images and recordings in place of the rows of their tokens.

    out[t] = features[t] if is_feature[t] else x[t]

The rows' bits, no arithmetic. It stands behind the embedding and its norm, which features do not
pass.
Source: `get_placeholder_mask` and the scatter behind it in `InklingModel` of transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, features: Tensor, is_feature: Tensor) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("place_features")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("features", features, "T", "D", dtype=x.dtype)
    axes.fit("is_feature", is_feature, "T", dtype=torch.int32)
    return x.new_empty(x.shape)


def _case(name: str, width: int, *is_feature: int) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, len(is_feature), width),
            "features": normal(generator, dtype, len(is_feature), width),
            "is_feature": int32(*is_feature),
        }

    return Case(name, arguments, {torch.float32: 0.0, torch.bfloat16: 0.0})


def cases() -> list[Case]:
    """None, all and some of the rows."""
    return [
        _case("none", 7, 0, 0, 0),
        _case("all", 33, 1, 1),
        _case("some", 60, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1),
    ]


@operator("place_features", fake=fake, cases=cases)
def place_features(x: Tensor, features: Tensor, is_feature: Tensor) -> Tensor:
    """Choose between two rows for every token.

    Args:
        x: float32 or bfloat16 [T, D].
        features: [T, D] in x's dtype; rows that are not chosen may hold anything.
        is_feature: int32 [T], 0 or 1.

    Returns:
        [T, D] in x's dtype.
    """
    return torch.where(is_feature[:, None] != 0, features, x)
