"""Quantized checkpoints whose pieces do not fit are refused by one line that names the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import read_all, sources_of, write_few
from small_model import edit_tensors
from torch import Tensor

from inkrt.builder.checkpoint import open_checkpoint
from inkrt.engines.interface import Sharding
from inkrt.errors import CheckpointError, ConfigError, InkError

Damage = Callable[[dict[str, Tensor]], object]
CASES: dict[str, tuple[str, str, Damage]] = {}

# Of layers with NVFP4 experts of Inkling and Inkling-2, and with MXFP8 ones.
OLD = "model.llm.layers.3.mlp.experts.w13_weight"
NEW = "model.llm.layers.0.mlp.experts.w2_weight"
MX = "model.llm.layers.2.mlp.experts.w13_weight"
AT = "{folder}/model.safetensors: tensor "
AGAIN = "; download the file again"
RELEASE = " expected of quantized weights; hf_quant_config.json or config.json belongs to another "
RELEASE += "release of the model"


def expect(name: str, model: str, message: str, damage: Damage) -> None:
    CASES[name] = (model, message, damage)


def byte(name: str, value: int) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[-1, -1, -1] = value

    return damage


def first(name: str, value: float) -> Damage:
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def become(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda tensors: tensors.update({name: change(tensors[name])})


E4M3_RULE = ", block scales must be E4M3 numbers without a sign, 0x00 to 0x7E" + AGAIN
for value in (0x7F, 0xFF, 0x80, 0xB0):  # no number, no number, -0, negative
    for model, name in (("inkling-nvfp4", f"{OLD}.scale"), ("inkling2-quantized", f"{NEW}_scale")):
        expect(
            f"{name} 0x{value:X}",
            model,
            f"{AT}{name} has a byte 0x{value:02X}{E4M3_RULE}",
            byte(name, value),
        )
for value in (0x7F, 0xFF):
    expect(
        f"MXFP8 code 0x{value:X}",
        "inkling2-quantized",
        f"{AT}{MX} has a byte 0x{value:02X}, which as E4M3 is no number{AGAIN}",
        byte(MX, value),
    )
expect(
    "MXFP8 scale that is no number",
    "inkling2-mxfp8",
    f"{AT}{MX}_scale has a byte 0xFF, block scales must be E8M0 exponents, 0x00 to 0xFE{AGAIN}",
    byte(f"{MX}_scale", 0xFF),
)
for got, shown in ((-1.0, "-1"), (float("nan"), "nan"), (float("inf"), "inf")):
    for model, name in (("inkling-nvfp4", f"{OLD}.scale2"), ("inkling2-quantized", f"{NEW}_amax")):
        expect(
            f"{name} {shown}",
            model,
            f"{AT}{name} has a value {shown}, what scales weights must be finite and not "
            f"negative{AGAIN}",
            first(name, got),
        )
DENOMINATOR = f"{NEW}_outer_scale_denominator"
for got, shown in ((0.0, "0"), (-2688.0, "-2688"), (float("nan"), "nan")):
    expect(
        f"denominator {shown}",
        "inkling2-quantized",
        f"{AT}{DENOMINATOR} has a value {shown}, what scales weights must be finite and "
        f"positive{AGAIN}",
        first(DENOMINATOR, got),
    )
expect(
    "quotient beyond float32",
    "inkling2-quantized",
    f"{{folder}}: {NEW}_amax over {DENOMINATOR} is beyond what float32 can hold{AGAIN}",
    lambda tensors: (first(f"{NEW}_amax", 3e38)(tensors), first(DENOMINATOR, 1e-5)(tensors)),
)
for model, name, block in (
    ("inkling-nvfp4", f"{OLD}.scale", 16),
    ("inkling2-quantized", f"{MX}_scale", 32),
):
    rows = 128 if model == "inkling2-quantized" else 64
    expect(
        f"{name} of other blocks",
        model,
        f"{AT}{name} has shape [12, {rows}, {32 // block}], [12, {rows}, {64 // block}] expected "
        f"from config.json (a scale per {block} columns); one of the two belongs to another model",
        become(name, lambda x: x[..., ::2].contiguous()),
    )
for model, name in (
    ("inkling-nvfp4", f"{OLD}.scale"),
    ("inkling2-quantized", f"{NEW}_scale"),
    ("inkling2-quantized", DENOMINATOR),
    ("inkling2-mxfp8", f"{MX}_scale"),
):
    expect(
        f"{model} without {name}",
        model,
        f"checkpoint {{folder}} has no tensor {name}; a shard is missing or config.json belongs "
        f"to another model",
        lambda tensors, name=name: tensors.pop(name),  # type: ignore[misc]
    )
for model, name, code, allowed, change in (
    ("inkling-nvfp4", OLD, "I8", "U8", lambda x: x.view(torch.int8)),
    ("inkling-nvfp4", f"{OLD}.scale", "U8", "F8_E4M3", lambda x: x.view(torch.uint8)),
    ("inkling2-quantized", f"{NEW}_scale", "F32", "F8_E4M3", lambda x: x.float()),
    ("inkling2-mxfp8", MX, "BF16", "F8_E4M3", lambda x: x.bfloat16()),
    ("inkling2-mxfp8", MX, "F8_E5M2", "F8_E4M3", lambda x: x.view(torch.float8_e5m2)),
    ("inkling2-mxfp8", f"{MX}_scale", "F8_E4M3", "U8 or F8_E8M0",
     lambda x: x.view(torch.float8_e4m3fn)),
):  # fmt: skip
    expect(
        f"{name} as {code}",
        model,
        f"{AT}{name} has dtype {code}, {allowed}{RELEASE}",
        become(name, change),
    )
expect(
    "scale2 as bytes",
    "inkling-nvfp4",
    f"{AT}{OLD}.scale2 has dtype U8, only BF16 and F32 are supported by this version; use a "
    "release of the model in one of them",
    become(f"{OLD}.scale2", lambda x: x.to(torch.uint8)),
)
expect(
    "no NVFP4 where the configuration says so",
    "inkling-nvfp4",
    f"the checkpoint has no NVFP4 experts in layer 3 (by {OLD}.scale2), which config.json and "
    "hf_quant_config.json call nvfp4; take the files of one release",
    lambda tensors: tensors.pop(f"{OLD}.scale2"),
)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    """Files of a tiny checkpoint, made once."""
    made: dict[str, dict[str, bytes]] = {}

    def files(model: str) -> dict[str, bytes]:
        if model not in made:
            folder = write_few(tmp_path_factory.mktemp("sound") / "checkpoint", model)
            made[model] = {path.name: path.read_bytes() for path in folder.iterdir()}
        return made[model]

    return files


def check_and_read(folder: Path) -> None:
    """What a build does with a checkpoint's tensors: all headers first."""
    checkpoint = open_checkpoint(folder)
    sharding = Sharding(1, "experts")
    for sources in sources_of(checkpoint, sharding)[1]:
        for source in sources.values():
            for part in source.all_parts:
                checkpoint.check(part)
    read_all(folder, sharding)


