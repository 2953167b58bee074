"""Inkling-2 with NVFP4 and MXFP8 experts, from checkpoint to logits, against transformers.

transformers is given the values that the quantized weights stand for. Its NVFP4 weights have their
global scale, rounded; the engine's multiplies the float32 sums.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands.parity import ParityCheck, Reference
from inkrt.engines.tiny import tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import CheckpointError, ConfigError
from inkrt.runtime.engine import Engine

Make = Callable[..., Path]
LENGTH = 60  # beyond both windows


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, layout: str = "publisher") -> Path:
        folder = tmp_path_factory.mktemp("quantized") / layout
        write_checkpoint(folder, model="inkling2-quantized", seed=1, dtype=dtype, layout=layout)
        return folder

    return make


@pytest.fixture(scope="module")
def make_engine(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, **options: Any) -> Path:
        engine = tmp_path_factory.mktemp("quantized") / "engine"
        chosen = BuildOptions(**{"max_seq_len": 128, "max_verify_tokens": 1} | options)
        build_engine(make_checkpoint(dtype), engine, chosen)
        return engine

    return make


@cache
def reference(folder: Path, dtype: str) -> Reference:
    return Reference(folder, dtype)


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(tokenizer.VOCAB_SIZE, (LENGTH,), generator=generator).tolist()


# The narrow split gives ranks a part of every expert's rows and columns, codes and scales.
@pytest.mark.parametrize(
    ("dtype", "options", "bound"),
    [
        pytest.param("float32", {}, 5e-6, marks=pytest.mark.slow),
        pytest.param("float32", {"tp_size": 2, "moe_split": "width"}, 5e-6, marks=pytest.mark.slow),
        pytest.param(
            "float32", {"tp_size": 2, "moe_split": "experts"}, 5e-6, marks=pytest.mark.slow
        ),
        ("bfloat16", {}, 0.1),
    ],
)
def test_logits_are_those_of_the_dequantized_model(
    dtype: str, options: dict[str, Any], bound: float, make_checkpoint: Make, make_engine: Make
) -> None:
    with Engine.open(make_engine(dtype, **options)) as engine:
        model = reference(make_checkpoint(dtype, "transformers"), dtype)
        report = ParityCheck(engine, model).run(prompt(), 24, num_decoded=4)
    assert report.max_relative_error <= bound
    assert report.top1_agreement >= (1 if dtype == "float32" else 0.9)


@pytest.mark.slow
def test_projections_may_be_quantized_too(tmp_path: Path) -> None:
    """In the forms of the experts, and keys of the first layers in another one and in none."""
    for layout in ("publisher", "transformers"):
        write_checkpoint(
            tmp_path / layout, model="inkling2-quantized-attention", seed=1, dtype="float32",
            layout=layout,
        )  # fmt: skip
    options = BuildOptions(max_seq_len=128, tp_size=2, moe_split="width", max_verify_tokens=1)
    build_engine(tmp_path / "publisher", tmp_path / "engine", options)
    with Engine.open(tmp_path / "engine") as engine:
        model = reference(tmp_path / "transformers", "float32")
        report = ParityCheck(engine, model).run(prompt(), 24, num_decoded=4)
    assert report.max_relative_error <= 5e-6
    assert report.top1_agreement == 1


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def build(folder: Path) -> None:
    build_engine(folder, folder / "engine", BuildOptions(max_seq_len=64))


@pytest.mark.slow
def test_forms_may_stand_in_hf_quant_config(tmp_path: Path, make_engine: Make) -> None:
    """With the same engine as where they stand in config.json."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, model="inkling2-quantized", seed=1, dtype="float32")

    def move(config: dict[str, Any]) -> None:
        quantization = config.pop("quantization_config")
        del quantization["quant_method"]
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))

    rewrite(folder, move)
    # Weights do not depend on the steps.
    build_engine(folder, folder / "engine", BuildOptions(max_seq_len=128, max_verify_tokens=1))
    wanted, got = (
        {file.name: file.read_bytes() for file in engine.glob("rank*.safetensors")}
        for engine in (make_engine("float32"), folder / "engine")
    )
    assert wanted
    assert got == wanted


def plain_config(config: dict[str, Any]) -> None:
    del config["quantization_config"]


def other_algorithm(config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_algo"] = "FP8"


def other_module(config: dict[str, Any]) -> None:
    layers = config["quantization_config"]["quantized_layers"]
    layers["model.llm.layers.3.attn.attn_sink_proj"] = {"quant_algo": "NVFP4"}


def all_mxfp8(config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_algo"] = "MXFP8"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            plain_config, CheckpointError,
            "the checkpoint has NVFP4 experts in layer 0 (by model.llm.layers.0.mlp.experts."
            "w13_weight_amax), which config.json and hf_quant_config.json call plain",
        ),
        (all_mxfp8, CheckpointError, "which config.json and hf_quant_config.json call mxfp8"),
        (other_algorithm, ConfigError, "quant_algo 'FP8' is not supported, only NVFP4 and MXFP8"),
        (
            other_module, ConfigError,
            "quantized module 'model.llm.layers.3.attn.attn_sink_proj' is not supported, only the "
            "experts and the attention projections wq_du, wk_dv, wv_dv, wr_du, gate_attn, wo_ud",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, model="inkling2-quantized", dtype="float32")
    rewrite(folder, change)
    with pytest.raises(error, match=re.escape(message)):
        build(folder)


def test_codes_of_another_dtype_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, model="inkling2-quantized", dtype="float32")
    name = "model.llm.layers.0.mlp.experts.w2_weight_scale"
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = tensors[name].float()
            save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} has dtype F32, F8_E4M3 expected"):
        build(folder)
