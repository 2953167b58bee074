"""Builds for a GPU without NVRTC: code is the text of what would be compiled."""

import json
from pathlib import Path
from typing import Any

import pytest

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.runtime.engine_file import EngineConfig

# As small as the kernels take, with every kind of layer of Flint.
CONFIG: dict[str, Any] = {
    "model_type": "flint",
    "dtype": "bfloat16",
    "vocab_size": 600,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 16,
    "max_position_embeddings": 1024,
    "quantization_config": {"quant_method": "nvfp4"},
}


def fake_compiler(patch: pytest.MonkeyPatch) -> None:
    """Let nothing be compiled, with NVRTC installed or not."""

    def compile_cubin(source: Path, defines: object, target: str) -> bytes:
        return repr((source.name, defines, target)).encode()

    patch.setattr("inkrt.builder.compile._nvrtc", lambda _: None)
    patch.setattr("inkrt.builder.compile.compile_cubin", compile_cubin)
    patch.setattr("inkrt.builder.build.compile_cubin", compile_cubin)


def build_small(
    folder: Path, name: str, cache: Path | None = None, *, lines: list[str] | None = None
) -> EngineConfig:
    """Build `folder / name` with steps of one and two tokens, by a timing cache."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    options = BuildOptions(target="sm_90a", weights="dummy", max_verify_tokens=2)
    say = (lambda _: None) if lines is None else lines.append
    return build_engine(model, folder / name, options, say, timing_cache=cache)