def refusal(
    folder: Path, files: dict[str, bytes], change: Callable[[Path], object]
) -> InkError | None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    change(folder)
    try:
        check_and_read(folder)
    except InkError as error:
        return error
    return None


@pytest.mark.parametrize("name", CASES)
def test_refusal(content: Callable[[str], dict[str, bytes]], tmp_path: Path, name: str) -> None:
    model, message, damage = CASES[name]
    folder = tmp_path / "copy"
    got = refusal(folder, content(model), lambda path: edit_tensors(path, damage))
    assert type(got) is CheckpointError
    assert str(got) == message.replace("{folder}", str(folder))


@pytest.mark.parametrize("model", ["inkling-nvfp4", "inkling2-quantized", "inkling2-mxfp8"])
def test_sound_ones_are_read(
    content: Callable[[str], dict[str, bytes]], tmp_path: Path, model: str
) -> None:
    """All bytes that a scale may be, an expert of zeros, and denominators of either shape."""

    def extremes(tensors: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            if "experts" in name and name.endswith(("_scale", ".scale")):
                value.view(torch.uint8)[0, 0, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
            elif name.endswith((".scale2", "_amax")):
                value.view(-1)[0] = 0

    folder = tmp_path / "copy"
    assert refusal(folder, content(model), lambda path: edit_tensors(path, extremes)) is None


def quantization(**values: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "hf_quant_config.json"
        document = json.loads(path.read_text())
        document["quantization"].update(values)
        path.write_text(json.dumps(document))

    return change


ONLY = "config.json: quant_algo %s is not supported, only NVFP4 experts"
METADATA: list[tuple[dict[str, Any], str]] = [
    ({"quant_algo": "MXFP8"}, ONLY % "'MXFP8'"),
    ({"quant_algo": None}, ONLY % "None"),
    ({"quant_algo": ["NVFP4"]}, ONLY % "['NVFP4']"),
    (
        {"group_size": 32},
        "config.json: group_size 32 in quantization_config is not supported, nvfp4 has a scale per "
        "16 columns; take a release of the model with such blocks",
    ),
    (
        {"group_size": None, "config_groups": {"group_0": {"weights": {"group_size": 128}}}},
        "config.json: group_size 128 in quantization_config is not supported, nvfp4 has a scale "
        "per 16 columns; take a release of the model with such blocks",
    ),
    (
        {"kv_cache_quant_algo": "FP8"},
        "config.json: kv_cache_quant_algo 'FP8' is not supported, only null; keys and values stay "
        "in the compute dtype",
    ),
    (
        {"exclude_modules": "all"},
        "config.json: exclude_modules must list names of modules, got 'all'",
    ),
    (
        {"exclude_modules": [7]},
        "config.json: exclude_modules must list names of modules, got [7]",
    ),
    (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": []},
        "config.json: quantized_layers of quantization_config must be an object",
    ),
    (
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.llm.layers.1.mlp.experts": {"quant_algo": "NVFP4"}},
        },
        "config.json: quantized module 'model.llm.layers.1.mlp.experts' is not supported, only the "
        "routed experts of layers that have some",
    ),
    (
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.llm.layers.3.mlp.experts": "NVFP4"},
        },
        "config.json: quantized module 'model.llm.layers.3.mlp.experts' must be an object with a "
        "quant_algo, got 'NVFP4'",
    ),
]


@pytest.mark.parametrize(("values", "message"), METADATA)
def test_refused_metadata(
    values: dict[str, Any],
    message: str,
    content: Callable[[str], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    got = refusal(tmp_path / "copy", content("inkling-nvfp4"), quantization(**values))
    assert type(got) is ConfigError
    assert str(got) == message


EXPERTS = "model.llm.layers.%d.mlp.experts"


@pytest.mark.parametrize(
    "values",
    [
        {"quant_algo": "MIXED_PRECISION",
         "quantized_layers": {EXPERTS % 3: {"quant_algo": "NVFP4", "group_size": 16}}},
        {"exclude_modules": [EXPERTS % 2]},
        {"exclude_modules": ["model.llm.layers.[012]*"]},
        {"exclude_modules": [f"{EXPERTS % 2}.w13_weight", f"{EXPERTS % 2}.w2_weight"]},
        {"exclude_modules": None, "ignore": ["model.llm.layers.2"]},
        {"kv_cache_quant_algo": "none", "group_size": None},
    ],
)  # fmt: skip
def test_ways_to_say_the_same(
    values: dict[str, Any], content: Callable[[str], dict[str, bytes]], tmp_path: Path
) -> None:
    assert refusal(tmp_path / "copy", content("inkling-nvfp4"), quantization(**values)) is None


def test_a_release_that_excludes_what_it_quantizes_is_refused(
    content: Callable[[str], dict[str, bytes]], tmp_path: Path
) -> None:
    change = quantization(exclude_modules=["model.llm.layers.*"])
    got = refusal(tmp_path / "copy", content("inkling-nvfp4"), change)
    assert str(got) == (
        f"the checkpoint has NVFP4 experts in layer 3 (by {OLD}.scale2), which config.json and "
        "hf_quant_config.json call plain; take the files of one release"
    )
