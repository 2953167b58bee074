"""How `residual_mix` runs on a GPU where it stands alone: the mix of `allreduce_conv_mix`."""

from pathlib import Path

import torch

from inkrt.plugins.allreduce_conv_mix.tactics import (
    exchange_params,
    listed,
    mix_bytes,
    num_slices,
    variants,
)
from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    Float32,
    Int32,
    Output,
    Param,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
    tensor_list_arg,
)
from inkrt.plugins.vector import bytes_of, is_dense, launch

_MOST_SOURCES, _MOST_QUERIES = 10, 3


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Up to ten sources, bf16 or float32, and three queries."""
    sources, queries = tensor_list_arg(args, "sources"), tensor_arg(args, "queries")
    (num_rows, width), num_queries = sources[0].shape, queries.shape[0]
    fits = len(sources) <= _MOST_SOURCES and num_queries <= _MOST_QUERIES and width % 4 == 0
    if target not in GPU_TARGETS or not fits or not all(map(is_dense, sources)):
        return []
    wide = sum((s.dtype == torch.float32) << index for index, s in enumerate(sources))
    tactics = []
    for name, split in variants(num_rows):
        words: tuple[Param, ...] = ()
        if split:
            words = exchange_params(num_rows, width, len(sources), num_queries)
        kernel = launch(
            Path(__file__).parent / "residual_mix.cu",
            "residual_mix",
            (
                ("WIDTH", width),
                ("SOURCES", len(sources)),
                ("QUERIES", num_queries),
                ("FLOAT32_SOURCES", wide),
                ("SPLIT", split),
            ),
            (
                *listed("sources", len(sources), _MOST_SOURCES, Pointer("sources")),
                Pointer("queries"),
                Output(),
                Int32(num_rows),
                Float32(number_arg(args, "eps")),
                *words,
            ),
            blocks=num_rows * (num_slices(width) if split else 1),
            smem_bytes=mix_bytes(len(sources), num_queries),
        )
        size = bytes_of(args, "sources", "queries") + 4 * num_queries * num_rows * width
        tactics.append(Tactic(name, (kernel,), size, 0))
    return tactics
