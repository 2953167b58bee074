"""One drafter in every layout comes to one configuration; what is absent is decided and told."""

import dataclasses

import pytest
from drafter_layouts import EXPECTED, TARGET, Edit, both, drop, put, put_in, read

from inkrt.engines.dspark.config import DraftLayerConfig
from inkrt.engines.tiny.drafter import DRAFTER_LAYOUTS, HEAD_KINDS, DrafterLayout, HeadKind

FULL = DraftLayerConfig(is_causal=False, window=None)


@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("head", HEAD_KINDS)
@pytest.mark.parametrize("layout", DRAFTER_LAYOUTS)
def test_layouts_come_to_the_same(layout: DrafterLayout, head: HeadKind, is_trimmed: bool) -> None:
    found = read(layout, head=head, is_trimmed=is_trimmed)
    assert found.layout == layout
    has_copies = layout == "deepspec"
    assert found.config == dataclasses.replace(
        EXPECTED,
        head=head,
        is_trimmed=is_trimmed,
        draft_vocab_size=327 if is_trimmed else 512,  # 490 tokens less every third
        has_own_embedding=has_copies,
        has_own_unembed=has_copies and not is_trimmed,
    )


@pytest.mark.parametrize("layout", DRAFTER_LAYOUTS)
def test_a_configuration_without_weights_is_enough(layout: DrafterLayout) -> None:
    assert read(layout, has_tensors=False).config == EXPECTED
    trimmed = read(layout, has_tensors=False, is_trimmed=True).config
    assert (trimmed.is_trimmed, trimmed.draft_vocab_size) == (True, 327)


CAUSAL = (
    "is_causal is absent: false, rows of full layers see their whole block",
    "is_causal is absent: true, rows of sliding layers see their block up to themselves",
)
CAP = 'softcap_place is absent: "before_bias", {}final_logit_softcapping is the target\'s'


def test_every_decision_of_a_complete_configuration_is_told() -> None:
    taps = "counts {}puts of layers: taps are the outputs of 1, 6, 13"
    assert read("embedded").decisions == (
        *(f"dspark_{line}" for line in CAUSAL),
        f"dspark_target_layer_ids {taps.format('out')}",
    )
    assert read("deepspec").decisions == (
        *CAUSAL,
        "sample_from_anchor is absent: true, DeepSpec's only block",
        f"target_layer_ids {taps.format('out')}",
        CAP.format(""),
    )
    assert read("specforge").decisions == (
        *CAUSAL,
        "sample_from_anchor is absent: true, SGLang's default",
        f"dflash_config.target_layer_ids {taps.format('out')}",
        CAP.format(""),
    )
    assert read("speculators").decisions == (
        *CAUSAL,
        f"aux_hidden_state_layer_ids {taps.format('in')}",
        CAP.format("transformer_layer_config."),
    )


