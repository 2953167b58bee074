"""From a drafter's raw configuration and the headers of its tensors to a `DSparkConfig`.

Four layouts are read (`flavours.Layout`). They differ in where settings stand, in what absent ones
mean and in how taps are counted. No setting is guessed: an absent one takes the default that the
layout documents, or follows from the tensors, and either is reported; or it is an error.
docs/speculative.md has the table of keys and defaults. Source: dspark.md sections 2 to 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from inkrt.engines.dspark.attention_settings import read_layers, read_rope_theta, read_sinks
from inkrt.engines.dspark.config import DSparkConfig, TapPoint
from inkrt.engines.dspark.flavours import BUNDLED_KEYS, Layout, find_layout, refuse_others
from inkrt.engines.dspark.head_settings import (
    read_confidence,
    read_draft_vocabulary,
    read_head,
    read_softcap_place,
)
from inkrt.engines.dspark.reading import SHAPES, Reading
from inkrt.engines.dspark.settings import Default, Place, Settings
from inkrt.engines.dspark.weights import (
    CONFIDENCE_BIAS,
    EMBEDDING,
    FIRST_TABLE,
    UNEMBED,
    DraftTensors,
)
from inkrt.engines.interface import DraftTarget
from inkrt.errors import ConfigError

_ENTERING = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_SIZES_OF = ("qwen3", "llama")
# Objects in which a folder's config.json has settings, by precedence.
_NESTED = {
    "deepspec": (),
    "specforge": ("dspark_config", "dflash_config", "text_config"),
    "speculators": ("transformer_layer_config",),
}


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """A drafter as its checkpoint describes it.

    Attributes:
        config: an own embedding or projection is one that the checkpoint has, equal or not.
        layout: of the checkpoint.
        decisions: what was decided without the configuration saying so, one line each.
    """

    config: DSparkConfig
    layout: Layout
    decisions: tuple[str, ...]


def bundled_places(config: Mapping[str, Any]) -> list[Place]:
    """Where a target's config.json has settings of a drafter, by precedence; empty without one."""
    outer = [Place(config, "", "dspark_")]
    if isinstance(text := config.get("text_config"), Mapping):
        outer.append(Place(text, "text_config.", "dspark_"))
    inner = [
        Place(own, f"{place.path}dspark_config.")
        for place in outer
        if (own := place.values.get("dspark_config")) is not None
    ]
    keys = (place.values.get(key) for place in outer for key in BUNDLED_KEYS)
    has_drafter = bool(inner) or any(value is not None for value in keys)
    return [*outer, *inner] if has_drafter else []


def read_bundled(
    config: Mapping[str, Any], tensors: DraftTensors | None, target: DraftTarget, where: str
) -> DraftLayout:
    """Read a drafter whose settings are in the target's config.json: see `bundled_places`.

    Args:
        config: the target's.
        tensors: of the drafter; None if there are no weights.
        target: what it has to fit.
        where: the file, for messages.

    Raises:
        ConfigError: a setting is missing, invalid or not supported, or contradicts the tensors.
    """
    places = bundled_places(config)
    for place in places:
        values: Any = place.values  # as it stands in the file
        if not isinstance(values, Mapping):
            name = place.path.removesuffix(".")
            raise ConfigError(f"{where}: {name} must be an object, got {values!r}")
        refuse_others(place.values, {}, tensors.shapes if tensors else (), where)
    return _read(Settings(where, places, places[0]), "embedded", tensors, target)


def read_folder(
    config: Mapping[str, Any], tensors: DraftTensors | None, target: DraftTarget, where: str
) -> DraftLayout:
    """Read a drafter that has a checkpoint folder of its own; see `read_bundled`.

    Raises:
        ConfigError: as there, or the layout is unknown.
    """
    layout = find_layout(config, tensors.shapes if tensors else (), where)
    top = Place(config)
    nested = [
        Place(values, f"{key}.")
        for key in _NESTED[layout]
        if isinstance(values := config.get(key), Mapping)
    ]
    if layout == "speculators":
        if not nested:
            raise ConfigError(
                f"{where}: transformer_layer_config must be an object, "
                f"got {config.get('transformer_layer_config')!r}"
            )
        places = [top, *nested]
    else:
        places = [Place(config, "", "dspark_"), *nested, top]
    return _read(Settings(where, places, top), layout, tensors, target)


