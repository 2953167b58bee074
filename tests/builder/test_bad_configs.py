"""Checkpoints with a damaged or unsupported config.json are refused by name and key."""

from pathlib import Path

import pytest
from small_model import Damage, Refuse, edit_config

from inkrt.engines import catalog
from inkrt.errors import CheckpointError, ConfigError, InkError

CASES: dict[str, tuple[type[InkError], str, Damage]] = {}


def expect(name: str, error: type[InkError], message: str, damage: Damage) -> None:
    CASES[name] = (error, message, damage)


def write(content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "config.json").write_bytes(data)


def config(**values: object) -> Damage:
    return lambda folder: edit_config(folder, lambda content: content.update(values))


def text(**values: object) -> Damage:
    return lambda folder: edit_config(folder, lambda content: content["text_config"].update(values))


expect(
    "no config",
    CheckpointError,
    "cannot read {folder}/config.json (No such file or directory); a checkpoint folder has it "
    "beside its shards",
    lambda folder: (folder / "config.json").unlink(),
)
expect(
    "broken config",
    CheckpointError,
    "{folder}/config.json is not valid JSON (Expecting property name enclosed in double quotes: "
    "line 1 column 2 (char 1)); download it again",
    write("{"),
)
expect(
    "binary config",
    CheckpointError,
    "{folder}/config.json is not valid JSON ('utf-8' codec can't decode byte 0x80 in position 0: "
    "invalid start byte); download it again",
    write(b"\x80\x81\x82\x83"),
)
expect(
    "config nested without end",
    CheckpointError,
    "{folder}/config.json is not valid JSON ({cause}); download it again",
    write("[" * 100_000),
)
expect(
    "config that is a list",
    CheckpointError,
    "{folder}/config.json must hold a JSON object, got list",
    write("[]"),
)
for number in ("NaN", "Infinity", "-Infinity", "1e999"):
    expect(
        number,
        CheckpointError,
        f"{{folder}}/config.json is not valid JSON ({number} is no finite number); download it "
        "again",
        lambda folder, number=number: (folder / "config.json").write_text(  # type: ignore[misc]
            (folder / "config.json").read_text().replace("1e-05", number)
        ),
    )
MODEL_TYPE = "config.json: model_type %s is not supported; this version builds " + ", ".join(
    sorted(catalog._DEFINITIONS)
)
expect("unknown model", ConfigError, MODEL_TYPE % "'gpt2'", config(model_type="gpt2"))
expect("no model", ConfigError, MODEL_TYPE % None, write("{}"))
expect("a list of models", ConfigError, MODEL_TYPE % ["inkling2"], config(model_type=["inkling2"]))
expect(
    "quantized model",
    ConfigError,
    "config.json: quantization_config with quant_method 'fp8' is not supported; this version reads "
    "BF16 and FP32 weights of inkling2, and of quant_method 'modelopt' NVFP4 and MXFP8 experts "
    "and attention projections",
    config(quantization_config={"quant_method": "fp8"}),
)
expect(
    "quantized text model",
    ConfigError,
    "config.json: quantization_config with quant_method 'fp8' is not supported; this version reads "
    "BF16 and FP32 weights of inkling2, and of quant_method 'modelopt' NVFP4 and MXFP8 experts "
    "and attention projections",
    text(quantization_config={"quant_method": "fp8"}),
)
expect(
    "float16 model",
    ConfigError,
    "config.json: dtype 'float16' is not supported, only 'bfloat16' and 'float32'",
    config(dtype="float16"),
)
expect(
    "text_config that is a list",
    ConfigError,
    "config.json: text_config must be an object, got [1]",
    config(text_config=[1]),
)
for got in (["hybrid"], "hybrid", 3):
    expect(
        f"layer_types {got}",
        ConfigError,
        f"config.json: layer_types must list 3 layers, got {got!r}",
        text(layer_types=got),
    )
for got in ("full_attention", None, ["hybrid"]):
    expect(
        f"layer type {got}",
        ConfigError,
        f"config.json: layer type {got!r} is not supported, only 'hybrid' and 'hybrid_sliding'",
        text(layer_types=["hybrid", got, "hybrid"]),
    )
for got in (-4, 0, True, "12", 12.0, None, [12], 10**30):
    for key, least in (("num_attention_heads", 1), ("conv_kernel_size", 2)):
        expect(
            f"{key} {got!r}",
            ConfigError,
            f"config.json: {key} must be an integer from {least} to 2147483647, got {got!r}",
            text(**{key: got}),
        )
for got in (-0.5, 0, True, "1e-5", None, {}):
    expect(
        f"rms_norm_eps {got!r}",
        ConfigError,
        f"config.json: rms_norm_eps must be a positive number, got {got!r}",
        text(rms_norm_eps=got),
    )
for got in ("1", True, [1, "2"], 1.5, -1, 10**30):
    expect(
        f"eos_token_id {got!r}",
        ConfigError,
        f"config.json: eos_token_id must be a token id or a list of ids, got {got!r}",
        text(eos_token_id=got),
    )
expect(
    "heads that do not divide",
    ConfigError,
    "config.json: num_attention_heads = 12 is no multiple of num_key_value_heads = 5",
    text(num_key_value_heads=5),
)
expect(
    "more tokens than rows",
    ConfigError,
    "config.json: unpadded_vocab_size 513 exceeds vocab_size 512",
    text(unpadded_vocab_size=513),
)
expect(
    "more experts than there are",
    ConfigError,
    "config.json: num_experts_per_tok 13 exceeds n_routed_experts 12",
    text(num_experts_per_tok=13),
)
expect(
    "tied embeddings",
    ConfigError,
    "config.json: tie_word_embeddings = True is not supported for inkling2, only False",
    config(tie_word_embeddings=True),
)
expect(
    "another activation",
    ConfigError,
    "config.json: hidden_act = 'gelu' is not supported for inkling2, only 'silu'",
    text(hidden_act="gelu"),
)
expect(
    "another router",
    ConfigError,
    "config.json: scoring_func = 'softmax' is not supported for inkling2, only 'sigmoid'",
    text(scoring_func="softmax"),
)


@pytest.mark.parametrize("name", CASES)
def test_refusal(refuse: Refuse, tmp_path: Path, name: str) -> None:
    error, message, damage = CASES[name]
    got = refuse(damage)
    assert type(got) is error
    start, cause, end = message.replace("{folder}", str(tmp_path / "copy")).partition("{cause}")
    if cause:  # Python's own words, which are others in other versions
        assert str(got).startswith(start)
        assert str(got).endswith(end)
    else:
        assert str(got) == start
    assert "\n" not in str(got)
