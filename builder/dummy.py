"""Dummy weights: what an engine without weight files fills its memory with.

A few kinds of tensors recur in every layer. Of each kind the engine file holds one template, small
and random, which the runtime repeats over the tensor's bytes. Activations stay finite and routing
near uniform, so a full-size engine can be timed without a checkpoint.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inkrt.builder.pack import PackedTensor
from inkrt.errors import ConfigError
from inkrt.plugins import mxfp8

# A small tensor (a router, norms) is its own template; of a large one this much is made.
_WHOLE_BYTES = 8 * 2**20
_TEMPLATE_BYTES = 2**20
# Far above what rows of any model take.
_MOST_TEMPLATE_BYTES = 256 * 2**20
# Root mean square of uniform e2m1 codes.
_CODE_RMS = 2.9


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """Templates of an engine.

    Attributes:
        kind_of: weight name to template name.
        templates: template name to its bytes.
    """

    kind_of: dict[str, str]
    templates: dict[str, bytes]


def dummy_weights(tensors: list[PackedTensor]) -> DummyWeights:
    """Make a template for every kind of tensor; the same tensors give the same bytes.

    Raises:
        ConfigError: rows are too long for any model.
    """
    kind_of: dict[str, str] = {}
    templates: dict[str, bytes] = {}
    for tensor in tensors:
        kind = _kind(tensor)
        kind_of[tensor.name] = kind
        if kind not in templates:
            templates[kind] = _template(tensor)
    return DummyWeights(kind_of, templates)


def _kind(tensor: PackedTensor) -> str:
    packing = f"{tensor.packing.name}/" if tensor.packing else ""
    return _hash(packing + "/".join(_description(part) for part in tensor.sources or (tensor,)))


def _description(tensor: PackedTensor) -> str:
    return f"{tensor.name.rpartition('.')[2]}{list(tensor.shape)}{tensor.dtype}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _template(tensor: PackedTensor) -> bytes:
    """Bytes of a template. What is small has the same values on every target, however packed."""
    parts = tensor.sources or (tensor,)
    num_rows = _num_rows(parts[0])
    values = []
    for part in parts:
        num_bytes = math.prod(_cut(part, num_rows)) * part.dtype.itemsize
        if num_bytes > _MOST_TEMPLATE_BYTES:
            raise ConfigError(
                f"weight {part.name} is {list(part.shape)} by config.json, of which a few rows "
                f"alone are {num_bytes:,} bytes; no model has such rows, so a size there is wrong"
            )
        generator = torch.Generator().manual_seed(int(_hash(_description(part))[:12], 16))
        values.append(_values(part, _cut(part, num_rows), generator))
    data = values[0] if tensor.packing is None else tensor.packing.pack(*values)
    return data.flatten().view(torch.uint8).numpy().tobytes()


def _num_rows(tensor: PackedTensor) -> int | None:
    """Rows of the first matrix that a template has; None for all of the tensor."""
    if len(tensor.shape) == 1 or tensor.num_bytes <= _WHOLE_BYTES:
        return None
    row_bytes = tensor.shape[-1] * tensor.dtype.itemsize
    # Row tiles of packed layouts have 16 rows.
    return min(max(_TEMPLATE_BYTES // row_bytes // 16 * 16, 16), tensor.shape[-2])


def _cut(tensor: PackedTensor, num_rows: int | None) -> tuple[int, ...]:
    if num_rows is None or len(tensor.shape) == 1:
        return tensor.shape
    return (*[1] * (len(tensor.shape) - 2), num_rows, tensor.shape[-1])


def _values(tensor: PackedTensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows of about unit norm. The parts of a quantized matrix are known by dtype and name."""
    if tensor.name.endswith((".e4m3", ".exponents")):
        return _mxfp8_values(tensor.name, shape, generator)
    if tensor.dtype == torch.uint8 and tensor.name.endswith(".scales"):
        # One e4m3 scale for 16 columns, and its neighbors up and down.
        value = torch.tensor((16 * shape[-1]) ** -0.5 / _CODE_RMS).to(torch.float8_e4m3fn)
        jitter = torch.randint(-1, 2, shape, generator=generator)
        scales: Tensor = (value.view(torch.uint8).int() + jitter).clamp(min=1).to(torch.uint8)
        return scales
    if tensor.dtype == torch.int32:  # offsets of token ids
        return torch.zeros(shape, dtype=torch.int32)
    if tensor.dtype == torch.uint8:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    # A router's bias balances the experts, which random rows of one norm are already: noise would
    # favor a few of them, and tokens of a step would share more than they do in a model.
    if tensor.name.endswith((".global_scale", ".router_bias")):
        return torch.ones(shape, dtype=tensor.dtype)
    noise = torch.randn(shape, generator=generator)
    # Norms and biases are near one.
    values = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return values.to(tensor.dtype)


def _mxfp8_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Codes, all but those of no number, or exponents, one and its neighbors up and down."""
    if name.endswith(".e4m3"):
        codes = torch.randint(mxfp8.NO_NUMBER, shape, generator=generator)
        return (codes + 0x80 * torch.randint(2, shape, generator=generator)).to(torch.uint8)
    width = mxfp8.BLOCK * shape[-1]
    exponent = mxfp8.BIAS + round(math.log2(width**-0.5 / mxfp8.CODE_RMS))
    return (exponent + torch.randint(-1, 2, shape, generator=generator)).to(torch.uint8)
