"""Engines for Blackwell: every kernel compiles, from the same sources; none has run there yet."""

import json
from pathlib import Path

import pytest

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
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
    assert any("none has run on such a GPU" in line for line in lines)
    assert read_config(tmp_path / "engine").target == "sm_100a"
    code = read_code(tmp_path / "engine", 0)
    kernels = [k for plan in code.plans.values() for x in plan.launches for k in x.kernels]
    entries = {kernel.entry for kernel in kernels}
    assert {"qkv", "simple_sink_attention", "gate_up", "sample"} <= entries
    assert {"tile_qkv", "tile_sink_attention", "tile_experts", "tile_combine"} <= entries
    assert all(kernel.cubin in code.cubins for kernel in kernels)
