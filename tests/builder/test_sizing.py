"""Sizes of the published models per rank, against sums over the shapes that their makers name.

Nothing of the builder is in the expected numbers: they are products of the sizes in model cards and
configurations, in bytes, as are those of the rings and pages of `docs/architecture.md`.
"""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.memory import GPUS, positions_left
from inkrt.builder.options import BuildOptions
from inkrt.builder.sizing import RankSize, rank_sizes
from inkrt.commands.build import make_app
from inkrt.commands.sizing_text import fits
from inkrt.engines.catalog import find_definition

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
BF16, F32 = 2, 4
# Rows of a rank's part of the head: a whole number of fours where there are several ranks.
INKLING_HEAD = {1: 200_058, 2: 100_032, 4: 50_016, 8: 25_008}
FLINT_HEAD = {1: 150_144, 2: 75_072, 4: 37_536}
MIB = 2**20


def inkling2_small(tp: int) -> tuple[int, int, int]:
    """Weights, bytes of a position, rings."""
    hidden, layers, full = 4608, 48, 8
    sliding = layers - full
    split = 3 * 6144 * hidden + 2 * 1024 * hidden + 768 * hidden + 48 * hidden
    split += 48 * 128 + 48 * 16
    common = split // tp * BF16
    common += 16 * 1024 * BF16 + hidden * BF16  # bank of biases, norm before experts
    common += 384 * hidden * F32 + 384 * F32  # router
    common += hidden * F32 + 2 * 4 * hidden * F32  # query of the mix, convolutions
    of_sliding = hidden * BF16 + 2 * 1024 * 4 // tp * F32
    of_full = 3 * hidden * BF16 + 3 * hidden * F32
    of_full += (2 * 4 * 1024 + 2 * 32 * hidden) // tp * BF16
    queries = (sliding - 1) * hidden * F32  # the first layer has none
    # Codes, scales, and two global scales.
    nvfp4 = 384 // tp * (3 * hidden * 2304 // 2 + 3 * hidden * 2304 // 16 + 2 * F32)
    mxfp8 = 384 // tp * (3 * hidden * 2304 + 3 * hidden * 2304 // 32)
    weights = 201_024 * hidden * BF16 + INKLING_HEAD[tp] * hidden * BF16
    weights += 2 * hidden * BF16 + hidden * F32
    weights += layers * common + sliding * of_sliding + full * of_full + queries
    weights += 40 * nvfp4 + 8 * mxfp8
    # A window of 1024 sees 1023 others; with 13 to go back, in whole sixteens: 1040.
    heads = 8 // tp
    rings = sliding * 1040 * 2 * heads * 128 * BF16
    rings += layers * 16 * (2 * heads * 128 + 2 * hidden) * BF16
    return weights, full * 2 * heads * 128 * BF16, rings


