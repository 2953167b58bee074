"""What all definitions are made of: parameters, and the namespace of our operators."""

import torch
from torch import nn

from inkrt.plugins.registry import plugins

plugins()  # registers the operators that torch.ops.ink resolves
ink = torch.ops.ink


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter on the meta device: the builder binds it to packed weights by its name."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)
