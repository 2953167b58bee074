"""The tiny Inkling with NVFP4 experts, as ModelOpt writes the real one.

As there, the first layer with experts keeps plain ones, all else is excluded by name, and amax of
activations and original shapes stand beside the weights. Sizes are multiples of what shares a scale
on two ranks. Global scales are powers of two, so that the dequantized twin is the same model bit
for bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inkrt.engines.tiny import inkling
from inkrt.engines.tiny.nvfp4 import exact, packed, quantize_stack
from inkrt.plugins import nvfp4

SIZES = inkling.Sizes(hidden=64, expert_width=32)
_EXPERTS = ("experts.w13_weight", "experts.w2_weight")
_PLAIN_LAYER = inkling.NUM_DENSE
_SUFFIXES = (".scale", ".scale2", ".input_amax", ".original_shape")


def config(dtype: str) -> dict[str, Any]:
    """The content of `config.json`; see `inkling.config`."""
    return inkling.config(dtype, SIZES)


def quantization() -> dict[str, Any]:
    """The content of `hf_quant_config.json`."""
    excluded = ["model.llm.embed", "model.llm.unembed", "model.visual*", "model.audio*"]
    for layer in range(inkling.NUM_LAYERS):
        root = f"model.llm.layers.{layer}"
        excluded += [f"{root}.attn*", f"{root}.mlp.gate", f"{root}.mlp.shared_experts"]
        if layer <= _PLAIN_LAYER:
            excluded.append(f"{root}.mlp")
    return {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": nvfp4.BLOCK,
            "exclude_modules": excluded,
        },
    }


def tensors(seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its publisher's name; see `inkling.tensors`."""
    for name, value in inkling.tensors(seed, dtype, SIZES):
        is_routed = name.endswith(tuple(f".mlp.{end}" for end in _EXPERTS))
        if not is_routed or int(name.split(".layers.")[1].split(".")[0]) <= _PLAIN_LAYER:
            yield name, value
            continue
        stack = quantize_stack(value.double())
        yield name, packed(stack.codes)
        yield f"{name}.scale", stack.scales.view(torch.float8_e4m3fn)
        yield f"{name}.scale2", stack.global_scale
        yield f"{name}.input_amax", torch.tensor([6.0], dtype=torch.bfloat16)
        yield f"{name}.original_shape", torch.tensor(value.shape)


def dequantize(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """The twin: the same names with the values that quantized weights stand for.

    They have the dtype of the other weights, which holds them exactly.
    """
    dtype = published["model.llm.embed.weight"].dtype
    plain: dict[str, Tensor] = {}
    for name, value in published.items():
        if name.endswith(_SUFFIXES):
            continue
        values = value
        if (scales := published.get(f"{name}.scale")) is not None:
            factors = published[f"{name}.scale2"].view(-1, 1, 1)
            decoded = nvfp4.dequantize(value, scales.view(torch.uint8), torch.float32)
            values = exact(decoded * factors, dtype, name)
        plain[name] = values
    return plain


def to_transformers(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """The twin under the names of transformers."""
    return inkling.to_transformers(dequantize(published))
