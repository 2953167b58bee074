"""Full-size Inkling-2 with 262,144 positions: a rank's memory table, and what is refused.

By hand: 48 layers, every sixth of which sees all keys; 8 kv heads of 128; a window of 1,024.
"""

import sys
from pathlib import Path

import pytest
from gpu_build import fake_compiler
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "perf"))

from inkling2 import write_config

from inkrt.builder.build import Prepared, prepare
from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.memory import DEVICES, require_fits
from inkrt.builder.options import BuildOptions
from inkrt.commands import build as build_command
from inkrt.errors import ConfigError

POSITIONS, HIDDEN, EXPERTS, WIDTH, VOCABULARY = 262_144, 4608, 384, 2304, 201_024


def plan_of(folder: Path, num_layers: int, tp_size: int) -> Prepared:
    """A decode and a prefill step, of which nothing is compiled."""
    write_config(folder, num_layers, has_drafter=False)
    options = BuildOptions(
        target="sm_90a", weights="dummy", tp_size=tp_size, moe_split="width", spec="none",
        max_seq_len=POSITIONS, max_verify_tokens=1, prefill_chunk=64,
    )  # fmt: skip
    return prepare(open_checkpoint(folder), options)


def check(prepared: Prepared, num_layers: int, tp_size: int) -> None:
    table, layout = prepared.memory, prepared.state
    num_full = num_layers // 6
    row = 2 * (8 // tp_size) * 128 * 2  # key and value of a position in a layer, in bf16
    assert table.paged_bytes_per_token == num_full * row
    assert (layout.num_pages, layout.page_tokens) == (POSITIONS // 64, 64)
    assert table.paged_state == POSITIONS * num_full * row
    # Rings of whole pages, with room for a window and a chunk of the prompt; sixteen rows of the
    # inputs of four convolutions.
    ring_rows = 1024 + 64
    of_convolutions = num_layers * 16 * (2 * 8 // tp_size * 128 + 2 * HIDDEN) * 2
    assert table.ring_state == (num_layers - num_full) * ring_rows * row + of_convolutions
    # Experts are most of the weights: three matrices, in NVFP4 with a scale for every 16 values, in
    # MXFP8 for every 32.
    values = EXPERTS * 3 * HIDDEN * WIDTH // tp_size
    num_nvfp4 = min(num_layers, 40)
    of_experts = values * (num_nvfp4 * 9 / 16 + (num_layers - num_nvfp4) * 33 / 32)
    assert of_experts < table.weights < 1.2 * of_experts + 4 * VOCABULARY * HIDDEN
    parts = table.weights + table.paged_state + table.ring_state + table.arena + table.kept
    assert table.total == parts


@pytest.mark.parametrize("tp_size", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_a_slice_of_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    fake_compiler(monkeypatch)
    check(plan_of(tmp_path, 6, tp_size), 6, tp_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "tp_size", "fits"), [(48, 8, True), (48, 4, True), (36, 2, True), (48, 2, False)]
)
def test_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int, tp_size: int, fits: bool
) -> None:
    fake_compiler(monkeypatch)
    prepared = plan_of(tmp_path, num_layers, tp_size)
    check(prepared, num_layers, tp_size)
    _, size = DEVICES["sm_90a"]
    assert (prepared.memory.total <= size) == fits


def test_what_no_gpu_of_the_target_holds_is_refused_with_numbers() -> None:
    _, size = DEVICES["sm_90a"]
    require_fits(size, "sm_90a", 2)
    require_fits(size + 1, "cpu", 2)
    require_fits(size + 1, "sm_100a", 2)  # whatever that has
    with pytest.raises(ConfigError) as caught:
        require_fits(200 * 2**30, "sm_90a", 2)
    assert str(caught.value).startswith(
        "each of 2 ranks needs 200.00 GiB, an NVIDIA H200 has 140.40; build with a smaller"
    )


def test_a_dry_run_shows_the_table_and_then_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a build refuses, before it writes anything."""
    fake_compiler(monkeypatch)
    monkeypatch.setitem(DEVICES, "sm_90a", ("NVIDIA H200", 2**30))
    write_config(tmp_path / "model", 2, has_drafter=False)
    given = f"{tmp_path / 'model'} --target sm_90a --weights dummy --tp-size 8 --moe-split width "
    given += f"--spec none --max-verify-tokens 1 --prefill-chunk 64 --max-seq-len {POSITIONS}"
    done = CliRunner().invoke(build_command.make_app(), [*given.split(), "--dry-run", "--quiet"])
    assert done.exit_code == 1
    assert "bytes per position" in done.stdout
    assert "of 8 ranks needs" in done.stderr
    done = CliRunner().invoke(
        build_command.make_app(), [*given.split(), "-o", str(tmp_path / "engine"), "--quiet"]
    )
    assert done.exit_code == 1
    assert "an NVIDIA H200 has 1.00; build with" in done.stderr
    assert not (tmp_path / "engine").exists()