def _read(
    settings: Settings, layout: Layout, tensors: DraftTensors | None, target: DraftTarget
) -> DraftLayout:
    of = Reading(settings, layout, tensors or DraftTensors({}, {}), tensors is not None, target)
    get = of.get
    _require_known(of)
    _require_same_model(of)
    layers = read_layers(of)
    size = of.size("head_dim", of.rows("layers.0.self_attn.q_norm.weight", 1))
    heads, kv_heads = (
        of.size(key, of.rows(f"layers.0.self_attn.{x}_proj.weight", size))
        for key, x in (("num_attention_heads", "q"), ("num_key_value_heads", "k"))
    )
    if size % 2 or heads % kv_heads:
        raise get.error(
            f"head_dim = {size} must be even and num_attention_heads = {heads} a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    anchor_first = _anchor_first(of)
    draft_vocab_size, is_trimmed = read_draft_vocabulary(of)
    has_confidence, reads_markov = read_confidence(of)
    own = of.tensors.shapes
    config = DSparkConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        intermediate_size=of.size("intermediate_size", of.rows("layers.0.mlp.gate_proj.weight", 1)),
        rms_norm_eps=get.number(
            "rms_norm_eps", needed="norms depend on it", default=of.qwen3(1e-6)
        ),
        rope_theta=read_rope_theta(of),
        max_position_embeddings=get.integer(
            "max_position_embeddings",
            default=Default(target.max_position_embeddings, "as many as the target's")
            if of.is_embedded
            else of.qwen3(32768),
        ),
        block_size=_block_size(of, anchor_first=anchor_first),
        anchor_first=anchor_first,
        mask_token_id=_mask_token_id(of),
        taps=_taps(of),
        tap_point=_tap_point(of),
        head=read_head(of),
        markov_rank=get.integer("markov_rank", needed="it is the width of the Markov tables"),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        is_trimmed=is_trimmed,
        has_confidence=has_confidence,
        confidence_reads_markov=reads_markov,
        confidence_has_bias=has_confidence and (CONFIDENCE_BIAS in own if of.has_tensors else True),
        has_own_embedding=EMBEDDING in own,
        has_own_unembed=UNEMBED in own,
        applies_embed_norm=_applies_embed_norm(of),
        softcap_place=read_softcap_place(of),
        logits_divisor=get.number("logits_mup_width_multiplier", default=Default(1.0)),
        has_sinks=read_sinks(of, layers),
    )
    _report_unknown_keys(of)
    return DraftLayout(config, of.layout, tuple(get.decisions))


def _require_known(of: Reading) -> None:
    """Refuse what Qwen3-flavoured drafters could have and ours have not."""
    get = of.get
    for key, allowed in (
        ("hidden_act", ("silu",)),
        ("attention_bias", (False,)),
        ("mlp_bias", (False,)),
        ("tie_word_embeddings", (False,)),
        ("partial_rotary_factor", (1.0,)),
        ("is_neox_style", (True,)),
        ("attention_value_scale", (1.0,)),
        ("attention_mode", ("gqa",)),
        ("projector_type", ("dspark",)),
        ("use_aux_hidden_state", (True,)),
        ("pure_draft_prefix_len", (0,)),
        ("quantization_config", ()),
    ):
        get.require(key, *allowed)
    if of.layout == "speculators":
        # Its layers are Qwen3's whichever family the sizes are written in.
        config = get.find("transformer_layer_config")
        if config is not None and config.value.get("model_type", "qwen3") not in _SIZES_OF:
            raise get.error(
                f"transformer_layer_config.model_type = {config.value['model_type']!r} is not "
                f"supported, only {' or '.join(map(repr, _SIZES_OF))}"
            )
    elif not of.is_embedded:
        get.require("model_type", "qwen3")
    for name in sorted(of.tensors.shapes):
        if name.startswith("mask_embedding"):
            raise get.error(
                f"tensor {name} is a mask embedding of its own, which is not supported; rows "
                f"without a token must have the embedding of mask_token_id"
            )
        if name.startswith("layers.") and name.endswith("_proj.bias"):
            raise get.error(f"tensor {name} is not supported; projections must have no bias")


def _require_same_model(of: Reading) -> None:
    """Refuse a drafter that was made for another model."""
    get, target = of.get, of.target
    table = of.tensors.shapes.get(FIRST_TABLE)
    rows = Default(table[0], SHAPES) if table else None
    same = None if not of.is_embedded else Default(target.hidden_size)
    sizes = (
        (
            "hidden_size",
            get.integer("hidden_size", needed="it must be the target's", default=same),
            target.hidden_size,
        ),
        (
            "target_hidden_size",
            get.integer("target_hidden_size", default=Default(target.hidden_size)),
            target.hidden_size,
        ),
        (
            "vocab_size",
            get.integer(
                "vocab_size",
                needed="it must be the target's",
                default=Default(target.vocab_size) if of.is_embedded else rows,
            ),
            target.vocab_size,
        ),
        (
            "num_target_layers",
            get.integer("num_target_layers", default=Default(target.num_hidden_layers)),
            target.num_hidden_layers,
        ),
    )
    wrong = [f"{key} is {own:,}, not {its:,}" for key, own, its in sizes if own != its]
    if wrong:
        raise get.error(
            f"the drafter was made for another model than this target: {', '.join(wrong)}"
        )


