"""Packs weights of 140 MB and measures what memory that takes; run as a script.

    python measure_packing.py FOLDER

FOLDER must be empty. Prints by how much the peak of resident memory has grown, mapped pages of the
checkpoint included, and what the plan foresaw, in bytes.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_model import write_weights

from inkrt.builder import pieces, weights
from inkrt.builder.checkpoint import Checkpoint
from inkrt.builder.pack import PackedTensor
from inkrt.engines.interface import Part, Sharding, WeightSource
from inkrt.engines.weight_map import RankMap
from inkrt.plugins.moe.packing import packing

CODES, SCALES = (32, 1024, 2048), (32, 1024, 256)
FLOATS, PLAIN = (4096, 2048), (8192, 2048)


def main() -> None:
    """Write the checkpoint, pack a little of it to have all code in memory, then all."""
    folder = Path(sys.argv[1])
    write_checkpoint(folder)
    pieces.PIECE_BYTES = 2**20
    weights.MEMORY_BYTES = 32 * 2**20
    checkpoint = Checkpoint(folder)
    tensors, sources = layout()
    some = [PackedTensor("few", (1, *CODES[1:]), torch.uint8)]
    codes = sources["codes"]
    few = {"few": replace(codes, parts=tuple(map(first_expert, codes.parts)))}
    pack(folder / "few", some, checkpoint, few)
    before = peak_bytes()
    pack(folder / "all", tensors, checkpoint, sources)
    planned = weights.plan_weights(checkpoint, tensors, [sources]).peak_bytes()
    print(peak_bytes() - before, planned)  # noqa: T201


def write_checkpoint(folder: Path) -> None:
    """A stack of quantized experts, a float32 matrix and one in bf16, 140 MB in all."""
    (folder / "config.json").write_text("{}")
    values = {
        "codes": torch.full(CODES, 0x53, dtype=torch.uint8),
        "scales": torch.full(SCALES, 0x31, dtype=torch.uint8),
        "floats": torch.ones(FLOATS),
        "plain": torch.ones(PLAIN, dtype=torch.bfloat16),
    }
    save_file(values, folder / "model.safetensors")


def layout() -> tuple[list[PackedTensor], dict[str, WeightSource]]:
    """The experts as references and as kernels read them, and the matrices in bf16."""
    rank = RankMap(0, Sharding(1, "experts"))
    sources = {
        name: rank.expert_gate_up(name, shape, is_interleaved=True)
        for name, shape in (("codes", CODES), ("scales", SCALES))
    }
    sources = {
        name: replace(source, parts=tuple(replace(part, encoding="e2m1") for part in source.parts))
        for name, source in sources.items()
    }
    codes = PackedTensor("codes", CODES, torch.uint8)
    scales = PackedTensor("scales", SCALES, torch.uint8)
    vectors = packing("nvfp4", "codes", "scales", "gated")
    packed = replace(PackedTensor.packed("codes", vectors, (codes, scales)), name="packed")
    plain = [PackedTensor(x, shape, torch.bfloat16) for x, shape in MATRICES]
    for name, shape in MATRICES:
        sources[name] = WeightSource((Part(name, shape, (slice(None),) * 2),))
    return [codes, packed, *plain], sources


MATRICES = (("floats", FLOATS), ("plain", PLAIN))


def first_expert(part: Part) -> Part:
    """The same of the first expert alone."""
    return replace(part, index=(slice(0, 1), *part.index[1:]))


def pack(
    folder: Path,
    tensors: list[PackedTensor],
    checkpoint: Checkpoint,
    sources: dict[str, WeightSource],
) -> None:
    """Write the weight files of one rank."""
    folder.mkdir()
    write_weights(folder, tensors, checkpoint, [sources])


def peak_bytes() -> int:
    """Most resident memory so far."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
