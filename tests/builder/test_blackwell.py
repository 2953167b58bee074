"""Engines for Blackwell: every kernel compiles, from the same sources; none has run there yet."""

import json
from pathlib import Path

import pytest

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.runtime.engine_file import read_code, read_config

CONFIG = {
    "model_type": "flint",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "num_experts": 32,
    "max_position_embeddings": 2048,
    "quantization_config": {"quant_method": "nvfp4"},
}


def test_flint_compiles_for_blackwell(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = BuildOptions(target="sm_100a", weights="dummy", max_verify_tokens=2)
    lines: list[str] = []
    build_engine(tmp_path, tmp_path / "engine", options, lines.append)
    assert any("none has run on such a GPU" in line for line in lines)
    assert read_config(tmp_path / "engine").target == "sm_100a"
    code = read_code(tmp_path / "engine", 0)
    kernels = [k for plan in code.plans.values() for x in plan.launches for k in x.kernels]
    assert {"qkv", "simple_sink_attention", "gate_up", "sample"} <= {k.entry for k in kernels}
    assert all(kernel.cubin in code.cubins for kernel in kernels)