def _anchor_first(of: Reading) -> bool:
    get = of.get
    found = get.find("sample_from_anchor")
    bonus = get.find("bonus_anchor", "dspark_bonus_anchor")
    if found and bonus and get.as_boolean(found) == get.as_boolean(bonus):
        raise get.error(
            f"{found.spelling} = {found.value!r} and {bonus.spelling} = {bonus.value!r} "
            f"contradict each other; one means the opposite of the other"
        )
    if found:
        is_first = get.as_boolean(found)
    elif bonus:
        is_first = not get.as_boolean(bonus)
    else:
        reason = {
            "embedded": "as in DeepSeek's bundled drafters",
            "deepspec": "DeepSpec's only block",
            "specforge": "SGLang's default",
            "speculators": "vLLM's default for files without it; an acceptance near 0 would "
            "mean the other",
        }[of.layout]
        default = Default(of.layout != "speculators", reason)
        is_first = bool(get.decide("sample_from_anchor", default))
    get.require("shift_label", is_first)
    return is_first


def _block_size(of: Reading, *, anchor_first: bool) -> int:
    """Drafted tokens; the anchor's row, which then drafts nothing, is counted in the key."""
    needed = "it is the number of rows of a block"
    if anchor_first:
        return of.get.integer("block_size", needed=needed)
    rows = of.get.integer("block_size", needed=needed, minimum=2)
    of.get.decisions.append(
        f"block_size = {rows} counts the anchor's row, which drafts nothing: {rows - 1} drafts"
    )
    return rows - 1


def _mask_token_id(of: Reading) -> int:
    get = of.get
    keys: tuple[str, ...] = ("mask_token_id", "noise_token_id", "pard_token", "ptd_token_id")
    if of.is_embedded:
        keys = ("noise_token_id", "mask_token_id")
    token = get.integer(*keys, needed="rows without a token have its embedding", minimum=0)
    if token >= of.target.vocab_size:
        found = get.find(*keys)
        assert found is not None
        raise get.error(
            f"{found.spelling} = {token} is no row of the target's embedding, which has "
            f"{of.target.vocab_size}"
        )
    return token


def _taps(of: Reading) -> tuple[int, ...]:
    """Layers whose outputs are tapped, whichever way the layout counts them."""
    get, number = of.get, of.target.num_hidden_layers
    leaving = get.integers("target_layer_ids")
    entering = get.integers(*_ENTERING)
    if of.layout == "speculators" and entering is None:
        raise get.missing(
            _ENTERING[0], "target_layer_ids does not say in this layout which side is meant"
        )
    if entering is not None:
        taps = tuple(layer - 1 for layer in entering[0])
        if leaving is not None and leaving[0] != taps:
            raise get.error(
                f"{leaving[1]} = {list(leaving[0])} (outputs of layers) and {entering[1]} = "
                f"{list(entering[0])} (inputs of layers) name different features"
            )
        spelling, side = entering[1], "inputs of layers"
    elif leaving is not None:
        (taps, spelling), side = leaving, "outputs of layers"
    else:
        raise get.missing("target_layer_ids", "it names the features of a token")
    if taps[0] < 0:
        raise get.error(f"{spelling}: the embedding cannot be tapped, only outputs of layers")
    if any(a >= b for a, b in pairwise(taps)):
        raise get.error(f"{spelling} must ascend, it names the outputs of layers {list(taps)}")
    is_final = entering is None and of.target.has_final_tap and taps[-1] == number
    if taps[-1] >= number and not is_final:
        raise get.error(
            f"{spelling} names the output of layer {taps[-1]}, the target has {number} layers"
        )
    if is_final:
        get.decisions.append(
            f"{spelling} names {number}, as many as the target has: the state that its vocabulary "
            f"projection reads"
        )
    get.decisions.append(
        f"{spelling} counts {side}: taps are the outputs of {', '.join(map(str, taps))}"
    )
    return taps


def _tap_point(of: Reading) -> TapPoint:
    if not of.target.has_mlp_conv:
        of.get.require("tap_point", "layer_output")
        return "layer_output"
    default = Default("layer_output", "the true output, behind the layer's last convolution")
    if of.layout == "specforge":
        default = Default("pre_mlp_conv", "SGLang, with which SpecForge trains, taps there")
    allowed = ("layer_output", "pre_mlp_conv")
    return cast("TapPoint", of.get.choice("tap_point", allowed=allowed, default=default))


def _applies_embed_norm(of: Reading) -> bool:
    if not of.target.has_embed_norm:
        of.get.require("applies_embed_norm", False)
        return False
    reason = "drafters read raw rows of the embedding, without the target's norm"
    return of.get.boolean("applies_embed_norm", default=Default(False, reason))


def _report_unknown_keys(of: Reading) -> None:
    get = of.get
    # Of training; and the object itself, whose prefix is the settings'.
    get.skip("num_anchors", "confidence_head_alpha", "config")
    paths = [("dspark_config.", ""), ("dflash_config.", "")]
    if of.is_embedded:
        paths += [("", "dspark_"), ("text_config.", "dspark_"), ("text_config.dspark_config.", "")]
    for path, prefix in paths:
        for key in get.unasked(path, prefix):
            get.decisions.append(f"key {key} is unknown and not used")
