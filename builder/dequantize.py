"""Decoding at build: the values of quantized experts, exactly.

A value of NVFP4 without its global scale has at most 6 significant bits and lies in 2^-10..2688, so
bfloat16 always holds it. One of MXFP8 has 4, and bfloat16 holds it but for the far ends of the
exponent's range, where a build is refused. The global scale of NVFP4 stays what it is, a float32
factor of the sums: together with it hardly any value would fit into bfloat16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.options import BuildOptions
from inkrt.builder.quantize import choose_projections
from inkrt.engines.interface import Definition, ModelConfig, WeightSource
from inkrt.errors import CheckpointError, ConfigError
from inkrt.plugins import mxfp8, nvfp4


def choose_forms(
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    progress: Callable[[str], None],
) -> ModelConfig:
    """The model with projections and experts in the forms that a build asks for.

    Raises:
        ConfigError: the family's, or the target's, cannot be in them.
    """
    model = choose_projections(definition, model, options, progress)
    return choose_experts(definition, model, options)


def choose_experts(
    definition: Definition, model: ModelConfig, options: BuildOptions
) -> ModelConfig:
    """The model with routed experts in the form that a build asks for.

    Raises:
        ConfigError: the family's cannot be decoded, or not for this target.
    """
    if options.experts == "checkpoint":
        return model
    if definition.dequantize_experts is None:
        raise ConfigError(
            "experts bf16: this version has no decoded form of this family's; leave the option out"
        )
    decoded: ModelConfig
    decoded, has_global_scales = definition.dequantize_experts(model)
    if has_global_scales and options.target != "cpu":
        raise ConfigError(
            f"experts bf16: kernels of target {options.target} take no global scale beside BF16 "
            f"experts, which those of an NVFP4 release have; build for cpu or leave the option out"
        )
    return decoded


def dequantized(checkpoint: CheckpointSource, source: WeightSource, dtype: torch.dtype) -> Tensor:
    """The values of a source with `dequantize`; host memory holds one stack of `dtype` and codes.

    Args:
        checkpoint: where codes and scales stand.
        source: of them, stacks of matrices [L, N, ...].
        dtype: of the values.

    Raises:
        CheckpointError: the checkpoint is unfit, or `dtype` cannot hold a value exactly.
    """
    assert source.dequantize is not None
    form, scales = source.dequantize.form, source.dequantize.scales
    decode = nvfp4.dequantize if form == "nvfp4" else mxfp8.dequantize
    pieces = [
        (part, checkpoint.read(part), checkpoint.read(scale))
        for part, scale in zip(source.parts, scales, strict=True)
    ]
    stacks = []
    for part, codes, factors in pieces:
        width = codes.shape[-1] * (2 if form == "nvfp4" else 1)
        stack = torch.empty(*codes.shape[:-1], width, dtype=dtype)
        for place in range(len(codes)):
            values = decode(codes[place].contiguous(), factors[place].contiguous(), torch.float32)
            stack[place] = values
            if not torch.equal(stack[place].float(), values) or not values.isfinite().all():
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor {part.name} has values that "
                    f"{str(dtype).removeprefix('torch.')} cannot hold exactly, with block scales "
                    f"at an end of their range; leave --experts out"
                )
        stacks.append(stack)
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks, dim=source.dim)
