"""Configurations of real sizes, as they are published, for targets that are not built yet."""

import pytest

from inkrt.engines.dspark.config import DraftLayerConfig
from inkrt.engines.dspark.layouts import read_folder
from inkrt.engines.interface import DraftTarget
from inkrt.errors import ConfigError


def test_the_recipe_that_radixark_publishes() -> None:
    """A configuration of a real size, for a target that this version does not build."""
    inkling = DraftTarget(6144, 66, 201024, 200058, 1048576, None, True, True)
    nested = {
        "attention_mode": "gqa",
        "projector_type": "dspark",
        "target_layer_ids": [5, 17, 35, 47, 59],
        "mask_token_id": 200064,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    }
    values = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-5,
        "rope_theta": 8e6,
        "max_position_embeddings": 1048576,
        "block_size": 7,
        "vocab_size": 201024,
        "num_target_layers": 66,
        "dflash_config": nested,
    }
    found = read_folder(values, None, inkling, "")
    config = found.config
    assert config.layers == (DraftLayerConfig(is_causal=False, window=None),) * 5
    assert (config.taps, config.tap_point) == ((5, 17, 35, 47, 59), "pre_mlp_conv")
    assert (config.anchor_first, config.block_size, config.mask_token_id) == (True, 7, 200064)
    assert (config.head, config.markov_rank, config.softcap_place) == ("vanilla", 256, "none")
    assert (config.applies_embed_norm, config.rope_theta) == (False, 8e6)
    assert len(found.decisions) == 5


def test_a_causal_fill_in_drafter_with_sinks_and_a_window() -> None:
    """Settings at three places, some of them twice; its NVFP4 weights are refused."""
    hybrid = DraftTarget(2688, 52, 131072, 131072, 262144, None, False, False)
    values = {
        "architectures": ["Qwen3DSparkModel"],
        "attention_sink_bias": True,
        "block_size": 8,
        "dflash_config": {
            "attention_sink_bias": True,
            "causal": True,
            "mask_token_id": 990,
            "swa_window_size": 1024,
            "target_layer_ids": [1, 5, 19, 29, 41, 51],
            "use_swa": True,
            "sample_from_anchor": False,
        },
        "dspark_bonus_anchor": True,
        "dspark_markov_rank": 512,
        "markov_rank": 512,
        "target_layer_ids": [1, 5, 19, 29, 41, 51],
        "hidden_size": 2688,
        "num_hidden_layers": 6,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 131072,
        "sample_from_anchor": False,
        "quantization_config": {"quant_algo": "W4A16_NVFP4"},
    }
    with pytest.raises(ConfigError, match="quantization_config = "):
        read_folder(values, None, hybrid, "")
    del values["quantization_config"]
    config = read_folder(values, None, hybrid, "").config
    assert config.layers == (DraftLayerConfig(is_causal=True, window=1024),) * 6
    assert (config.anchor_first, config.block_size, config.num_rows) == (False, 7, 8)
    assert (config.markov_rank, config.has_sinks, config.mask_token_id) == (512, True, 990)
    assert (config.taps, config.tap_point) == ((1, 5, 19, 29, 41, 51), "layer_output")
