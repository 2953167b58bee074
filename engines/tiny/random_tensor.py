"""Random tensors of the tiny checkpoints: what is wanted, and drawing it."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor to be drawn.

    Attributes:
        name: as the publisher spells it.
        shape: in elements.
        std: standard deviation of its values.
        mean: their mean.
        float32: stored in float32 whatever the checkpoint's main dtype is.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    float32: bool = False


def draw(spec: RandomTensor, seed: int, dtype: torch.dtype) -> Tensor:
    """The random tensor of `spec`: bell-shaped, with its mean and standard deviation.

    The generator is seeded by seed and name, so a tensor does not depend on the others. Sums of
    uniform integers stand in for normal numbers: they have the same bits on every machine.

    Returns:
        Contiguous tensor of `spec.shape`, in float32 if `spec.float32`, else in `dtype`.
    """
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    num_terms, limit = 4, 1 << 16
    total = torch.randint(limit, (num_terms, *spec.shape), generator=generator).sum(0)
    center = num_terms * (limit - 1) / 2
    spread = math.sqrt(num_terms * (limit**2 - 1) / 12)
    value = (total.double() - center) * (spec.std / spread) + spec.mean
    return value.to(torch.float32 if spec.float32 else dtype)
