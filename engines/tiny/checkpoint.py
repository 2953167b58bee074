"""Writes a tiny checkpoint folder: tensors, configuration, tokenizer.

The same arguments give the same bytes on every machine.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from inkrt.engines.tiny import drafter as tiny_drafter
from inkrt.engines.tiny import (
    flint,
    flint_gguf,
    inkling,
    inkling2,
    inkling2_loop,
    inkling2_quantized,
    inkling_quantized,
    tokenizer,
)
from inkrt.engines.tiny.drafter import TinyDrafter
from inkrt.errors import ConfigError

Layout = Literal["publisher", "transformers", "dequantized"]
Format = Literal["safetensors", "gguf"]
LAYOUTS = get_args(Layout)
NUM_SHARDS = 3
DRAFTER_FOLDER = "drafter"


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What differs between the tiny models.

    Attributes:
        config: content of config.json for a main dtype.
        tensors: names and values as published, for a seed and a main dtype.
        to_transformers: the same as a state dict of the model in transformers.
        style: of the tokenizer and the chat template.
        write_gguf: writes a GGUF file into a folder, for a seed and a main dtype; None if its
            publisher has none.
        dequantize: of the tensors as published, the values that they stand for; None if its
            safetensors are plain.
        quantization: content of hf_quant_config.json; None for none.
    """

    config: Callable[[str], dict[str, Any]]
    tensors: Callable[[int, torch.dtype], Iterator[tuple[str, Tensor]]]
    to_transformers: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    style: tokenizer.Style
    write_gguf: Callable[[Path, int, torch.dtype], None] | None = None
    dequantize: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    quantization: Callable[[], dict[str, Any]] | None = None


def flint_model(sizes: flint.Sizes) -> TinyModel:
    """A Flint of given sizes."""
    return TinyModel(
        partial(flint.config, sizes=sizes),
        partial(flint.tensors, sizes=sizes),
        flint.to_transformers,
        tokenizer.GLM,
        partial(flint_gguf.write, sizes=sizes),
    )


def inkling2_model(sizes: inkling2.Sizes) -> TinyModel:
    """An Inkling-2 of given sizes."""
    return TinyModel(
        partial(inkling2.config, sizes=sizes),
        partial(inkling2.tensors, sizes=sizes),
        inkling2.to_transformers,
        tokenizer.INKLING,
    )


def quantized_model(
    plain: inkling2_quantized.Plain, sizes: inkling2.Sizes, *, has_projections: bool = False,
    is_mixed: bool = True,
) -> TinyModel:  # fmt: skip
    """An Inkling-2, looped or not, with quantized experts; see `inkling2_quantized.config`."""
    config = partial(inkling2_quantized.config, plain=plain, sizes=sizes)
    tensors = partial(inkling2_quantized.tensors, plain=plain, sizes=sizes)
    return TinyModel(
        partial(config, has_projections=has_projections, is_mixed=is_mixed),
        partial(tensors, has_projections=has_projections, is_mixed=is_mixed),
        partial(inkling2_quantized.to_transformers, plain=plain),
        tokenizer.INKLING,
        dequantize=inkling2_quantized.dequantize,
    )


