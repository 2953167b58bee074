"""Kernels of operators on rows at the sizes of Inkling-2-Small, -Mini and of inkling2-nano.

They compile for both targets, keep nothing in local memory, and touch nothing of their own launch
before they wait.
"""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(ROOT / "tests/builder")]

from cubin import loads_held_up, resources  # noqa: E402
from ptx import compile_ptx, touched_before_wait  # noqa: E402

from inkrt.builder.compile import compile_cubin  # noqa: E402
from inkrt.builder.tactics import find_tactics  # noqa: E402
from inkrt.plugins.tactic import GPU_TARGETS, CallArgs, Output, Scratch, TensorArg  # noqa: E402

BF16, FLOAT32, INT32 = torch.bfloat16, torch.float32, torch.int32
STEP: CallArgs = {name: TensorArg((1,), INT32) for name in ("position", "num_tokens", "slot")}


def mix(num_rows: int, former: int, queries: int, width: int = 4608) -> CallArgs:
    rows = TensorArg((num_rows, width), BF16)
    return {
        "partial": rows,
        "conv_weight": TensorArg((width, 4), FLOAT32),
        "conv_state": TensorArg((1, 16, width), BF16),
        **STEP,
        "residual": TensorArg((num_rows, width), FLOAT32),
        "sources": [rows] * former,
        "queries": TensorArg((queries, width), FLOAT32),
        "norm_weights": [TensorArg((width,), BF16)] * queries,
        "mix_eps": 1e-6,
        "norm_eps": 1e-6,
        "residual_dtype": BF16,
        "dtype": BF16,
        "tp_size": 1,
    }


def post(num_rows: int, heads: tuple[int, int], sizes: tuple[int, int], *, full: bool) -> CallArgs:
    channels = heads[1] * sizes[0]
    taps = TensorArg((4, channels), BF16) if full else TensorArg((channels, 4), FLOAT32)
    own = TensorArg((num_rows, heads[1] * 4), BF16) if full else None
    cache = TensorArg((*((9, 64) if full else (1, 1536)), heads[1], sizes[0]), BF16)
    state = TensorArg((1, 16, channels), BF16)
    widths = {"q": heads[0] * sizes[0], "k": channels, "v": channels, "rel": heads[0] * sizes[1]}
    return {
        **{name: TensorArg((num_rows, width), BF16) for name, width in widths.items()},
        "q_scale": TensorArg((heads[0], sizes[0]), BF16),
        "rel_scale": TensorArg((heads[0], sizes[1]), BF16),
        "k_conv_weight": taps,
        "v_conv_weight": taps,
        "k_dynamic": own,
        "v_dynamic": own,
        "k_conv_state": state,
        "v_conv_state": state,
        "k_cache": cache,
        "v_cache": cache,
        "page_table": TensorArg((9,), INT32) if full else None,
        **STEP,
        "qk_threshold": 22.6,
        "rel_threshold": 8.0,
        "log_n_floor": 128000 if full else 0,
        "log_alpha": 0.1,
        "eps": 1e-6,
    }


def gated(num_rows: int, results: int, mixed: int) -> CallArgs:
    """Of Inkling-2-Mini."""
    width, rank = 2304, 64
    return {
        "mixed": TensorArg((mixed, num_rows, width), FLOAT32),
        "former": [TensorArg((num_rows, width), BF16)] * 2,
        "message_queries": TensorArg((4, width), FLOAT32),
        "down": TensorArg((results, rank, 2 * width), BF16),
        "forget": TensorArg((results, width, rank), BF16),
        "gain": TensorArg((results, width, rank), BF16),
        "norm_weights": [TensorArg((width,), BF16)] * mixed,
        "first": 4 - results if results == 1 else 0,
        "mix_eps": 1e-6,
        "gate_eps": 1e-6,
        "norm_eps": 1e-6,
    }


