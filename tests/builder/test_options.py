"""Options of a build: what fits no model, what does not fit this one, what the others become."""

import dataclasses
from pathlib import Path

import pytest
import torch
from small_flint import write_small as write_flint
from small_model import OPTIONS, edit_config, write_small

from inkrt.builder.build import build_engine, prepare
from inkrt.builder.checkpoint import Checkpoint
from inkrt.builder.options import BuildOptions, rebuild_command
from inkrt.errors import ConfigError
from inkrt.runtime.engine_file import read_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            BuildOptions(max_seq_len=4097),
            "max seq len 4,097 exceeds the model's 4,096 positions",
        ),
        (
            BuildOptions(tp_size=8),
            "tp size 8 does not divide num_attention_heads = 12 of this model; choose a tp size "
            "that does",
        ),
        (
            BuildOptions(max_seq_len=100, prefill_chunk=101),
            "prefill chunk 101 exceeds the 100 positions of a session; leave it out or give at "
            "most 100",
        ),
        (
            BuildOptions(max_seq_len=4, prefill_chunk=10),
            "prefill chunk 10 exceeds the 4 positions of a session; leave it out or give at most 9",
        ),
    ],
    ids=["max_seq_len", "tp_size", "prefill_chunk", "least_chunk"],
)
def test_options_that_do_not_fit_the_model(
    checkpoint: Path, tmp_path: Path, options: BuildOptions, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_engine(checkpoint, tmp_path / "engine", options)
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "tpu"}, "target 'tpu' is not supported; this version builds for "),
        ({"tp_size": 3}, "tp size 3 is not supported; choose one of 1, 2, 4, 8"),
        ({"max_seq_len": -1}, "max seq len must be positive, got -1"),
        ({"max_batch_size": 0}, "max batch size must be at least 1, got 0"),
        ({"max_verify_tokens": 9}, "max verify tokens must be 1 to 8, got 9"),
        ({"max_verify_tokens": 0}, "max verify tokens must be 1 to 8, got 0"),
        (
            {"prefill_chunk": 8},
            "prefill chunk must be above 8 (narrower steps are verify steps), got 8",
        ),
        ({"dtype": "fp8"}, "dtype must be one of auto, bfloat16, float32, got 'fp8'"),
        ({"spec": "eagle"}, "spec must be one of auto, none, dspark, mtp, got 'eagle'"),
        ({"weights": "none"}, "weights must be one of real, dummy, got 'none'"),
        ({"moe_split": "x"}, "moe_split must be one of experts, width, got 'x'"),
    ],
    ids=str,
)
def test_options_that_fit_no_model(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BuildOptions(**changes)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("stored", "named", "asked", "expected"),
    [
        ("bfloat16", True, "auto", "bfloat16"),
        ("bfloat16", False, "auto", "bfloat16"),
        ("float32", False, "auto", "float32"),
        ("bfloat16", True, "float32", "float32"),
        ("float32", True, "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(tmp_path: Path, stored: str, named: bool, asked: str, expected: str) -> None:
    folder = write_small(tmp_path / "checkpoint", dtype=stored)
    if not named:
        edit_config(folder, lambda c: (c.pop("dtype"), c["text_config"].pop("dtype")))
    options = dataclasses.replace(OPTIONS, dtype=asked)  # type: ignore[arg-type]
    result = prepare(Checkpoint(folder), options)
    assert result.options.dtype == expected
    assert result.dtype == getattr(torch, expected)
    # Weights that the model keeps in float32 whatever it computes in.
    wide = {"queries", "router", "router_bias", "attn_conv", "mlp_conv", "k_conv", "v_conv"}
    for tensor in result.tensors:
        parts = tensor.name.split(".")
        is_wide = parts[-1] in wide or (parts[-1] == "weight" and parts[-2] in wide)
        dtype = torch.float32 if is_wide else getattr(torch, expected)
        assert tensor.dtype == dtype, tensor.name
    assert {spec.dtype for spec in result.state.buffers} == {expected}


def test_options_are_kept_with_what_they_stand_for(checkpoint: Path, engine: Path) -> None:
    effective = dataclasses.replace(OPTIONS, dtype="bfloat16", spec="none")
    config = read_config(engine)
    assert config.build == dataclasses.asdict(effective)
    assert config.rebuild_command == rebuild_command(effective)
    assert config.rebuild_command.startswith("ink-build CHECKPOINT -o ENGINE --target cpu ")
    assert "--max-seq-len 200" in config.rebuild_command
    options = dataclasses.replace(OPTIONS, max_seq_len=0)
    assert prepare(Checkpoint(checkpoint), options).options.max_seq_len == 4096


def test_rings_have_room_for_a_chunk_where_kernels_write_first(tmp_path: Path) -> None:
    """Window 21: 20 older positions, and 13 to roll back or the widest step."""
    checkpoint = write_flint(tmp_path / "checkpoint")
    cpu = BuildOptions(max_seq_len=200, prefill_chunk=70, max_verify_tokens=1)
    for options, ring in (
        (cpu, 48),
        (dataclasses.replace(cpu, keep_intermediates=True), 128),
        (dataclasses.replace(cpu, keep_intermediates=True, prefill_chunk=9), 64),
        (dataclasses.replace(cpu, keep_intermediates=True, prefill_chunk=0), 128),  # 64 + 20
    ):
        layout = prepare(Checkpoint(checkpoint), options).state
        rings = {spec.shape[1] for spec in layout.buffers if spec.kind == "ring"}
        assert rings == {ring}
        assert layout.rollback_tokens == 13


@pytest.mark.parametrize(
    ("max_seq_len", "chunk"), [(200, 64), (64, 64), (63, 63), (9, 9), (8, 9), (1, 9)]
)
def test_a_chunk_is_no_longer_than_a_session(
    checkpoint: Path, max_seq_len: int, chunk: int
) -> None:
    options = BuildOptions(max_seq_len=max_seq_len, max_verify_tokens=1, towers="none")
    result = prepare(Checkpoint(checkpoint), options)
    assert list(result.plans) == ["decode", f"prefill{chunk}"]
    # What the rebuild command says gives the same.
    assert prepare(Checkpoint(checkpoint), result.options).options == result.options


def test_slots_and_steps(checkpoint: Path) -> None:
    options = dataclasses.replace(OPTIONS, max_batch_size=3, max_verify_tokens=2)
    result = prepare(Checkpoint(checkpoint), options)
    assert list(result.plans) == ["decode", "verify2", "prefill16"]
    assert (result.state.num_slots, result.state.num_pages) == (3, 3 * 4)
    for spec in result.state.buffers:
        assert spec.shape[0] == (12 if spec.kind == "paged" else 3)
