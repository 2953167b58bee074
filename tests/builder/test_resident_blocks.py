"""Blocks that wait for each other, or for other ranks, are resident at once.

By induction over a stream: a kernel's blocks start when all blocks of the one before have begun
(launch_dependents, or their end). So what follows cannot keep blocks of a kernel out, what precedes
ends without it, and it is enough that a GPU has room for the blocks of each kernel by itself. That
is what is checked, for all tactics of all launches, with as many registers as threads can have.
"""

import math
import sys
from pathlib import Path
from typing import Literal

import pytest
from gpu_build import fake_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "perf"))

import inkling2

from inkrt.builder import tactics
from inkrt.builder.build import prepare
from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.options import BuildOptions
from inkrt.plugins.tactic import CallArgs, KernelLaunch, Peers, Scratch, Tactic
from inkrt.plugins.w4a16.shapes import MAX_SMEM, MULTIPROCESSORS

SM_THREADS, SM_REGISTERS, SM_BYTES, MOST_REGISTERS = 2048, 65536, 228 * 1024, 255


def meets(kernel: KernelLaunch) -> bool:
    """Whether blocks hand each other words, which stay from launch to launch, or ranks do."""
    return any(
        isinstance(param, Peers)
        or (isinstance(param, Scratch) and param.fill is not None and param.name != "error")
        for param in kernel.params
    )


def room(kernel: KernelLaunch) -> int:
    """Blocks that a GPU surely has room for; of one that can be launched at all, at least one."""
    threads = math.prod(kernel.block)
    registers = dict(kernel.defines).get("REGISTERS", MOST_REGISTERS)
    assert isinstance(registers, int)
    of_sm = min(
        SM_THREADS // threads,
        SM_REGISTERS // (threads * -(-registers // 8) * 8),
        SM_BYTES // (kernel.smem_bytes + 1024),
    )
    return MULTIPROCESSORS * max(of_sm, 1)


def check(kernel: KernelLaunch) -> None:
    """Raise AssertionError if the kernel cannot be launched, or its blocks can wait in vain."""
    where = f"{kernel.entry} {kernel.grid} {kernel.defines}"
    assert kernel.smem_bytes <= MAX_SMEM, where
    assert kernel.block[0] % 32 == 0, where
    assert math.prod(kernel.block) <= 1024, where
    assert kernel.grid[0] % kernel.cluster == 0, where
    assert kernel.cluster <= 8, where
    if meets(kernel):
        assert math.prod(kernel.grid) <= room(kernel), where


@pytest.mark.parametrize(
    ("tp_size", "split", "projections", "most_tokens"),
    [
        (8, "width", "checkpoint", 1),
        *(
            pytest.param(*case, 8, marks=pytest.mark.slow)
            for case in [
                (8, "width", "checkpoint"), (4, "width", "checkpoint"), (4, "experts", "mxfp8"),
                (2, "width", "nvfp4"),
            ]
        ),
        pytest.param(1, "width", "checkpoint", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_of_all_tactics_of_the_full_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int, split: Literal["width"],
    projections: Literal["checkpoint"], most_tokens: int,
) -> None:  # fmt: skip
    fake_compiler(monkeypatch)
    found: dict[str, bool] = {}
    find_tactics = tactics.find_tactics

    def checked(name: str, target: str, args: CallArgs) -> list[Tactic]:
        candidates = find_tactics(name, target, args)
        for tactic in candidates:
            for kernel in tactic.kernels:
                check(kernel)
                found[kernel.entry] = found.get(kernel.entry, False) or meets(kernel)
        return candidates

    monkeypatch.setattr(tactics, "find_tactics", checked)
    monkeypatch.setitem(inkling2.DRAFTER, "target_layer_ids", [0, 1, 2, 3, 4])
    has_drafter = most_tokens > 1
    inkling2.write_config(tmp_path, 6, has_drafter=has_drafter)
    options = BuildOptions(
        target="sm_90a", weights="dummy", tp_size=tp_size, moe_split=split, max_seq_len=8192,
        projections=projections, max_verify_tokens=most_tokens, prefill_chunk=64,
    )  # fmt: skip
    prepare(open_checkpoint(tmp_path), options)
    names = {name for name, is_meeting in found.items() if is_meeting}
    assert {"moe_experts", "sample", "relative_attention"} <= names
    assert ("next_row" in names) == has_drafter
    assert ("share_row" in names) == (has_drafter and tp_size > 1)
    assert ({"conv_mix_ranks", "all_reduce"} if tp_size > 1 else {"conv_mix"}) <= names


def test_a_kernel_with_too_many_blocks_is_found() -> None:
    fits = KernelLaunch(Path("k.cu"), "k", (), (264, 1, 1), (128, 1, 1), (Peers(16),))
    check(fits)
    for smem_bytes, grid in ((116 * 1024, 264), (0, 265)):
        other = KernelLaunch(
            Path("k.cu"), "k", (), (grid, 1, 1), (128, 1, 1), (Peers(16),), smem_bytes=smem_bytes
        )
        with pytest.raises(AssertionError, match="k "):
            check(other)
