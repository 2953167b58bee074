"""Configurations of looped Inkling-2 models, the order of visits, and what a drafter may tap."""

import copy
from typing import Any

import pytest

from inkrt.engines.catalog import find_definition
from inkrt.engines.dspark.layouts import read_bundled
from inkrt.engines.inkling2_loop.config import draft_target, parse_config
from inkrt.engines.interface import DraftTarget, Sharding
from inkrt.engines.tiny import inkling2_loop
from inkrt.errors import ConfigError

PUBLISHED = inkling2_loop.config("bfloat16")


def test_what_is_absent_is_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = (
        parse_config({"model_type": "inkling2_loop_text"}),
        transformers.models.inkling2_loop.Inkling2LoopTextConfig(),
    )
    for key in (
        "vocab_size", "unpadded_vocab_size", "hidden_size", "num_hidden_layers", "d_rel",
        "log_scaling_n_floor", "log_scaling_alpha", "max_position_embeddings", "rms_norm_eps",
        "conv_kernel_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
        "route_scale", "qk_l2_clip_threshold", "rel_l2_clip_threshold",
        "n_layers_per_attn_res_block", "mlp_gate_softcap", "mlp_up_softcap",
        "final_logit_softcapping",
    ):  # fmt: skip
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.core_start == theirs.loop_layer_index_start
    assert ours.core_end == theirs.loop_layer_index_end
    assert ours.num_passes == theirs.loop_num_passes
    assert ours.gate_rank == theirs.loop_gate_rank
    assert len(ours.visits) == theirs.total_num_hidden_layers == 48
    assert ours.full.num_heads == ours.sliding.num_heads == theirs.swa_num_attention_heads == 24
    assert ours.sliding.window == theirs.sliding_window_size
    kinds = ["hybrid_sliding" if sliding else "hybrid" for sliding in ours.is_sliding]
    assert kinds == theirs.layer_types


def test_visits_of_the_full_size() -> None:
    config = parse_config({"model_type": "inkling2_loop"})
    visits = [(visit.layer, visit.number) for visit in config.visits]
    assert visits[:7] == [*((layer, 0) for layer in range(6)), (6, 0)]
    assert (visits[17], visits[18], visits[29], visits[30]) == ((17, 0), (6, 1), (17, 1), (6, 2))
    assert (visits[41], visits[42], visits[47]) == ((17, 2), (18, 0), (23, 0))
    full = [index for index, (layer, _) in enumerate(visits) if not config.is_sliding[layer]]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47]
    config.check_sharding(Sharding(2, "width"))
    assert draft_target(config).num_hidden_layers == 48


def test_nested_keys_go_before_flat_ones() -> None:
    config = copy.deepcopy(PUBLISHED)
    config["text_config"] |= {"loop_num_passes": 5, "loop_gate_rank": 7}
    assert parse_config(config) == parse_config(PUBLISHED)
    del config["text_config"]["loop_config"]["num_passes"]
    assert parse_config(config).num_passes == 5
    assert find_definition(PUBLISHED).parse_config(PUBLISHED) == parse_config(PUBLISHED)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"core_start": 3}, "loop_layer_index_start = 3 is no multiple of n_layers_per_attn_res"),
        ({"core_end": 5}, "loop_layer_index_end = 5 is no multiple of"),
        ({"core_end": 8}, "loop_layer_index_end = 8 must be above loop_layer_index_start = 2 and "),
        ({"core_start": 6}, "loop_layer_index_end = 6 must be above loop_layer_index_start = 6"),
        ({"core_start": 0}, "core_start must be an integer from 1 to"),
        ({"num_passes": 0}, "num_passes must be an integer from 1 to"),
    ],
)
def test_loops_that_cannot_be_are_refused(loop: dict[str, int], message: str) -> None:
    config = copy.deepcopy(PUBLISHED)
    config["text_config"]["loop_config"] |= loop
    with pytest.raises(ConfigError, match=message):
        parse_config(config)


def taps(ids: list[int], target: DraftTarget) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What a bundled drafter of the published sizes taps, and what was decided."""
    settings: dict[str, Any] = {
        "block_size": 8, "sample_from_anchor": False, "markov_rank": 256,
        "markov_head_type": "rnn", "noise_token_id": 200_064, "target_layer_ids": ids,
        "num_hidden_layers": 3, "num_attention_heads": 24, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 6656, "rms_norm_eps": 1e-6, "rope_theta": 8e6,
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    config = {f"dspark_{key}": value for key, value in settings.items()}
    found = read_bundled(config, None, target, "config.json")
    assert found.config.block_size == 7
    return found.config.taps, found.decisions


def test_taps_are_visits_or_the_final_state() -> None:
    loop = draft_target(parse_config({"model_type": "inkling2_loop"}))
    found, decisions = taps([5, 23, 41, 48], loop)
    assert found == (5, 23, 41, 48)
    assert any("names 48, as many as the target has: the state" in line for line in decisions)
    with pytest.raises(ConfigError, match="names the output of layer 49, the target has 48"):
        taps([5, 49], loop)
    plain = find_definition({"model_type": "inkling2"})
    small = plain.draft_target(plain.parse_config({"model_type": "inkling2"}))
    with pytest.raises(ConfigError, match="names the output of layer 48, the target has 48"):
        taps([5, 48], small)
