"""Writes a tiny checkpoint folder: tensors in shards, configuration, tokenizer.

The same arguments give the same bytes on every machine.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from inkrt.engines.tiny import inkling2, tokenizer
from inkrt.engines.tiny.inkling2 import RandomTensor
from inkrt.errors import ConfigError

Layout = Literal["publisher", "transformers"]
NUM_SHARDS = 3


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What differs between the tiny models: configuration, tensors and their other naming."""

    config: Callable[[str], dict[str, Any]]
    tensors: Callable[[], Iterator[RandomTensor]]
    to_transformers: Callable[[str, Tensor], tuple[str, Tensor]]


MODELS = {
    "inkling2": TinyModel(inkling2.config, inkling2.tensors, inkling2.to_transformers),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_checkpoint(
    out: Path,
    *,
    model: str = "inkling2",
    seed: int = 0,
    dtype: str = "bfloat16",
    layout: Layout = "publisher",
) -> None:
    """Write a random checkpoint.

    Args:
        out: folder to make; it may exist if it is empty.
        model: a key of MODELS.
        seed: other seeds give other weights and the same tokenizer.
        dtype: a key of DTYPES; dtype of the tensors that the publisher does not keep in float32.
        layout: names and arrangement of the tensors, the publisher's or those of a state dict of
            the model in transformers. The numbers are the same.

    Raises:
        ConfigError: an argument is not one of those, or `out` is not an empty folder.
    """
    for what, got, allowed in (
        ("model", model, tuple(MODELS)),
        ("dtype", dtype, tuple(DTYPES)),
        ("layout", layout, ("publisher", "transformers")),
    ):
        if got not in allowed:
            raise ConfigError(
                f"tiny checkpoint: {what} {got!r} is unknown; use one of {', '.join(allowed)}"
            )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"tiny checkpoint: {out} is not an empty folder; remove it or name another"
        )
    out.mkdir(parents=True, exist_ok=True)

    definition = MODELS[model]
    values: dict[str, Tensor] = {}
    for spec in definition.tensors():
        value = draw(spec, seed, DTYPES[dtype])
        name = spec.name
        if layout == "transformers":
            name, value = definition.to_transformers(name, value)
        assert name not in values, f"two tensors are named {name}"
        values[name] = value
    _write_shards(out, values)
    _write_json(out / "config.json", definition.config(dtype))
    for name, text in tokenizer.files().items():
        (out / name).write_text(text, encoding="utf-8")


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