def inkling(
    tp: int, hidden: int, layers: int, heads: int, dense: int, width: int
) -> tuple[int, int, int]:
    full = layers // 6
    sliding = layers - full
    common = 2 * hidden * BF16 + 2 * 128 * BF16 + 2 * 4 * hidden * F32
    common += (2 * heads * 128 * hidden + heads * 16 * hidden) // tp * BF16
    kinds = 0
    for count, kv, extent in ((sliding, 2048, 512), (full, 1024, 1024)):
        one = 2 * kv * hidden // tp * BF16 + 16 * extent * BF16 + 2 * kv * 4 // tp * F32
        kinds += count * one
    moe = 258 * hidden * F32 + 256 * F32 + F32
    moe += 256 // tp * 3 * hidden * width * BF16 + 2 * 3 * hidden * width // tp * BF16
    weights = 201_024 * hidden * BF16 + INKLING_HEAD[tp] * hidden * BF16 + 2 * hidden * BF16
    weights += layers * common + kinds + (layers - 2) * moe
    weights += 2 * (3 * dense * hidden // tp * BF16 + BF16)
    rings = sliding * 528 * 2 * 2048 // tp * BF16
    rings += 16 * BF16 * (sliding * 2 * 2048 // tp + full * 2 * 1024 // tp + layers * 2 * hidden)
    return weights, full * 2 * 1024 // tp * BF16, rings


def flint(tp: int) -> tuple[int, int, int]:
    hidden = 2048
    common = 2 * hidden * BF16 + 2 * 128 * BF16 + 32 // tp * F32
    common += (4096 + 2 * 512 + 4096) * hidden // tp * BF16
    moe = 256 * hidden * BF16 + 256 // tp * 3 * hidden * 512 * BF16
    moe += 3 * 1024 * hidden // tp * BF16
    weights = (150_144 + FLINT_HEAD[tp]) * hidden * BF16 + hidden * BF16
    weights += 49 * common + 2 * 3 * 6144 * hidden // tp * BF16 + 47 * moe
    heads = 4 // tp
    return weights, 14 * 2 * heads * 128 * BF16, 35 * 528 * 2 * heads * 128 * BF16


EXPECTED = {
    "inkling2-small": inkling2_small,
    "inkling": lambda tp: inkling(tp, 6144, 66, 64, 24576, 3072),
    "inkling-small": lambda tp: inkling(tp, 4096, 42, 32, 16384, 2048),
    "flint": flint,
}


def sizes_of(name: str) -> list[RankSize]:
    checkpoint = open_checkpoint(CONFIGS / name)
    assert not checkpoint.names
    definition = find_definition(checkpoint.config)
    model = definition.parse_config(checkpoint.config)
    limit = model.max_position_embeddings
    options = BuildOptions(max_seq_len=limit, prefill_chunk=64)
    return rank_sizes(definition, model, options, torch.bfloat16)


@pytest.mark.parametrize("name", EXPECTED)
def test_sizes_are_sums_over_published_shapes(name: str) -> None:
    sizes = sizes_of(name)
    assert [size.tp_size for size in sizes] == [1, 2, 4, 8]
    for size in sizes:
        if name == "flint" and size.tp_size == 8:
            assert "num_key_value_heads = 4" in size.refusal
            assert size.held == 0
        else:
            assert (size.weights, size.position, size.rings) == EXPECTED[name](size.tp_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_dry_runs_of_published_configs(name: str) -> None:
    options = ["--dry-run", "--spec", "none", "--towers", "none", "--max-verify-tokens", "1"]
    result = CliRunner().invoke(make_app(), [str(CONFIGS / name), *options, "--tp-size", "4"])
    assert result.exit_code == 0, result.output
    weights, position, rings = EXPECTED[name](4)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith(f"weights {weights:,} ") for line in lines)
    assert any(line.startswith(f"ring state {rings:,} ") for line in lines)
    assert any(line.endswith(f" {position:,} bytes per position") for line in lines)
    assert sum(line.startswith("NVIDIA ") for line in lines) == len(GPUS)


def test_totals_are_those_of_model_cards() -> None:
    """Files of 390.0 GB have a vision tower of 0.66 GB, and 966 rows of padding in the head."""
    assert inkling2_small(1)[0] / 1e9 == pytest.approx(390.0 - 0.66, rel=1e-3)
    assert inkling(1, 6144, 66, 64, 24576, 3072)[0] / 1e9 == pytest.approx(1894, rel=1e-3)
    assert flint(1)[0] / 2e9 == pytest.approx(39.785, rel=1e-4)


def test_what_fits_which_gpu() -> None:
    weights, position, rings = inkling2_small(4)
    held = weights + rings
    assert positions_left("NVIDIA H100", held, position) == 0
    for gpu, mib in (("NVIDIA RTX PRO 6000", 97_887), ("NVIDIA H200", 143_771)):
        left = (mib * MIB - 1024 * MIB - held) // position
        assert left > 0
        assert positions_left(gpu, held, position) == left
    assert positions_left("NVIDIA H200", inkling2_small(2)[0], 1) == 0
    assert positions_left("NVIDIA H100", 81_559 * MIB - 1024 * MIB - 10, 5) == 2
    assert positions_left("NVIDIA H100", 81_559 * MIB - 1024 * MIB + 1, 5) == 0
    # All layers have a window: a position takes nothing.
    assert positions_left("NVIDIA H100", 10, 0) is None
    assert positions_left("NVIDIA H100", 81_559 * MIB, 0) == 0


def test_table() -> None:
    sizes = [RankSize(1, 3 * 2**30, 2048, MIB), RankSize(2, refusal="tp size 2 does not divide x")]
    left = {"NVIDIA H100": [1234567, 0], "NVIDIA H200": [0, 0]}
    assert fits(sizes, 2**21, left) == [
        "memory of a rank, by ranks          tp 1  tp 2",
        "weights                         3.00 GiB     -",
        "rings and the like              1.00 MiB     -",
        "scratch, as above               2.00 MiB     -",
        "a position of context            2,048 B     -",
        "positions of context left",
        "  NVIDIA H100                  1,234,567     -",
        "  NVIDIA H200               does not fit     -",
        "tp 2: tp size 2 does not divide x",
    ]


def test_gpus_have_what_their_names_promise() -> None:
    sizes = {"H100": 80, "RTX PRO 6000": 96, "H200": 141, "B200": 180, "GB200": 186}
    for name, gigabytes in sizes.items():
        # Makers count neither in GB nor in GiB.
        assert 0.95 < GPUS[f"NVIDIA {name}"] / (gigabytes * 2**30) < 1.03
