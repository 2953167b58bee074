"""The tiny Flint as one GGUF file, as its publisher quantizes the real one."""

import re
from pathlib import Path

import torch
from torch import Tensor

from inkrt.engines.tiny import flint
from inkrt.engines.tiny.nvfp4 import QuantizedMatrix, stack
from inkrt.errors import ConfigError

FILE_NAME = "model-nvfp4.gguf"

# Publisher's name to GGUF name, without ".weight"; applied in this order to the whole name.
_RENAMES = (
    (r"^model\.embed_tokens$", "token_embd"),
    (r"^model\.norm$", "output_norm"),
    (r"^lm_head$", "output"),
    (r"^model\.layers\.(\d+)\.", r"blk.\1."),
    (r"\.input_layernorm$", ".attn_norm"),
    (r"\.post_attention_layernorm$", ".ffn_norm"),
    (r"\.self_attn\.softmax_offset$", ".attn_sinks"),
    (r"\.self_attn\.([qk])_norm$", r".attn_\1_norm"),
    (r"\.self_attn\.([qkv])_proj$", r".attn_\1"),
    (r"\.self_attn\.o_proj$", ".attn_output"),
    (r"\.mlp\.gate$", ".ffn_gate_inp"),
    (r"\.mlp\.experts\.(gate|up|down)_proj$", r".ffn_\1_exps"),
    (r"\.mlp\.shared_expert\.(gate|up|down)_proj$", r".ffn_\1_shexp"),
    (r"\.mlp\.(gate|up|down)_proj$", r".ffn_\1"),
)


def write(folder: Path, seed: int, dtype: torch.dtype, sizes: flint.Sizes = flint.TINY) -> None:
    """Write the file into a folder.

    Args:
        folder: to write into.
        seed: as for `flint.contents`.
        dtype: of the tensors that are neither quantized nor kept in float32.
        sizes: of the model.

    Raises:
        ConfigError: the package `gguf` is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise ConfigError(
            "writing a GGUF file needs the package gguf; install it with: "
            "pip install 'inkrt[build]'"
        ) from None
    tensors = _stacked(dict(flint.contents(seed, dtype, sizes)))
    writer = gguf.GGUFWriter(folder / FILE_NAME, "flint")
    writer.add_name("tiny Flint")
    writer.add_array("general.tensor_extra.prec_a4", [False] * len(tensors))
    for name, value in tensors.items():
        gguf_name = _rename(name)
        if isinstance(value, QuantizedMatrix):
            data = value.super_blocks().numpy()
            kind = gguf.GGMLQuantizationType.NVFP4
            writer.add_tensor(f"{gguf_name}.weight", data, raw_dtype=kind)
            writer.add_tensor(f"{gguf_name}.scale", value.global_scale.numpy())
        elif value.dtype == torch.bfloat16:
            data = value.view(torch.uint8).numpy()
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(f"{gguf_name}.weight", data, raw_dtype=kind)
        else:
            writer.add_tensor(f"{gguf_name}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stacked(
    tensors: dict[str, Tensor | QuantizedMatrix],
) -> dict[str, Tensor | QuantizedMatrix]:
    """The tensors with all experts of a layer in one; names end without ".weight"."""
    out: dict[str, Tensor | QuantizedMatrix] = {}
    stacks: dict[str, list[QuantizedMatrix]] = {}
    for full_name, value in tensors.items():
        name = full_name.removesuffix(".weight")
        of_stack = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if of_stack == name:
            out[name] = value
        else:
            assert isinstance(value, QuantizedMatrix), name
            stacks.setdefault(of_stack, []).append(value)
    return out | {name: stack(matrices) for name, matrices in stacks.items()}


def _rename(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name
