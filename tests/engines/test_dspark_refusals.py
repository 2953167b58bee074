"""Drafters that are damaged, of another model or not supported are refused with one clear line."""

import pytest
from drafter_layouts import Edit, both, drop, put, put_in, read

from inkrt.engines.dspark.flavours import SUPPORTED
from inkrt.engines.tiny.drafter import DrafterLayout
from inkrt.errors import ConfigError


def refusal(layout: DrafterLayout, edit: Edit) -> str:
    with pytest.raises(ConfigError) as caught:
        read(layout, edit)
    return str(caught.value)


# Name: layout, change of the configuration, message behind the file's name.
CONFIGS: dict[str, tuple[DrafterLayout, Edit, str]] = {
    "unknown head": (
        "deepspec",
        put(markov_head_type="gru"),
        "markov_head_type = 'gru' is not supported, only 'vanilla', 'gated', 'rnn'",
    ),
    "head of other tensors": (
        "embedded",
        put(dspark_markov_head_type="vanilla"),
        "markov_head_type is 'vanilla', but tensor markov_head.joint_proj.weight belongs to the "
        "head 'rnn'",
    ),
    "rank zero": (
        "specforge",
        put_in("dflash_config", markov_rank=0),
        "dflash_config.markov_rank must be an integer from 1 to 2147483647, got 0",
    ),
    "no rank": (
        "embedded",
        drop("dspark_markov_rank"),
        "dspark_markov_rank is missing and has no default; it is the width of the Markov tables",
    ),
    "no block size": (
        "embedded",
        drop("dspark_block_size"),
        "dspark_block_size is missing and has no default; it is the number of rows of a block",
    ),
    "block size true": (
        "deepspec",
        put(block_size=True),
        "block_size must be an integer from 1 to 2147483647, got True",
    ),
    "block of the anchor alone": (
        "speculators",
        put(sample_from_anchor=False, block_size=1),
        "block_size must be an integer from 2 to 2147483647, got 1",
    ),
    "no mask token": (
        "deepspec",
        drop("mask_token_id"),
        "mask_token_id is missing and has no default; rows without a token have its embedding",
    ),
    "mask token behind the embedding": (
        "embedded",
        put(dspark_noise_token_id=512),
        "dspark_noise_token_id = 512 is no row of the target's embedding, which has 512",
    ),
    "negative mask token": (
        "deepspec",
        put(mask_token_id=-1),
        "mask_token_id must be an integer from 0 to 2147483647, got -1",
    ),
    "no taps": (
        "deepspec",
        drop("target_layer_ids"),
        "target_layer_ids is missing and has no default; it names the features of a token",
    ),
    "taps of another convention": (
        "speculators",
        both(drop("aux_hidden_state_layer_ids"), put(target_layer_ids=[1, 6, 13])),
        "aux_hidden_state_layer_ids is missing and has no default; target_layer_ids does not say "
        "in this layout which side is meant",
    ),
    "taps that contradict": (
        "speculators",
        put(target_layer_ids=[2, 7, 14]),
        "target_layer_ids = [2, 7, 14] (outputs of layers) and aux_hidden_state_layer_ids = "
        "[2, 7, 14] (inputs of layers) name different features",
    ),
    "tap behind the last layer": (
        "deepspec",
        put(target_layer_ids=[1, 6, 14]),
        "target_layer_ids names the output of layer 14, the target has 14 layers",
    ),
    "taps that descend": (
        "embedded",
        put(dspark_target_layer_ids=[6, 1, 13]),
        "dspark_target_layer_ids must ascend, it names the outputs of layers [6, 1, 13]",
    ),
    "a tap twice": (
        "speculators",
        put(aux_hidden_state_layer_ids=[2, 7, 7]),
        "aux_hidden_state_layer_ids must ascend, it names the outputs of layers [1, 6, 6]",
    ),
    "tap of the embedding": (
        "speculators",
        put(aux_hidden_state_layer_ids=[0, 7, 14]),
        "aux_hidden_state_layer_ids: the embedding cannot be tapped, only outputs of layers",
    ),
    "taps that are words": (
        "deepspec",
        put(target_layer_ids="1,6,13"),
        "target_layer_ids must be a list of layers, got '1,6,13'",
    ),
    "another hidden size": (
        "deepspec",
        put(hidden_size=64),
        "the drafter was made for another model than this target: hidden_size is 64, not 60",
    ),
    "another model altogether": (
        "specforge",
        put(hidden_size=6144, vocab_size=201024, num_target_layers=66),
        "the drafter was made for another model than this target: hidden_size is 6,144, not 60, "
        "vocab_size is 201,024, not 512, num_target_layers is 66, not 14",
    ),
    "features of another size": (
        "speculators",
        put(target_hidden_size=64),
        "the drafter was made for another model than this target: target_hidden_size is 64, not 60",
    ),
    "layers of another number": (
        "deepspec",
        put(num_hidden_layers=4),
        "num_hidden_layers = 4, but there are tensors of 3",
    ),
    "too few layer types": (
        "deepspec",
        put(layer_types=["full_attention"]),
        "layer_types must list 3 layers, got ['full_attention']",
    ),
    "a layer type": (
        "deepspec",
        put(layer_types=["full_attention", "linear_attention", "full_attention"]),
        "layer_types: layer type 'linear_attention' is not supported, only 'full_attention' and "
        "'sliding_attention'",
    ),
    "sliding layers without a window": (
        "embedded",
        drop("dspark_sliding_window"),
        "dspark_swa_window_size is missing and has no default; sliding layers have a window",
    ),
    "sliding layers that are not named": (
        "deepspec",
        both(drop("layer_types"), put(use_sliding_window=True)),
        "layer_types is missing and has no default; use_sliding_window does not say which layers",
    ),
    "a window and no sliding layer": (
        "specforge",
        both(put(layer_types=["full_attention"] * 3), put_in("dflash_config", use_swa=True)),
        "use_swa is true, but layer_types has no 'sliding_attention'",
    ),
    "causality as a word": (
        "deepspec",
        put(is_causal="no"),
        "is_causal must be true or false, got 'no'",
    ),
    "anchors that contradict": (
        "speculators",
        put(dspark_bonus_anchor=True),
        "sample_from_anchor = True and dspark_bonus_anchor = True contradict each other; one means "
        "the opposite of the other",
    ),
    "no rotation": (
        "embedded",
        drop("dspark_rope_theta"),
        "dspark_rope_theta is missing and has no default; it is the base of the rotation",
    ),
    "no epsilon": (
        "embedded",
        drop("dspark_rms_norm_eps"),
        "dspark_rms_norm_eps is missing and has no default; norms depend on it",
    ),
    "a base beyond all numbers": (
        "deepspec",
        put(rope_theta=10**400),
        f"rope_theta must be a positive number, got {10**400}",
    ),
    "scaled positions": (
        "specforge",
        put(rope_scaling={"rope_type": "yarn", "factor": 16.0}),
        "rope_scaling = {'rope_type': 'yarn', 'factor': 16.0} is not supported, only rope_type "
        "'default' over whole heads",
    ),
    "rotations that contradict": (
        "deepspec",
        put(rope_parameters={"rope_theta": 1.0}),
        "rope_theta = 5000.0 and rope_parameters.rope_theta = 1.0 contradict each other",
    ),
    "odd heads": (
        "deepspec",
        put(head_dim=9),
        "head_dim = 9 must be even and num_attention_heads = 6 a multiple of "
        "num_key_value_heads = 2",
    ),
    "heads that do not group": (
        "deepspec",
        put(num_key_value_heads=4),
        "head_dim = 10 must be even and num_attention_heads = 6 a multiple of "
        "num_key_value_heads = 4",
    ),
    "biases": (
        "deepspec",
        put(attention_bias=True),
        "attention_bias = True is not supported for DSpark drafters, only False",
    ),
    "another projector": (
        "specforge",
        put_in("dflash_config", projector_type="domino"),
        "dflash_config.projector_type = 'domino' is not supported for DSpark drafters, only "
        "'dspark'",
    ),
    "another cap": (
        "deepspec",
        put(final_logit_softcapping=50.0),
        "final_logit_softcapping = 50.0, the target's is 30.0",
    ),
    "another place of the cap": (
        "embedded",
        put(dspark_softcap_place="twice"),
        "dspark_softcap_place = 'twice' is not supported, only 'none', 'before_bias', 'after_bias'",
    ),
    "trimmed without a table": (
        "speculators",
        put(draft_vocab_size=300),
        "draft_vocab_size = 300 of 512 tokens, but there is no tensor d2t that says which",
    ),
    "more drafted tokens than there are": (
        "speculators",
        put(draft_vocab_size=513),
        "draft_vocab_size = 513 exceeds the target's vocab_size 512",
    ),
    "sinks that are not there": (
        "deepspec",
        put(attention_sink_bias=True),
        "attention_sink_bias is true, but 0 of 3 layers have sinks; all must have them or none",
    ),
    "sinks in some layers": (
        "deepspec",
        put(add_swa_attention_sink_bias=True),
        "add_swa_attention_sink_bias with layers of both types is not supported; all layers must "
        "have sinks or none",
    ),
    "DFlash": (
        "speculators",
        put(speculators_model_type="dflash"),
        f"speculators_model_type 'dflash' is not supported; {SUPPORTED}",
    ),
    "no backbone": (
        "speculators",
        put(transformer_layer_config=None),
        "transformer_layer_config must be an object, got None",
    ),
    "Gemma4": (
        "deepspec",
        put(architectures=["Gemma4DSparkModel"], model_type="gemma4_text"),
        "the drafter is of the Gemma4 flavour (model_type 'gemma4_text', architectures "
        f"'Gemma4DSparkModel'), which is not supported; {SUPPORTED}",
    ),
    "Kimi-K3": (
        "specforge",
        put(model_type="k3_dspark"),
        "the drafter is of the Kimi-K3 flavour (model_type 'k3_dspark'), which is not supported; "
        f"{SUPPORTED}",
    ),
    "MiniMax": (
        "embedded",
        put(dspark_ffn_hidden_size=3072),
        "the drafter is of the MiniMax flavour (key dspark_ffn_hidden_size), which is not "
        f"supported; {SUPPORTED}",
    ),
    "Muse": (
        "speculators",
        put_in("transformer_layer_config", model_type="muse"),
        "the drafter is of the Muse flavour (transformer_layer_config.model_type 'muse'), which is "
        f"not supported; {SUPPORTED}",
    ),
    "DeepSeek-V4": (
        "embedded",
        put(n_mtp_layers=3),
        "the drafter is of the DeepSeek-V4 flavour (key n_mtp_layers), which is not supported; "
        f"{SUPPORTED}",
    ),
    "another family": (
        "deepspec",
        put(model_type="llama"),
        "model_type = 'llama' is not supported for DSpark drafters, only 'qwen3'",
    ),
    "another family inside": (
        "speculators",
        put_in("transformer_layer_config", model_type="mistral"),
        "transformer_layer_config.model_type = 'mistral' is not supported, only 'qwen3' or 'llama'",
    ),
    "quantized weights": (
        "deepspec",
        put(quantization_config={"quant_method": "fp8"}),
        "quantization_config = {'quant_method': 'fp8'} is not supported for DSpark drafters; its "
        "absence is",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    layout, edit, message = CONFIGS[name]
    assert refusal(layout, edit) == f"FOLDER/config.json: {message}"


def test_a_config_of_no_drafter() -> None:
    edit = put(architectures=["Qwen3ForCausalLM"])
    assert refusal("deepspec", edit) == (
        "FOLDER/config.json describes no drafter that is known: architectures "
        f"['Qwen3ForCausalLM'], model_type 'qwen3'; {SUPPORTED}"
    )
