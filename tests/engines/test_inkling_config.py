"""Configurations of Inkling: both spellings, what is absent, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inkrt.engines.catalog import find_definition
from inkrt.engines.inkling.config import parse_config
from inkrt.engines.interface import MtpConfig, Sharding
from inkrt.engines.tiny import inkling
from inkrt.errors import ConfigError

PUBLISHED = inkling.config("bfloat16")
Edit = Callable[[dict[str, Any]], object]


def edited(edit: Edit) -> dict[str, Any]:
    config = copy.deepcopy(PUBLISHED)
    edit(config)
    return config


def text(**values: Any) -> Edit:
    return lambda config: config["text_config"].update(values)


def mtp(**values: Any) -> Edit:
    return lambda config: config["mtp_config"].update(values)


def test_both_spellings_come_to_the_same() -> None:
    """transformers reads the publisher's and writes its own."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.InklingConfig.from_dict(copy.deepcopy(PUBLISHED)).to_dict()
    own = theirs["text_config"]
    assert own["intermediate_size"] == inkling.DENSE_WIDTH
    assert "dense_intermediate_size" not in own
    expected = parse_config(PUBLISHED)
    assert parse_config(theirs) == expected
    assert parse_config(own | {"dtype": "bfloat16"}) == expected
    assert (expected.intermediate_size, expected.moe_intermediate_size) == (44, 20)
    assert expected.is_sliding == (True, True, False, True, True, False, True)
    assert expected.is_dense == (True, True, False, False, False, False, False)
    assert (expected.full.num_kv_heads, expected.sliding.num_kv_heads) == (2, 4)
    assert (expected.full.rel_extent, expected.sliding.rel_extent) == (37, 22)
    assert expected.conv_kernel_size == 4
    assert expected.max_position_embeddings == 4096
    assert expected.mtp == MtpConfig((True, False, True), False, True)


def test_what_is_absent_is_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = parse_config({"model_type": "inkling_text"}), transformers.InklingTextConfig()
    for key in (
        "vocab_size", "hidden_size", "num_hidden_layers", "d_rel", "log_scaling_n_floor",
        "log_scaling_alpha", "max_position_embeddings", "rms_norm_eps", "conv_kernel_size",
        "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
        "n_shared_experts", "route_scale", "logits_mup_width_multiplier",
    ):  # fmt: skip
        assert getattr(ours, key) == getattr(theirs, key), key
    kinds = ["hybrid_sliding" if is_sliding else "hybrid" for is_sliding in ours.is_sliding]
    assert kinds == theirs.layer_types
    assert not any(ours.is_dense)
    assert ours.unpadded_vocab_size == ours.vocab_size
    assert (ours.mtp, ours.eos_token_ids) == (None, ())


def test_inkling_small_is_read_by_the_same_code() -> None:
    """What public copies of its configuration say; the publisher's spelling."""
    config = {
        "model_type": "inkling_mm_model",
        "text_config": {
            "vocab_size": 201024,
            "unpadded_vocab_size": 200058,
            "hidden_size": 4096,
            "num_hidden_layers": 42,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "swa_num_attention_heads": 32,
            "swa_num_key_value_heads": 8,
            "dense_mlp_idx": 2,
            "dense_intermediate_size": 16384,
            "intermediate_size": 2048,
            "logits_mup_width_multiplier": 16.0,
            "log_scaling_n_floor": 128000,
            "model_max_length": 1048576,
            "eos_token_id": 200006,
        },
        "audio_config": {"decoder_dmodel": 4096, "n_mel_bins": 80, "mel_vocab_size": 16},
        "vision_config": {"decoder_dmodel": 4096, "patch_size": 40, "n_layers": 4},
        "mtp_config": {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2, 4, 5, 6, 7]},
    }
    definition = find_definition(config)
    small = definition.parse_config(config)
    assert (small.intermediate_size, small.moe_intermediate_size) == (16384, 2048)
    assert [i for i, sliding in enumerate(small.is_sliding) if not sliding] == [*range(5, 42, 6)]
    assert sum(small.is_dense) == 2
    assert small.mtp.num_depths == 8
    for tp_size in (1, 2, 4, 8):
        small.check_sharding(Sharding(tp_size, "width"))
    vision, audio = definition.towers(config, small)
    stages = [vision.weight_sources(frozenset())[f"stages.{i}.projection"] for i in range(4)]
    shapes = [stage.parts[0].shape for stage in stages]
    assert shapes == [(128, 75), (320, 512), (4800, 5120), (4096, 9600)]
    assert vision.inputs(3, torch.bfloat16) == {"pixels": ((3, 9600), torch.bfloat16)}
    assert audio.weight_sources(frozenset())["table"].parts[0].shape == (1280, 4096)
    assert (vision.placeholder.token_id, audio.placeholder.token_id) == (200054, 200053)
    assert (vision.placeholder.marker_id, audio.placeholder.marker_id) == (200005, 200020)


