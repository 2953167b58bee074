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
from inkrt.engines.reader import ConfigReader
from inkrt.errors import ConfigError

InputShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Tokens of a prompt where a tower's rows go.

    Attributes:
        token_id: of the token that each feature row replaces.
        marker_id: of the token that opens a run of these; None if there is none.
    """

    token_id: int
    marker_id: int | None


@dataclass(frozen=True, slots=True)
class Tower:
    """One tower of a model.

    Attributes:
        kind: what it reads; the name of its steps, and the root of its parameters.
        placeholder: where its rows go.
        sizes: feature rows N of its steps, ascending.
        inputs: shape and dtype of every input by name, from (N, compute dtype). An image or a
            recording may fill less; what it leaves is zero.
        is_rowwise: whether feature rows do not depend on each other, and the first dimension of
            every input is N: then what one image or recording has may be spread over several steps.
            Otherwise it must fit into one.
        processor: how files become inputs: "type" and settings of one of
            `runtime.tower_spec.Processor`.
        build_module: makes the module of a step of any size from the compute dtype. Its `forward`
            takes the inputs in order and gives features [N, D] in the compute dtype, alone or as a
            tuple of one. All ranks have the same.
        weight_sources: maps every parameter of the module to its place in a checkpoint with these
            tensor names.
        is_weight: whether a checkpoint tensor is one of the tower's.
    """

    kind: Literal["vision", "audio"]
    placeholder: Placeholder
    sizes: tuple[int, ...]
    inputs: Callable[[int, torch.dtype], InputShapes]
    is_rowwise: bool
    processor: Mapping[str, Any]
    build_module: Callable[[torch.dtype], nn.Module]
    weight_sources: Callable[[frozenset[str]], dict[str, WeightSource]]
    is_weight: Callable[[str], bool]


def read_placeholder(
    values: Mapping[str, Any], kind: str, default: Placeholder, vocab_size: int
) -> Placeholder:
    """The tokens that a config.json names for "image" or "audio".

    Args:
        values: of the file.
        kind: see above.
        default: where it names none.
        vocab_size: a marker beyond is none; a placeholder must be below.

    Raises:
        ConfigError: a value is none.
    """
    read = ConfigReader(values, "this model")
    token_id = read.integer(f"{kind}_token_id", default.token_id, minimum=0)
    if token_id >= vocab_size:
        raise ConfigError(
            f"config.json: {kind}_token_id {token_id} is none of {vocab_size} tokens; give the id "
            f"of the placeholder"
        )
    marker_id: int | None = default.marker_id
    if values.get(f"{kind}_bos_token_id") is not None:
        marker_id = read.integer(f"{kind}_bos_token_id", 0, minimum=0)
    is_token = marker_id is not None and marker_id < vocab_size
    return Placeholder(token_id, marker_id if is_token else None)