Case = tuple[DrafterLayout, Edit, str, dict[str, object]]
DEFAULTS: dict[str, Case] = {
    "anchor, embedded": (
        "embedded",
        drop("dspark_sample_from_anchor"),
        "dspark_sample_from_anchor is absent: true, as in DeepSeek's bundled drafters",
        {"anchor_first": True},
    ),
    "anchor, speculators": (
        "speculators",
        drop("sample_from_anchor"),
        "sample_from_anchor is absent: false, vLLM's default for files without it; an acceptance "
        "near 0 would mean the other",
        {"anchor_first": False, "block_size": 6},
    ),
    "fill-in block": (
        "speculators",
        put(sample_from_anchor=False),
        "block_size = 7 counts the anchor's row, which drafts nothing: 6 drafts",
        {"anchor_first": False, "block_size": 6},
    ),
    "soft-cap, embedded": (
        "embedded",
        drop("dspark_softcap_place"),
        'dspark_softcap_place is absent: "before_bias", as in Gemma4\'s drafters; no layout '
        "documents it",
        {"softcap_place": "before_bias"},
    ),
    "soft-cap, folder": (
        "deepspec",
        drop("final_logit_softcapping"),
        'softcap_place is absent: "none", the layout\'s reference caps nothing',
        {"softcap_place": "none"},
    ),
    "embedding norm": (
        "specforge",
        drop("dflash_config.applies_embed_norm"),
        "applies_embed_norm is absent: false, drafters read raw rows of the embedding, without the "
        "target's norm",
        {"applies_embed_norm": False},
    ),
    "tap point, specforge": (
        "specforge",
        drop("dflash_config.tap_point"),
        'tap_point is absent: "pre_mlp_conv", SGLang, with which SpecForge trains, taps there',
        {"tap_point": "pre_mlp_conv"},
    ),
    "tap point, embedded": (
        "embedded",
        drop("dspark_tap_point"),
        'dspark_tap_point is absent: "layer_output", the true output, behind the layer\'s last '
        "convolution",
        {"tap_point": "layer_output"},
    ),
    "norm's epsilon": (
        "deepspec",
        drop("rms_norm_eps"),
        "rms_norm_eps is absent: 1e-06, the default of qwen3 configurations",
        {"rms_norm_eps": 1e-6},
    ),
    "rotation": (
        "speculators",
        drop("transformer_layer_config.rope_theta"),
        "rope_theta is absent: 10000.0, the default of qwen3 configurations",
        {"rope_theta": 10000.0},
    ),
    "positions": (
        "deepspec",
        drop("max_position_embeddings"),
        "max_position_embeddings is absent: 32768, the default of qwen3 configurations",
        {"max_position_embeddings": 32768},
    ),
    "positions, embedded": (
        "embedded",
        drop("dspark_max_position_embeddings"),
        "dspark_max_position_embeddings is absent: 4096, as many as the target's",
        {},
    ),
    "number of layers": (
        "embedded",
        drop("dspark_num_hidden_layers"),
        "dspark_num_hidden_layers is absent: 3, as many as there are tensors of",
        {},
    ),
    "heads": (
        "embedded",
        drop("dspark_num_attention_heads"),
        "dspark_num_attention_heads is absent: 6, from the tensors' shapes",
        {},
    ),
    "width": (
        "embedded",
        drop("dspark_intermediate_size"),
        "dspark_intermediate_size is absent: 44, from the tensors' shapes",
        {},
    ),
    "head size": (
        "specforge",
        drop("head_dim"),
        "head_dim is absent: 10, from the tensors' shapes",
        {},
    ),
    "layer types": (
        "deepspec",
        drop("layer_types"),
        'layer_types is absent: "full_attention", in all layers, as use_swa is false',
        {"layers": (FULL,) * 3},
    ),
    "head": (
        "embedded",
        drop("dspark_markov_head_type"),
        'dspark_markov_head_type is absent: "rnn", there is markov_head.joint_proj.weight',
        {},
    ),
    "confidence": (
        "specforge",
        drop("dflash_config.enable_confidence_head"),
        "enable_confidence_head is absent: true, there is a tensor confidence_head.proj.weight",
        {},
    ),
    "confidence's inputs": (
        "speculators",
        drop("confidence_head_with_markov"),
        "confidence_head_with_markov is absent: true, from the tensors' shapes",
        {},
    ),
    "confidence is off": (
        "deepspec",
        put(enable_confidence_head=False),
        "confidence_head.proj.weight is left out: enable_confidence_head is false",
        {
            "has_confidence": False,
            "confidence_reads_markov": False,
            "confidence_has_bias": False,
        },
    ),
    "an unknown key": (
        "embedded",
        put(dspark_temperature_table=[1.0]),
        "key dspark_temperature_table is unknown and not used",
        {},
    ),
    "an unknown nested key": (
        "specforge",
        put_in("dflash_config", temperature_table=[1.0]),
        "key dflash_config.temperature_table is unknown and not used",
        {},
    ),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_absent_is_decided_and_told(name: str) -> None:
    layout, edit, line, changes = DEFAULTS[name]
    before, found = read(layout), read(layout, edit)
    assert line in found.decisions
    assert line not in before.decisions
    assert found.config == dataclasses.replace(before.config, **changes)  # type: ignore[arg-type]


PLACES = ("", "text_config", "dflash_config", "dspark_config", "dspark_")


@pytest.mark.parametrize("first", range(len(PLACES)))
def test_precedence_of_places(first: int) -> None:
    """The last place of the list that has a key wins over all before it, which are told."""

    def edit(config: dict[str, object]) -> None:
        del config["dflash_config"]["target_layer_ids"]  # type: ignore[attr-defined]
        config["text_config"], config["dspark_config"] = {}, {}
        for number, place in enumerate(PLACES[: first + 1]):
            values = config[place] if place.endswith("_config") else config
            key = f"{'dspark_' if place == 'dspark_' else ''}target_layer_ids"
            values[key] = [1, 6, 7 + number]  # type: ignore[index]

    found = read("specforge", edit)
    assert found.config.taps == (1, 6, 7 + first)
    overridden = [line for line in found.decisions if " overrides " in line]
    assert len(overridden) == first
    if first == 4:
        assert overridden[0] == (
            "dspark_target_layer_ids = [1, 6, 11] overrides "
            "dspark_config.target_layer_ids = [1, 6, 10]"
        )


TAPS: dict[str, tuple[DrafterLayout, Edit]] = {
    "entering": ("speculators", put(aux_hidden_state_layer_ids=[1, 3, 14])),
    "eagle's spelling": (
        "speculators",
        both(drop("aux_hidden_state_layer_ids"), put(eagle_aux_hidden_state_layer_ids=[1, 3, 14])),
    ),
    "both, which agree": (
        "speculators",
        put(aux_hidden_state_layer_ids=[1, 3, 14], target_layer_ids=[0, 2, 13]),
    ),
    "leaving": ("deepspec", put(target_layer_ids=[0, 2, 13])),
    "nested": ("specforge", put_in("dflash_config", target_layer_ids=[0, 2, 13])),
    "bundled": ("embedded", put(dspark_target_layer_ids=[0, 2, 13])),
}


@pytest.mark.parametrize("name", TAPS)
def test_taps_are_outputs_of_layers(name: str) -> None:
    layout, edit = TAPS[name]
    assert read(layout, edit).config.taps == (0, 2, 13)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (put(), ((False, None), (True, 19), (False, None))),
        (put(is_causal=True), ((True, None), (True, 19), (True, None))),
        (put(is_causal=False), ((False, None), (False, 19), (False, None))),
        (put_in("dflash_config", causal=True), ((True, None), (True, 19), (True, None))),
        (
            both(put(is_causal=False), put_in("dflash_config", causal=True)),
            ((False, None), (False, 19), (False, None)),
        ),
        (put(sliding_window_non_causal=True), ((False, None), (False, 19), (False, None))),
        (
            both(drop("layer_types"), put_in("dflash_config", use_swa=True, swa_window_size=8)),
            ((True, 8),) * 3,
        ),
        (put_in("dflash_config", swa_window_size=8), ((False, None), (True, 8), (False, None))),
    ],
)
def test_causality_and_windows(edit: Edit, expected: tuple[tuple[bool, int | None], ...]) -> None:
    layers = read("specforge", edit).config.layers
    assert tuple((layer.is_causal, layer.window) for layer in layers) == expected


