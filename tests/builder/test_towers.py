"""Towers in builds: which are built in, what prefill takes, what is refused."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from inkrt.builder.build import build_engine, prepare
from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.options import BuildOptions
from inkrt.builder.towers import choose_towers, tower_specs, tower_steps, traced_steps
from inkrt.engines.catalog import find_definition
from inkrt.engines.interface import StateOptions
from inkrt.engines.tiny import inkling, inkling2
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import CheckpointError, ConfigError, EngineFormatError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import CONFIG_NAME, read_config, read_plans
from inkrt.runtime.tower_spec import Dmel, Inkling2Patches, InklingTiles

OPTIONS = BuildOptions(max_seq_len=60, max_verify_tokens=2, prefill_chunk=12, spec="none")


@pytest.fixture(scope="module", autouse=True)
def two_layers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inkling, "NUM_LAYERS", 2)
        patch.setattr(inkling, "FULL_LAYERS", (1,))
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "checkpoint"
    write_checkpoint(folder, model="inkling", dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "engine"
    build_engine(checkpoint, folder, OPTIONS)
    return folder


def test_the_configuration_says_what_towers_take(engine: Path) -> None:
    config = read_config(engine)
    vision, audio = config.towers
    assert vision.named_rows == {"vision16": 16, "vision128": 128}
    assert {name: x.shape for name, x in vision.steps[0].inputs.items()} == {"pixels": (16, 24)}
    assert vision.steps[0].inputs["pixels"].dtype == "bfloat16"
    assert {name: x.shape for name, x in audio.steps[1].inputs.items()} == {"levels": (256, 6)}
    assert audio.steps[1].inputs["levels"].dtype == "int32"
    assert vision.processor == InklingTiles(2, 2, (2, 1, 1))
    assert audio.processor == Dmel(6, 5, -7.0, 2.0)
    assert [step.name for step in config.steps] == ["decode", "verify2", "prefill12"]
    assert [step.name for step in config.all_steps[3:]] == [
        *("vision16", "vision128", "audio16", "audio256")
    ]


def test_only_prefill_takes_features(checkpoint: Path, engine: Path) -> None:
    options = dataclasses.replace(OPTIONS, towers="none")
    plans = {
        "auto": read_plans(engine, 0),
        "none": prepare(open_checkpoint(checkpoint), options).plans,
    }
    assert plans["none"].keys() == {"decode", "verify2", "prefill12"}
    for name in ("decode", "verify2"):
        assert plans["auto"][name] == plans["none"][name]
    prefill, plain = plans["auto"]["prefill12"], plans["none"]["prefill12"]
    assert prefill.inputs.keys() - plain.inputs.keys() == {"features", "is_feature"}
    shapes = [prefill.tensors[prefill.inputs[name]].shape for name in ("features", "is_feature")]
    assert shapes == [(12, 60), (12,)]
    ops = [launch.op for launch in prefill.launches]
    assert [op for op in ops if op != "place_features"] == [x.op for x in plain.launches]
    assert ops.count("place_features") == 1
    assert plans["auto"]["vision16"].outputs.keys() == {"features"}


def test_towers_of_a_text_checkpoint_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    opened = open_checkpoint(without(checkpoint, tmp_path, "model.audio."))
    definition = find_definition(opened.config)
    model = definition.parse_config(opened.config)
    (tower,) = choose_towers(opened, definition, model, OPTIONS, lines.append)
    assert tower.kind == "vision"
    assert lines == [
        "tower vision: placeholder 486, steps of 16 and 128 rows",
        "tower audio: left out, the checkpoint has none of its tensors",
    ]
    part = without(checkpoint, tmp_path, "model.visual.layers.norm_1")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.visual\.layers\.norm_1\.we"):
        prepare(open_checkpoint(part), OPTIONS)


def without(checkpoint: Path, tmp_path: Path, prefix: str) -> Path:
    """A copy in one file, without some tensors."""
    folder = tmp_path / prefix
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = {k: v for f in checkpoint.glob("*.safetensors") for k, v in load_file(f).items()}
    kept = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("model", [inkling, inkling2])
def test_a_gpu_without_kernels_for_towers_is_refused(model: object, target: str) -> None:
    values = model.config("bfloat16")  # type: ignore[attr-defined]
    definition = find_definition(values)
    config = definition.parse_config(values)
    further = tower_steps(definition.towers(values, config), 1, torch.bfloat16)
    options = dataclasses.replace(OPTIONS, target=target)
    steps = traced_steps([], further, config, StateOptions(1, 60, 64), options, torch.bfloat16)
    with pytest.raises(ConfigError) as caught:
        next(steps)
    assert str(caught.value).startswith("step vision")
    assert str(caught.value).endswith(
        "; build for the cpu, or leave the towers out with --towers none"
    )
    assert f"which towers need, has no kernel for {target} in this version" in str(caught.value)


def test_inkling2_has_a_tower_that_takes_one_image_a_step() -> None:
    values = inkling2.config("bfloat16")
    definition = find_definition(values)
    towers = definition.towers(values, definition.parse_config(values))
    (spec,) = tower_specs(towers, torch.bfloat16)
    assert not spec.is_rowwise
    assert isinstance(spec.processor, Inkling2Patches)
    assert spec.token_id == values["image_token_id"]
    side = values["vision_config"]["patch_size"] * values["vision_config"]["spatial_merge_size"]
    assert spec.processor.tile_size == side
    patches = spec.processor.merge**2
    assert spec.steps[0].inputs["positions"].shape == (1 + spec.steps[0].num_rows * patches, 2)


def test_a_configuration_of_other_inputs_is_damaged(engine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    for file in engine.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / CONFIG_NAME).read_text())
    says = "step audio16 takes other inputs than config.json says"
    makes = "takes other inputs than the processor in config.json makes"
    for tower, place, key, value, problem in (
        (1, ("steps", 0, "inputs", "levels"), "shape", [16, 7], says),
        (1, ("steps", 0, "inputs", "levels"), "dtype", "int64", says),
        (1, ("processor",), "num_bands", 7, rf"step audio\d+ {makes}"),
        (1, ("processor",), "lowest", 2.0, rf"step audio\d+ {makes}"),
        (0, ("processor",), "folds", [3], rf"step vision\d+ {makes}"),
        (0, ("processor",), "folds", [-1, -2], rf"step vision\d+ {makes}"),
        (0, ("processor",), "num_frames", 1, rf"step vision\d+ {makes}"),
    ):
        edited = msgspec.json.decode(json.dumps(content))
        part = edited["towers"][tower]
        for step in place:
            part = part[step]
        part[key] = value
        (folder / CONFIG_NAME).write_text(json.dumps(edited))
        with pytest.raises(EngineFormatError, match=problem):
            Engine.open(folder)
    edited = {**content, "towers": content["towers"][:1]}
    (folder / CONFIG_NAME).write_text(json.dumps(edited))
    with pytest.raises(EngineFormatError, match=r"rank0\.engine has other steps than config\.json"):
        Engine.open(folder)