CALLS = [
    ("gated_input", gated(1, 3, 1), 1),
    ("gated_input", gated(8, 3, 3), 1),
    ("gated_input", gated(8, 1, 1), 1),
    ("allreduce_conv_mix", {**mix(8, 4, 3, 2304), "norm_weights": []}, 2),
    ("allreduce_conv_mix", mix(8, 8, 1), 3),
    ("allreduce_conv_mix", mix(1, 8, 3), 3),
    ("allreduce_conv_mix", mix(512, 9, 3), 1),
    ("allreduce_conv_mix", mix(1, 1, 1, 256), 2),
    ("qkv_post", post(1, (6, 1), (128, 16), full=False), 1),
    ("qkv_post", post(8, (48, 8), (128, 16), full=True), 1),
    ("qkv_post", post(512, (4, 2), (32, 8), full=True), 1),
    ("short_conv", {"x": TensorArg((512, 256), BF16), "weight": TensorArg((256, 4), FLOAT32),
                    "state": TensorArg((1, 16, 256), BF16), **STEP, "is_scaled": True}, 1),
    ("residual_mix", {"sources": [TensorArg((8, 4608), BF16)] * 9,
                      "queries": TensorArg((1, 4608), FLOAT32), "eps": 1e-6}, 2),
    ("rms_norm", {"x": TensorArg((8, 4608), FLOAT32), "weight": TensorArg((4608,), BF16),
                  "eps": 1e-6, "dtype": BF16}, 1),
    ("residual_add", {"residual": TensorArg((8, 256), BF16), "update": TensorArg((8, 256), BF16),
                      "dtype": FLOAT32}, 1),
    ("concat", {"parts": [TensorArg((1, 256), BF16), TensorArg((6, 256), BF16, (0, 1))],
                "dim": 0}, 1),
    ("kv_write", {"k": TensorArg((64, 2, 64), BF16), "v": TensorArg((64, 2, 64), BF16),
                  "k_cache": TensorArg((9, 64, 2, 64), BF16),
                  "v_cache": TensorArg((9, 64, 2, 64), BF16),
                  "page_table": TensorArg((9,), INT32), **STEP}, 1),
    ("l2_clip", {"x": TensorArg((64, 4, 8), BF16), "scale": TensorArg((4, 8), BF16),
                 "threshold": 8.0}, 1),
    ("sigmoid_gate", {"x": TensorArg((8, 768), BF16), "gate": TensorArg((8, 768), BF16)}, 1),
    ("sum_parts", {"parts": [TensorArg((8, 1152), FLOAT32)] * 5, "dtype": BF16}, 1),
    ("silu_mul", {"gate_up": TensorArg((7, 1024), BF16)}, 1),
    ("rope", {"x": TensorArg((7, 4, 64), BF16), "position": TensorArg((1,), INT32),
              "theta": 1e4}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "count"), CALLS)
def test_kernels_keep_to_the_rules(name: str, args: CallArgs, count: int) -> None:
    for target in GPU_TARGETS:
        tactics = find_tactics(name, target, args)
        assert len(tactics) == count
        for kernel in (kernel for tactic in tactics for kernel in tactic.kernels):
            used = resources(compile_cubin(kernel.source, kernel.defines, target))
            assert used["stack"] == 0
            # Room beside blocks of the kernels before it.
            assert used["registers"] <= 168
        own = {
            number
            for number, param in enumerate(kernel.params)
            if isinstance(param, Output | Scratch)
            and not (isinstance(param, Scratch) and param.name == "error")
        }
        assert not own & touched_before_wait(
            compile_ptx(kernel.source, kernel.defines), kernel.entry
        )


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("qkv_post", post(1, (12, 2), (128, 16), full=False)),
        ("qkv_post", post(8, (12, 2), (128, 16), full=True)),
    ],
)
def test_rows_wait_for_nothing_that_is_on_its_way(name: str, args: CallArgs) -> None:
    """Rows of the step are asked for right behind the wait, whenever weights and rings arrive.

    Of the mix as well whole steps gained nothing, so that one is left as it is.
    """
    (kernel,) = find_tactics(name, "sm_90a", args)[0].kernels
    held_up = loads_held_up(compile_cubin(kernel.source, kernel.defines, "sm_90a"))
    assert held_up
    assert not any(held_up), held_up


def test_other_shapes_have_no_kernels() -> None:
    assert find_tactics("allreduce_conv_mix", "cpu", mix(1, 1, 1)) == []
    assert find_tactics("allreduce_conv_mix", "sm_90a", mix(1, 10, 1)) == []
    assert find_tactics("allreduce_conv_mix", "sm_90a", mix(1, 1, 1, 4610)) == []
    assert find_tactics("allreduce_conv_mix", "sm_90a", mix(1, 1, 1) | {"tp_size": 2}) == []
    assert find_tactics("qkv_post", "sm_90a", post(1, (6, 1), (48, 16), full=False)) == []
    # A chunk's keys are to stand in the ring at once.
    assert find_tactics("qkv_post", "sm_90a", post(1600, (6, 1), (64, 16), full=False)) == []


def test_bytes_of_a_mix() -> None:
    """All weights and rows once: 9 KB rows, 73,728 B of taps, 18 KB a query."""
    (first, *_) = find_tactics("allreduce_conv_mix", "sm_90a", mix(1, 8, 1))
    row = 2 * 4608
    read = row + 8 * row + 2 * row + 3 * row + 8 * row + 2 * row + row
    assert first.bytes == read + 3 * row
