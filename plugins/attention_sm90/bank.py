"""What `relative_attention` has beside `sink_attention`, and how its kernels read the bank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkrt.plugins.tactic import Packing, TensorArg

# States of a head and values of a row of the bank in the kernels with tensor cores.
RELATIVE_STATES = 16


def _by_distance(bank: Tensor) -> Tensor:
    return bank.T.contiguous().view(torch.uint8).flatten()


def _bank_bytes(shapes: Sequence[TensorArg]) -> int:
    (bank,) = shapes
    return 2 * math.prod(bank.shape)


# The bank [r, extent] in bf16 as every kernel reads it: [extent, r].
BANK_BY_DISTANCE = Packing(("bank",), "bank_by_distance", _by_distance, _bank_bytes)


@dataclass(frozen=True, slots=True)
class Relative:
    """What `relative_attention` has beside `sink_attention`; sinks are of tokens and heads.

    Attributes:
        states: r, relative states of a head.
        extent: distances with a bias.
        has_sinks: whether heads have sinks.
        is_gated: whether there is a gate.
        first_key: position of the first key that there is.
    """

    states: int
    extent: int
    has_sinks: bool = True
    is_gated: bool = True
    first_key: int = 0