@pytest.mark.parametrize("name", ["inkling_mm_model", "inkling_model", "inkling_text"])
def test_names_of_the_model(name: str) -> None:
    config = PUBLISHED if name == "inkling_mm_model" else PUBLISHED["text_config"]
    definition = find_definition(config | {"model_type": name})
    assert definition.parse_config(config | {"model_type": name}).hidden_size == 60


def test_mtp_settings_of_the_text_model_come_first() -> None:
    config = edited(text(num_mtp_layers=2, mtp_local_layer_ids=[1], chain_hidden_post_norm=True))
    assert parse_config(config).mtp == MtpConfig((False, True), True, True)
    nested = edited(mtp(mtp_hidden_states_first=False, local_extent=22, swa_head_dim=8))
    del nested["text_config"]["mtp_hidden_states_first"]
    assert parse_config(nested).mtp == MtpConfig((True, False, True), False, False)
    assert parse_config(edited(lambda c: c.pop("mtp_config"))).mtp is None
    full = edited(lambda c: c["mtp_config"].pop("local_layer_ids"))
    assert parse_config(full).mtp == MtpConfig((False,) * 3, False, True)


REFUSED: dict[str, tuple[Edit, str]] = {
    "width of what": (
        lambda c: c["text_config"].pop("dense_intermediate_size"),
        "config.json: intermediate_size alone may be the width of a dense MLP or of an expert; add "
        "dense_intermediate_size (it is an expert's) or moe_intermediate_size (it is not)",
    ),
    "two widths of experts": (
        text(moe_intermediate_size=24),
        "config.json: intermediate_size = 20 beside dense_intermediate_size is the width of an "
        "expert, but moe_intermediate_size = 24",
    ),
    "no sinks": (
        text(shared_expert_sink=False),
        "config.json: shared_expert_sink = False is not supported for inkling, only True",
    ),
    "softcap": (
        text(final_logit_softcapping=30.0),
        "config.json: final_logit_softcapping = 30.0 is not supported for inkling, only None",
    ),
    "tied": (
        lambda c: c.update(tie_word_embeddings=True),
        "config.json: tie_word_embeddings = True is not supported for inkling, only False",
    ),
    "quantized": (
        lambda c: c.update(quantization_config={"quant_method": "compressed-tensors"}),
        "config.json: quantization_config with quant_method 'compressed-tensors' is not supported; "
        "this version reads BF16 and FP32 weights of inkling, and of quant_method 'modelopt' NVFP4 "
        "experts, as ModelOpt writes them",
    ),
    "heads": (
        text(swa_num_key_value_heads=5),
        "config.json: swa_num_attention_heads = 12 is no multiple of swa_num_key_value_heads = 5",
    ),
    "local layers": (
        text(local_layer_ids=[0, 7]),
        "config.json: local_layer_ids must list ids from 0 to 6, got [0, 7]",
    ),
    "layer kinds": (
        text(layer_types=["hybrid"] * 6 + ["linear"]),
        "config.json: layer_types has 'linear', only 'hybrid' and 'hybrid_sliding' are supported",
    ),
    "mlp kinds": (
        text(mlp_layer_types=["dense"]),
        "config.json: mlp_layer_types must list 7 layers, got ['dense']",
    ),
    "experts of a token": (
        text(num_experts_per_tok=13),
        "config.json: num_experts_per_tok 13 exceeds n_routed_experts 12",
    ),
    "vocabulary": (
        text(unpadded_vocab_size=513),
        "config.json: unpadded_vocab_size 513 exceeds vocab_size 512",
    ),
    "text config": (
        lambda c: c.update(text_config=[]),
        "config.json: text_config must be an object, got []",
    ),
    "mtp config": (
        lambda c: c.update(mtp_config=[3]),
        "config.json: mtp_config must be an object, got [3]",
    ),
    "mtp depths": (
        mtp(num_nextn_predict_layers=-1),
        "config.json: num_mtp_layers must be an integer from 0 to 512, got -1",
    ),
    "mtp windows": (
        mtp(local_layer_ids=[0, 3]),
        "config.json: mtp_local_layer_ids must list ids from 0 to 2, got [0, 3]",
    ),
    "mtp extent": (
        mtp(local_extent=23),
        "config.json: MTP heads with mtp_local_extent = 23 are not supported, only 22, the window "
        "of the text model",
    ),
    "mtp heads": (
        text(mtp_swa_num_attention_heads=6),
        "config.json: MTP heads with mtp_swa_num_attention_heads = 6 are not supported, only 12, "
        "that of the text model",
    ),
    "mtp norm": (
        mtp(chain_hidden_post_norm=1),
        "config.json: chain_hidden_post_norm must be true or false, got 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    edit, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        parse_config(edited(edit))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tp_size", "split", "message"),
    [
        (4, "experts", "does not divide num_attention_heads = 6"),
        (8, "width", "does not divide num_attention_heads = 6"),
    ],
)
def test_ranks_that_do_not_fit(tp_size: int, split: Any, message: str) -> None:
    config = parse_config(PUBLISHED)
    config.check_sharding(Sharding(2, split))
    with pytest.raises(ConfigError, match=f"tp size {tp_size} {message}"):
        config.check_sharding(Sharding(tp_size, split))
