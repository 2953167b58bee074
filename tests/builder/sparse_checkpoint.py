"""A checkpoint of a published size that takes no room: headers, and holes in place of data."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from inkrt.builder.encoding import DTYPES_OF
from inkrt.engines.inkling2.config import Inkling2Config, parse_config
from inkrt.engines.inkling2.weights import weight_sources
from inkrt.engines.interface import Sharding

CODE_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
SHARD_BYTES = 8 * 10**9


def write_inkling2_small(folder: Path, published: Path) -> tuple[Inkling2Config, int]:
    """Write Inkling-2-Small without its vision tower.

    Args:
        folder: to make.
        published: of its configuration.

    Returns:
        The configuration, and bytes of all tensors.
    """
    folder.mkdir()
    config = json.loads((published / "config.json").read_text())
    quantization = json.loads((published / "hf_quant_config.json").read_text())["quantization"]
    config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    (folder / "config.json").write_text(json.dumps(config))
    parsed = parse_config(config)
    amax = {
        f"model.llm.layers.{layer}.mlp.experts.{name}_weight_amax"
        for layer, form in enumerate(parsed.stored_experts)
        for name in ("w13", "w2")
        if form == "nvfp4"
    }
    names = frozenset({"model.llm.x"} | amax)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for source in weight_sources(parsed, names, 0, Sharding(1, "experts")).values():
        for part in source.parts:
            code = "BF16"
            if part.encoding is not None:
                code = DTYPES_OF[part.encoding][0]
            elif (
                part.name.endswith(("bias", "amax", "denominator", "query")) or "quer" in part.name
            ):
                code = "F32"
            tensors[part.name] = (code, part.shape)
    return parsed, _write(folder, tensors)


def _write(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    shards: list[dict[str, object]] = [{}]
    offset = total = 0
    for name, (code, shape) in tensors.items():
        size = prod(shape) * CODE_BYTES[code]
        if shards[-1] and offset + size > SHARD_BYTES:
            shards.append({})
            offset = 0
        entry = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
        shards[-1][name] = entry
        offset, total = offset + size, total + size
        last = len(shards)
        path = folder / f"model-{last:05}.safetensors"
        header = json.dumps(shards[-1]).encode()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + offset)
    return total
