"""What the definition of a tower gives to the builder.

A tower turns pieces of an image or of a recording into feature rows, each in place of the embedding
of a placeholder token. It runs in steps of its own, before the prompt is read; the model itself
sees rows only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from inkrt.engines.interface import WeightSource


@dataclass(frozen=True, slots=True)
class TowerInput:
    """An input of a tower's module: so many values for each feature row.

    Attributes:
        name: of the parameter of the module's `forward`.
        shape: of the values of one feature row.
        dtype: of the values; None for the model's compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Tower:
    """One tower of a model.

    Attributes:
        kind: what it reads; the name of its steps, and the root of its parameters.
        token_id: of the placeholder that each feature row replaces.
        marker_id: of the token that opens a run of placeholders; None if there is none.
        inputs: besides the number of real rows.
        sizes: feature rows of its steps, ascending.
        is_rowwise: whether feature rows do not depend on each other, so that what one image or
            recording has may be spread over several steps; otherwise it must fit into one.
        processor: how files become inputs: "type" and settings of one of
            `runtime.tower_spec.Processor`.
        build_module: makes the module of a step from (compute dtype, rows N). Its `forward` takes
            the number of real rows, int32 [1], and the inputs [N, ...]; it gives features [N, D] in
            the compute dtype. All ranks have the same.
        weight_sources: maps every parameter of the module to its place in a checkpoint with these
            tensor names.
        is_weight: whether a checkpoint tensor is one of the tower's.
    """

    kind: Literal["vision", "audio"]
    token_id: int
    marker_id: int | None
    inputs: tuple[TowerInput, ...]
    sizes: tuple[int, ...]
    is_rowwise: bool
    processor: Mapping[str, Any]
    build_module: Callable[[torch.dtype, int], nn.Module]
    weight_sources: Callable[[frozenset[str]], dict[str, WeightSource]]
    is_weight: Callable[[str], bool]