@pytest.mark.parametrize(
    ("edit", "anchor_first", "block_size"),
    [
        (put(sample_from_anchor=True), True, 7),
        (put(sample_from_anchor=False, dspark_bonus_anchor=True), False, 6),
        (both(drop("sample_from_anchor"), put(dspark_bonus_anchor=False)), True, 7),
        (both(drop("sample_from_anchor"), put(dspark_bonus_anchor=True)), False, 6),
    ],
)
def test_blocks(edit: Edit, anchor_first: bool, block_size: int) -> None:
    config = read("speculators", edit).config
    assert (config.anchor_first, config.block_size) == (anchor_first, block_size)
    assert config.num_rows == 7


def test_settings_may_stand_elsewhere() -> None:
    """Spellings that other checkpoints have; each changes one number."""
    for layout, edit, changes in (
        ("embedded", both(drop("dspark_rope_theta"), put_in("dspark_config", rope_theta=7.0)), 7.0),
        (
            "embedded",
            both(drop("dspark_rope_theta"), put_in("text_config", dspark_rope_theta=8.0)),
            8.0,
        ),
        ("deepspec", both(drop("rope_theta"), put(rope_parameters={"rope_theta": 9.0})), 9.0),
    ):
        assert read(layout, edit).config.rope_theta == changes  # type: ignore[arg-type]
    keys = {"noise_token_id": 3, "pard_token": 4, "ptd_token_id": 5}
    for key, token in keys.items():
        edit = both(drop("mask_token_id"), put(**{key: token}))
        assert read("deepspec", edit).config.mask_token_id == token
    cropped = read(
        "speculators",
        put(draft_vocab_size=490),
        lambda shapes: shapes.update({"model.markov_head.markov_w2.weight": (490, 14)}),
    ).config
    assert (cropped.draft_vocab_size, cropped.is_trimmed) == (490, False)
    assert read("deepspec", put(logits_mup_width_multiplier=24.0)).config.logits_divisor == 24.0


def test_a_confidence_head_may_lack_bias_and_markov_row() -> None:
    def edit(shapes: dict[str, object]) -> None:
        del shapes["confidence_head.proj.bias"]
        shapes["confidence_head.proj.weight"] = (1, 60)

    config = read("deepspec", drop("confidence_head_with_markov"), edit).config
    assert config == dataclasses.replace(
        read("deepspec").config, confidence_reads_markov=False, confidence_has_bias=False
    )


def test_sinks_follow_the_tensors() -> None:
    def add(shapes: dict[str, object]) -> None:
        shapes |= {f"layers.{layer}.self_attn.attention_sink_bias": (6,) for layer in range(3)}

    found = read("deepspec", edit_shapes=add)
    assert found.config.has_sinks
    assert "attention_sink_bias is absent: true, there are tensors of sinks" in found.decisions
    assert read("deepspec", put(attention_sink_bias=True), add).config.has_sinks


def test_a_target_without_cap_norm_and_convolution_decides_less() -> None:
    plain = dataclasses.replace(TARGET, softcap=None, has_embed_norm=False, has_mlp_conv=False)
    edit = drop("dspark_softcap_place", "dspark_tap_point", "dspark_applies_embed_norm")
    found = read("embedded", edit, target=plain)
    assert found.config == dataclasses.replace(EXPECTED, softcap_place="none")
    assert len(found.decisions) == 3