MODELS = {
    "inkling2": inkling2_model(inkling2.TINY),
    "inkling": TinyModel(
        inkling.config, inkling.tensors, inkling.to_transformers, tokenizer.INKLING_AUDIO
    ),
    "inkling-nvfp4": TinyModel(
        inkling_quantized.config,
        inkling_quantized.tensors,
        inkling_quantized.to_transformers,
        tokenizer.INKLING_AUDIO,
        dequantize=inkling_quantized.dequantize,
        quantization=inkling_quantized.quantization,
    ),
    "inkling2-quantized": quantized_model(inkling2, inkling2_quantized.SIZES),
    "inkling2-quantized-attention": quantized_model(
        inkling2, inkling2_quantized.SIZES, has_projections=True
    ),
    "inkling2-mxfp8": quantized_model(inkling2, inkling2_quantized.SIZES, is_mixed=False),
    "inkling2-loop": TinyModel(
        inkling2_loop.config,
        inkling2_loop.tensors,
        inkling2_loop.to_transformers,
        tokenizer.INKLING,
    ),
    "inkling2-loop-quantized": quantized_model(inkling2_loop, inkling2_quantized.LOOP_SIZES),
    "flint": flint_model(flint.TINY),
    "flint-wide": flint_model(flint.WIDE),
}  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_checkpoint(
    out: Path,
    *,
    model: str = "inkling2",
    seed: int = 0,
    dtype: str = "bfloat16",
    layout: Layout = "publisher",
    format: Format = "safetensors",  # noqa: A002 (the option's name)
    drafter: TinyDrafter | None = None,
) -> None:
    """Write a random checkpoint.

    Args:
        out: folder to make; it may exist if it is empty.
        model: a key of MODELS.
        seed: other seeds give other weights and the same tokenizer.
        dtype: a key of DTYPES; dtype of the tensors that the publisher does not keep in float32.
        layout: names and arrangement of the tensors, the publisher's or those of a state dict of
            the model in transformers. The numbers are the same. "dequantized" is the twin of a
            quantized model: the publisher's names, and the values that quantized weights stand for,
            as they are for transformers too.
        format: of the tensors' files. A GGUF file has names of its own, so a layout means nothing;
            its matrices are quantized without a change of their values.
        drafter: a random one to go with it: in the checkpoint if it is embedded, else in the
            folder `DRAFTER_FOLDER` inside of it.

    Raises:
        ConfigError: an argument is not one of those, two do not go together, or `out` is not an
            empty folder.
    """
    definition = _check(out, model, dtype, layout, format, has_drafter=drafter is not None)
    out.mkdir(parents=True, exist_ok=True)
    config = definition.config(dtype)
    if format == "gguf":
        assert definition.write_gguf is not None
        definition.write_gguf(out, seed, DTYPES[dtype])
    else:
        values = dict(definition.tensors(seed, DTYPES[dtype]))
        if layout == "transformers":
            values = definition.to_transformers(values)
        elif layout == "dequantized":
            assert definition.dequantize is not None
            values = definition.dequantize(values)
        if layout != "publisher":
            config.pop("quantization_config", None)  # there are values only
        elif definition.quantization is not None:
            _write_json(out / "hf_quant_config.json", definition.quantization())
        if drafter is not None:
            own_config, own = tiny_drafter.build(drafter, config, values, seed)
            if drafter.layout == "embedded":
                config |= own_config
                values |= own
            else:
                tiny_drafter.write_folder(out / DRAFTER_FOLDER, own_config, own)
        _write_shards(out, values)
    _write_json(out / "config.json", config)
    for name, text in tokenizer.files(definition.style).items():
        (out / name).write_text(text, encoding="utf-8")


def _check(
    out: Path,
    model: str,
    dtype: str,
    layout: str,
    format: str,  # noqa: A002 (as of `write_checkpoint`)
    *,
    has_drafter: bool,
) -> TinyModel:
    """The model, if the arguments of `write_checkpoint` go together."""
    for what, got, allowed in (
        ("model", model, tuple(MODELS)),
        ("dtype", dtype, tuple(DTYPES)),
        ("layout", layout, LAYOUTS),
        ("format", format, ("safetensors", "gguf")),
    ):
        if got not in allowed:
            raise ConfigError(
                f"tiny checkpoint: {what} {got!r} is unknown; use one of {', '.join(allowed)}"
            )
    definition = MODELS[model]
    if format == "gguf" and (definition.write_gguf is None or layout != "publisher"):
        raise ConfigError(
            f"tiny checkpoint: {model} in the layout of the {layout} has no GGUF file; leave out "
            f"--format or take the model flint as published"
        )
    if layout == "dequantized" and definition.dequantize is None:
        raise ConfigError(
            f"tiny checkpoint: safetensors of {model} have nothing to dequantize; leave out "
            f"--layout"
        )
    if format == "gguf" and has_drafter:
        raise ConfigError(
            "tiny checkpoint: a GGUF file has no drafter; leave out --format or --drafter"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"tiny checkpoint: {out} is not an empty folder; remove it or name another"
        )
    return definition


def _write_shards(out: Path, values: dict[str, Tensor]) -> None:
    """Cut the tensors, in order, into NUM_SHARDS files of about the same size, and index them."""
    total_bytes = sum(value.nbytes for value in values.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    done_bytes = 0
    for name, value in values.items():
        shards[done_bytes * NUM_SHARDS // total_bytes][name] = value
        done_bytes += value.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(out / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
