"""Checkpoints with damaged files or unfit tensors are refused by name."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import OPTIONS, Damage, Refuse, edit_config, edit_tensors
from torch import Tensor

from inkrt.builder.build import build_engine
from inkrt.errors import CheckpointError, InkError

CASES: dict[str, tuple[type[InkError], str, Damage]] = {}

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
W13 = "model.llm.layers.1.mlp.experts.w13_weight"


def expect(name: str, error: type[InkError], message: str, damage: Damage) -> None:
    CASES[name] = (error, message, damage)


def write(file: str, content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(data)


def cut(file: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:size])

    return damage


def replace_by_folder(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Damage:
    return lambda folder: edit_tensors(folder, edit)


def index(edit: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        edit(content)
        (folder / INDEX).write_text(json.dumps(content))

    return damage


def second_copy(folder: Path) -> None:
    shutil.copy(folder / SHARD, folder / "model-00009.safetensors")
    (folder / INDEX).unlink()


def unlink(pattern: str) -> Damage:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


DAMAGED = "shard {folder}/" + SHARD + " is truncated or damaged (Error while deserializing header: "
expect(
    "missing shard",
    CheckpointError,
    f"shard {{folder}}/{SHARD} is missing; download it again",
    unlink(SHARD),
)
expect(
    "truncated shard",
    CheckpointError,
    DAMAGED + "incomplete metadata, file not fully covered); download it again",
    cut(SHARD, -1),
)
expect(
    "shard cut in its header",
    CheckpointError,
    DAMAGED + "invalid header length); download it again",
    cut(SHARD, 100),
)
expect(
    "empty shard",
    CheckpointError,
    DAMAGED + "header too small); download it again",
    write(SHARD, ""),
)
expect(
    "garbage shard",
    CheckpointError,
    DAMAGED + "header too large); download it again",
    write(SHARD, "<!DOCTYPE html>\n" * 20),
)
expect(
    "folder for a shard",
    CheckpointError,
    f"cannot read shard {{folder}}/{SHARD} (No such device (os error 19)); it must be a file that "
    "you may read",
    replace_by_folder,
)
expect(
    "no shards",
    CheckpointError,
    "checkpoint {folder} has no *.safetensors file; download its shards",
    unlink("model*"),
)
expect(
    "index without a map",
    CheckpointError,
    f"{{folder}}/{INDEX} has no weight_map from tensor names to file names; download it again",
    index(lambda content: content.pop("weight_map")),
)
expect(
    "index with other things than names",
    CheckpointError,
    f"{{folder}}/{INDEX} has no weight_map from tensor names to file names; download it again",
    index(lambda content: content["weight_map"].update({W13: 2})),
)
expect(
    "broken index",
    CheckpointError,
    f"{{folder}}/{INDEX} is not valid JSON (Expecting value: line 1 column 16 (char 15)); download "
    "it again",
    write(INDEX, '{"weight_map": '),
)
expect(
    "index that promises too much",
    CheckpointError,
    f"{{folder}}/{SHARD} has no tensor model.llm.more, which {INDEX} promises; download the shard "
    "again",
    index(lambda content: content["weight_map"].update({"model.llm.more": SHARD})),
)
expect(
    "index that names another shard",
    CheckpointError,
    f"{{folder}}/model-00001-of-00003.safetensors has no tensor {W13}, which {INDEX} promises; "
    "download the shard again",
    index(lambda content: content["weight_map"].update({W13: "model-00001-of-00003.safetensors"})),
)
expect(
    "one tensor in two shards",
    CheckpointError,
    "{folder}/model-00009.safetensors: tensor model.llm.attn_res.attn_queries.0 stands in "
    f"{SHARD} too; remove one of the two files",
    second_copy,
)

OTHER_DTYPE = (
    f"{{folder}}/model.safetensors: tensor {W13} has dtype %s, only BF16 and F32 are supported by "
    "this version; use a release of the model in one of them"
)


def quantize(tensors: dict[str, Tensor]) -> None:
    """Experts as four-bit releases store them: two numbers a byte, and their scales."""
    num_experts, rows, columns = tensors[W13].shape
    shape = (num_experts, rows, columns // 2)
    tensors[W13] = torch.zeros(shape, dtype=torch.uint8)
    tensors[W13 + "_scale"] = torch.zeros(num_experts, rows, 4).to(torch.float8_e4m3fn)
    tensors[W13 + "_scale_2"] = torch.zeros(num_experts)


for code, dtype in (("F16", torch.float16), ("I64", torch.int64), ("F64", torch.float64)):
    expect(
        f"{code} tensor",
        CheckpointError,
        OTHER_DTYPE % code,
        tensors(lambda all_, dtype=dtype: all_.update({W13: all_[W13].to(dtype)})),  # type: ignore[misc]
    )
expect("quantized experts", CheckpointError, OTHER_DTYPE % "U8", tensors(quantize))
expect(
    "other shape",
    CheckpointError,
    f"{{folder}}/model.safetensors: tensor {W13} has shape [12, 38, 60], [12, 40, 60] expected "
    "from config.json; one of the two belongs to another model",
    tensors(lambda all_: all_.update({W13: all_[W13][:, 2:].contiguous()})),
)
expect(
    "missing tensor",
    CheckpointError,
    f"checkpoint {{folder}} has no tensor {W13}; a shard is missing or config.json belongs to "
    "another model",
    tensors(lambda all_: all_.pop(W13)),
)
expect(
    "more layers in the configuration",
    CheckpointError,
    "checkpoint {folder} has no tensor model.llm.layers.3.attn.attn_sink_proj.weight; a shard is "
    "missing or config.json belongs to another model",
    lambda folder: edit_config(
        folder,
        lambda config: (
            config["text_config"].update(num_hidden_layers=4, layer_types=["hybrid_sliding"] * 4)
            or config["text_config"]["layer_types"].__setitem__(1, "hybrid")
        ),
    ),
)
expect(
    "no text model",
    CheckpointError,
    "the checkpoint has no Inkling-2 text model: neither model.llm.* nor model.language_model.* "
    "nor model.layers.* tensors",
    tensors(lambda all_: [all_.pop(name) for name in list(all_) if "llm" in name]),
)


@pytest.mark.parametrize("name", CASES)
def test_refusal(refuse: Refuse, tmp_path: Path, name: str) -> None:
    error, message, damage = CASES[name]
    got = refuse(damage)
    assert type(got) is error
    assert str(got) == message.replace("{folder}", str(tmp_path / "copy"))
    assert "\n" not in str(got)


def test_a_sound_checkpoint_is_not_refused(refuse: Refuse) -> None:
    assert refuse(lambda _: None) is None


@pytest.mark.parametrize("name", ["config.json", "nowhere"])
def test_the_path_must_be_a_folder(checkpoint: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_engine(checkpoint / name, tmp_path / "engine", OPTIONS)
    assert str(caught.value) == (
        f"checkpoint {checkpoint / name} is not a folder; name the one with the model's config.json"
    )
    assert list(tmp_path.iterdir()) == []


def test_damaged_headers_never_crash(refuse: Refuse) -> None:
    """Whatever byte of a shard's header is another: refused, or of no consequence."""
    generator = random.Random(4)

    def flip_a_bit(folder: Path) -> None:
        content = bytearray((folder / SHARD).read_bytes())
        size = 8 + int.from_bytes(content[:8], "little")
        content[generator.randrange(size)] ^= 1 << generator.randrange(8)
        (folder / SHARD).write_bytes(content)

    errors = [error for _ in range(200) if (error := refuse(flip_a_bit)) is not None]
    assert len(errors) > 100
    assert all(type(error) is CheckpointError and "\n" not in str(error) for error in errors)
