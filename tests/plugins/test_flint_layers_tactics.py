"""The launch of a run of layers without a GPU: which calls it takes, compilation, spills."""

import pytest
import torch
from cubin import resources

from inkrt.builder.compile import compile_cubin
from inkrt.plugins.flint_layers.tactics import EARLIEST, SCHEDULE, find_tactics, schedules
from inkrt.plugins.tactic import CallArgs, Int32, TensorArg
from inkrt.plugins.w4a16.shapes import Dims

BF16 = torch.bfloat16


def call(dims: Dims, windows: list[int], *, tokens: int = 1, ring: int = 576) -> CallArgs:
    """Arguments of a call with these sizes; only what the tactic looks at."""
    layers = len(windows)

    def each(*shape: int, dtype: torch.dtype = BF16) -> list[TensorArg]:
        return [TensorArg(shape, dtype)] * layers

    return {
        "x": TensorArg((tokens, dims.hidden), BF16),
        "sinks": each(dims.heads, dtype=torch.float32),
        "q_norm": each(128),
        "k_cache": [
            TensorArg((2, ring, dims.kv_heads, 128) if w else (9, 64, dims.kv_heads, 128), BF16)
            for w in windows
        ],
        "gate_up": each(dims.experts, 2 * dims.width, dims.hidden // 2, dtype=torch.uint8),
        "shared_down": each(dims.hidden, dims.shared_width // 2, dtype=torch.uint8),
        "page_table": TensorArg((128,), torch.int32),
        "windows": windows,
        "rope_thetas": [1e4 if w else 0.0 for w in windows],
        "eps": 1e-6,
        "scale": 128**-0.5,
        "top_k": dims.top_k,
    }


FLINT = [0, 513, 513, 513, 0]


@pytest.mark.parametrize(
    ("experts", "windows", "stack"),
    # Flint's own sizes spill nothing; some others a few words, stored once and read once a layer.
    [(256, FLINT, 0), (40, [513, 513], 16), (128, [0, 0, 0], 24), (8, [64, 0], 8)],
)
def test_launches_compile_without_spills(experts: int, windows: list[int], stack: int) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    found = find_tactics("sm_90a", call(Dims(experts=experts), windows))[0]
    (kernel,) = found.kernels
    used = resources(compile_cubin(kernel.source, kernel.defines, "sm_90a"))
    assert used["stack"] <= stack
    assert used["registers"] * kernel.block[0] <= 65536


def test_bytes_are_those_of_all_weights_that_a_token_reads() -> None:
    found = find_tactics("sm_90a", call(Dims(), FLINT))[0]
    # perf.md 1.1: 15.2 MB static and 10.6 MB routed a layer.
    assert found.bytes / len(FLINT) == pytest.approx(25.8e6, rel=0.01)
    assert {packing.arguments[0] for packing in found.packings} == {
        "qkv", "o", "shared_gate_up", "gate_up", "down", "shared_down",
    }  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        call(Dims(), FLINT, tokens=2),
        call(Dims(hidden=1024), FLINT),
        call(Dims(heads=16), FLINT),
        call(Dims(width=256), FLINT),
        call(Dims(shared_width=2048), FLINT),
        call(Dims(top_k=8), FLINT),
        call(Dims(experts=300), FLINT),
        call(Dims(kv_heads=2), FLINT),
        call(Dims(kv_heads=8), FLINT),
        call(Dims(), [513, 1024]),
        call(Dims(), [1025, 1025], ring=1088),
        call(Dims(), [513, 513], ring=520),
        {**call(Dims(), FLINT), "page_table": None},
        {**call(Dims(), FLINT), "x": TensorArg((1, 2048), torch.float32)},
        {**call(Dims(), FLINT), "rope_thetas": [0.0, 1e4, 5e4, 1e4, 0.0]},
    ],
    ids=range(15),
)
def test_other_calls_are_refused(args: CallArgs) -> None:
    assert find_tactics("sm_90a", args) == []


def test_only_hopper_has_the_launch() -> None:
    assert find_tactics("sm_100a", call(Dims(), FLINT)) == []
    assert find_tactics("cpu", call(Dims(), FLINT)) == []


def test_no_weights_are_requested_into_memory_that_is_in_use() -> None:
    for schedule in schedules():
        assert len(schedule) == len(EARLIEST)
        assert all(first <= point <= 4 for first, point in zip(EARLIEST, schedule, strict=True))


def test_schedules_are_tactics_of_the_same_code() -> None:
    found = find_tactics("sm_90a", call(Dims(), FLINT))
    # From SCHEDULE, by the pieces' free points: 4 others for five pieces, then 3, 1 and 0.
    assert len({tactic.name for tactic in found}) == len(found) == 1 + 5 * 4 + 3 + 1 + 0
    assert found[0].name == "persistent_" + "".join(map(str, SCHEDULE))
    assert len({(kernel.source, kernel.defines) for t in found for kernel in t.kernels}) == 1
    words = [[p.value for p in t.kernels[0].params if isinstance(p, Int32)] for t in found]
    for tactic, (word,) in zip(found, words, strict=True):
        points = [word >> 4 * piece & 15 for piece in range(len(EARLIEST))]
        assert tactic.name == "persistent_" + "".join(map(str, points))
