"""Engines for Blackwell: every kernel compiles, from the same sources; none has run there yet."""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from inkrt.builder.build import Prepared, build_engine, prepare
from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.options import BuildOptions
from inkrt.engines.nano import export
from inkrt.engines.tiny import flint
from inkrt.runtime.engine_file import read_code, read_config


def test_flint_compiles_for_blackwell(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    config = flint.config("bfloat16", flint.WIDE) | {
        "quantization_config": {"quant_method": "nvfp4"}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = BuildOptions(target="sm_100a", weights="dummy", max_verify_tokens=2)
    lines: list[str] = []
    build_engine(tmp_path, tmp_path / "engine", options, lines.append)
    (line,) = (line for line in lines if "none has run on such a GPU" in line)
    assert line.endswith("attention of up to 8 tokens takes the kernel without tensor cores")
    assert read_config(tmp_path / "engine").target == "sm_100a"
    code = read_code(tmp_path / "engine", 0)
    kernels = [k for plan in code.plans.values() for x in plan.launches for k in x.kernels]
    entries = {kernel.entry for kernel in kernels}
    assert {"qkv", "simple_sink_attention", "gate_up", "sample"} <= entries
    assert {"tile_qkv", "tile_sink_attention", "tile_experts", "tile_combine"} <= entries
    assert all(kernel.cubin in code.cubins for kernel in kernels)


# Two layers of the full size, of both kinds of attention and of experts.
INKLING2 = {
    "model_type": "inkling2_text",
    "dtype": "bfloat16",
    "num_hidden_layers": 2,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.llm.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
            "model.llm.layers.1.mlp.experts": {"quant_algo": "MXFP8"},
        },
    },
}
# Of attention_simple.cu and, for 7 or more tokens, of moe/experts.cu: up to 16 bytes are spilled.
MAY_SPILL = {"simple_relative_attention", "moe_experts"}
MOST_STACK_BYTES = 16
MAX_SMEM_BYTES, REGISTERS = 232_448, 65_536
ATTENTION = {"simple_relative_attention", "window_relative_attention"}  # of narrow steps
NARROW = ["decode", *(f"verify{width}" for width in range(2, 9))]


def prepare_inkling2(checkpoint: Path, **options: Any) -> Prepared:
    """Lower and compile all steps, and check what has to hold of any kernel."""
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    sys.path.append(str(Path(__file__).parents[1] / "plugins"))
    from cubin import resources

    chosen = BuildOptions(target="sm_100a", weights="dummy", **options)
    prepared = prepare(open_checkpoint(checkpoint), chosen)
    launches = list(chain.from_iterable(plan.launches for plan in prepared.plans.values()))
    assert all(launch.kernels for launch in launches)
    for kernel in chain.from_iterable(launch.kernels for launch in launches):
        cubin = prepared.code.cubins[kernel.cubin]
        assert kernel.entry.encode() in cubin
        used = resources(cubin)
        threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
        assert used["registers"] * threads <= REGISTERS, kernel.entry
        assert kernel.smem_bytes <= MAX_SMEM_BYTES, kernel.entry
        most = MOST_STACK_BYTES if kernel.entry in MAY_SPILL else 0
        assert used["stack"] <= most, (kernel.entry, used)
    return prepared


def entries(prepared: Prepared, step: str, op: str) -> set[str]:
    """Kernels of an operator in a step."""
    launches = [launch for launch in prepared.plans[step].launches if launch.op == op]
    assert launches, (step, op)
    return {kernel.entry for launch in launches for kernel in launch.kernels}


@pytest.mark.slow
def test_nano_and_its_drafter_compile_for_blackwell() -> None:
    checkpoint = Path(export.__file__).parent / "checkpoint"
    prepared = prepare_inkling2(checkpoint, max_seq_len=2048)
    assert prepared.options.spec == "dspark"
    assert set(prepared.plans) == {*NARROW, "prefill512", "draft"}
    for step in (*NARROW, "prefill512"):
        assert entries(prepared, step, "relative_attention") == {"simple_relative_attention"}
        assert entries(prepared, step, "moe") == {"moe_router", "moe_experts"}
    assert entries(prepared, "draft", "draft_attention") == {"attend", "merge"}
    assert entries(prepared, "draft", "draft_head") == {"hidden_part", "next_row", "head_logits"}


@pytest.mark.slow
@pytest.mark.parametrize("moe_split", ["width", "experts"])
def test_a_rank_of_the_full_size_compiles_for_blackwell(tmp_path: Path, moe_split: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INKLING2))
    prepared = prepare_inkling2(tmp_path, tp_size=4, moe_split=moe_split, max_seq_len=8192)
    assert set(prepared.plans) == {*NARROW, "prefill512"}
    for step in NARROW:
        # Hopper's kernel on wgmma is called relative_attention.
        assert entries(prepared, step, "relative_attention") == ATTENTION
        is_within = NARROW.index(step) < 3  # of four tokens and more the sum stands in front
        mix = {"conv_mix_ranks"} if is_within else {"all_reduce", "conv_mix"}
        assert entries(prepared, step, "allreduce_conv_mix") == mix
    assert entries(prepared, "prefill512", "relative_attention") == {"tile_relative_attention"}
    assert "all_reduce" in entries(prepared, "prefill512", "allreduce_conv_mix")
    for plan in prepared.plans.values():
        nvfp4, mxfp8 = (launch for launch in plan.launches if launch.op == "moe")
        assert nvfp4.kernels[0].cubin == mxfp8.kernels[0].cubin  # the router
        assert nvfp4.kernels[1].cubin != mxfp8.kernels[1].cubin
