"""Quantizing at build: plain matrices of a checkpoint as NVFP4 or MXFP8, and how well it went.

The rules are those of the operators that quantize activations:

* MXFP8 (`quantize_mxfp8`): for 32 columns the least power of two that leaves no value above 448,
  codes rounded to nearest, ties to even. Blocks with no value of at least 2^-100 become zeros, as
  kernels take no smaller exponents.
* NVFP4 (`quantize_nvfp4`): one float32 scale per matrix, which is that of all ranks: its largest
  size over 448 * 6; an E4M3 scale per 16 columns that puts the largest value at 6 or at 4,
  whichever errs less.

A rank's slice is quantized by itself, which gives the codes of the whole, as ranks cut between
blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.options import BuildOptions
from inkrt.engines.interface import Definition, ModelConfig, WeightSource
from inkrt.errors import CheckpointError, ConfigError
from inkrt.plugins import mxfp8, nvfp4
from inkrt.plugins.quantize_mxfp8.op import quantize_mxfp8
from inkrt.plugins.quantize_nvfp4.op import quantize_rows

# Bounds the memory of intermediate values.
_VALUES_AT_ONCE = 2**22
_LEAST = 2.0**-100
_E4M3_MAX = 448


@dataclass(slots=True)
class Quantized:
    """A matrix in another form.

    Attributes:
        codes: uint8 [N, K / 2] or [N, K].
        scales: uint8 [N, K / 16] or exponents [N, K / 32].
        global_scale: float32 [1], of NVFP4.
        squared_error: sum over all values.
        squares: likewise, of what the values were.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    squared_error: float
    squares: float


@dataclass(slots=True)
class Quantizer:
    """Makes the pieces of quantized matrices, one matrix at a time, and keeps account of errors.

    Attributes:
        sums: squared errors and squares of all matrices of a kind and a form.
    """

    sums: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _last: tuple[object, Quantized] | None = None

    def piece(self, name: str, checkpoint: CheckpointSource, source: WeightSource) -> Tensor:
        """The piece of a parameter `<kind>.<piece>` that a source with `quantize` describes.

        Raises:
            CheckpointError: the matrix has values that are no finite numbers.
        """
        (part,) = source.parts
        assert source.quantize is not None
        form = source.quantize.form
        key = (id(checkpoint), part, form)
        if self._last is None or self._last[0] != key:
            everything = replace(part, index=(slice(None),) * len(part.shape))
            amax = largest(checkpoint.read(everything)) if form == "nvfp4" else None
            made = quantize(checkpoint.read(part), form, amax)
            if not math.isfinite(made.squares):
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor {part.name} has values that are no finite "
                    f"numbers, which {form} has no codes for; repair it or leave --projections out"
                )
            self._last = (key, made)
            sums = self.sums.setdefault((name.split(".")[-2], form), [0.0, 0.0])
            sums[0] += made.squared_error
            sums[1] += made.squares
        piece: Tensor = getattr(self._last[1], source.quantize.piece)
        return piece

    def add(self, other: "Quantizer") -> None:
        """Take over the account of another one."""
        for key, sums in other.sums.items():
            own = self.sums.setdefault(key, [0.0, 0.0])
            own[:] = [mine + theirs for mine, theirs in zip(own, sums, strict=True)]

    def report(self) -> list[str]:
        """A line for every form: the relative error of each kind of matrices."""
        lines = []
        for form in dict.fromkeys(form for _, form in self.sums):
            errors = [
                f"{kind} {(error / squares if squares else 0.0) ** 0.5:.2e}"
                for (kind, other), (error, squares) in self.sums.items()
                if other == form
            ]
            lines.append(
                f"quantized attention projections to {form}, relative errors: {', '.join(errors)}"
            )
        return lines


def choose_projections(
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    progress: Callable[[str], None],
) -> ModelConfig:
    """The model with attention projections in the form that a build asks for.

    Raises:
        ConfigError: the family's cannot be quantized.
    """
    form = options.projections
    if form == "checkpoint":
        return model
    if definition.quantize_projections is None:
        raise ConfigError(
            f"projections {form}: this version quantizes those of Inkling-2 only; leave the "
            f"option out"
        )
    suffix = "; weights are dummies, nothing is rounded" if options.weights == "dummy" else ""
    progress(f"attention projections in {form} where the checkpoint has plain ones{suffix}")
    quantized: ModelConfig = definition.quantize_projections(model, form)
    return quantized


def largest(matrix: Tensor) -> Tensor:
    """The largest size of a value, float32 [1]."""
    low, high = torch.aminmax(matrix)
    return torch.maximum(-low.float(), high.float()).reshape(1)


def quantize(matrix: Tensor, form: str, amax: Tensor | None = None) -> Quantized:
    """Quantize a matrix.

    Args:
        matrix: finite, [N, K], K a multiple of the columns that share a scale.
        form: "nvfp4" or "mxfp8".
        amax: of NVFP4, float32 [1]: the largest size of a value of the matrix that this is part of;
            None for its own.
    """
    rows, width = matrix.shape
    amax = largest(matrix) if amax is None else amax
    step = max(1, _VALUES_AT_ONCE // width)
    codes, scales, error, squares = [], [], 0.0, 0.0
    global_scale = torch.ones(1)
    for first in range(0, rows, step):
        values = matrix[first : first + step].float()
        if form == "nvfp4":
            flat = quantize_rows(values.reshape(1, -1), amax, _E4M3_MAX)
            code, scale, global_scale = flat[0].view(len(values), -1), flat[1], flat[2]
            scale = scale.view(len(values), -1)
            back = nvfp4.dequantize(code, scale, torch.float32) * global_scale
        else:
            blocks = values.view(len(values), -1, mxfp8.BLOCK)
            is_small = blocks.abs().amax(dim=-1, keepdim=True) < _LEAST
            code, scale = quantize_mxfp8(blocks.masked_fill(is_small, 0).flatten(1))
            back = mxfp8.dequantize(code, scale, torch.float32)
        codes.append(code)
        scales.append(scale)
        error += float((back - values).double().square().sum())
        squares += float(values.double().square().sum())
    return Quantized(torch.cat(codes), torch.cat(scales), global_scale, error, squares)
