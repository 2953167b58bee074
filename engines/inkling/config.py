"""The configuration of Inkling text models and their MTP heads, read from config.json.

Two spellings are read, the publisher's and that of transformers. They differ in key names, and in
what `intermediate_size` means: the width of an expert where `dense_intermediate_size` stands beside
it, else that of a dense MLP. Each key is read once; values that this definition does not implement
are rejected by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inkrt.engines.inkling2.config import AttentionShape, read_shapes
from inkrt.engines.interface import DraftTarget, MtpConfig, Sharding
from inkrt.engines.quantization import (
    Quantization,
    WeightForm,
    dequantized,
    expert_forms,
    layer_of_experts,
    read_quantization,
    require_expert_blocks,
)
from inkrt.engines.reader import MOST_EXPERTS, MOST_LAYERS, ConfigReader
from inkrt.errors import ConfigError

FAMILY = "inkling"
# Spelling of transformers first, the publisher's second.
_ALIASES = {
    "sliding_window_size": "sliding_window",
    "n_routed_experts": "num_local_experts",
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    "logits_mup_width_multiplier": "embedding_multiplier",
}
# Parts that every published Inkling has.
_SWITCHES = (
    "shared_expert_sink",
    "use_gate_bias",
    "use_global_scale",
    "norm_after_topk",
    "use_embed_norm",
    "use_sconv",
)
_MTP_GEOMETRY = ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class InklingConfig:
    """Dimensions and constants of the text model; names follow transformers.

    Attributes:
        full: heads of layers with full attention.
        sliding: heads of layers with a window.
        is_sliding: of every layer.
        is_dense: of every layer, whether it has a dense MLP in place of experts.
        intermediate_size: width of dense MLPs.
        log_scaling_n_floor: None for no log scaling.
        mtp: all MTP heads that the checkpoint has; None for none.
        stored_experts: forms of every layer's routed experts in the checkpoint.
        experts: likewise, in the engine.
    """

    vocab_size: int
    unpadded_vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    full: AttentionShape
    sliding: AttentionShape
    is_sliding: tuple[bool, ...]
    is_dense: tuple[bool, ...]
    d_rel: int
    log_scaling_n_floor: int | None
    log_scaling_alpha: float
    max_position_embeddings: int
    rms_norm_eps: float
    conv_kernel_size: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    route_scale: float
    logits_mup_width_multiplier: float
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    mtp: MtpConfig | None
    stored_experts: tuple[WeightForm, ...]
    experts: tuple[WeightForm, ...]

    def attention(self, *, is_sliding: bool) -> AttentionShape:
        """Heads of a kind of layer."""
        return self.sliding if is_sliding else self.full

    def check_sharding(self, sharding: Sharding) -> None:
        """Raise ConfigError unless every dimension that ranks share divides by their number."""
        tp_size = sharding.tp_size
        sizes = {
            "num_attention_heads": self.full.num_heads,
            "num_key_value_heads": self.full.num_kv_heads,
            "swa_num_attention_heads": self.sliding.num_heads,
            "swa_num_key_value_heads": self.sliding.num_kv_heads,
            # Shared experts are split by width however the routed ones are.
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        if any(self.is_dense):
            sizes["dense_intermediate_size"] = self.intermediate_size
        if sharding.moe_split == "experts":
            sizes["n_routed_experts"] = self.n_routed_experts
        for name, size in sizes.items():
            if size % tp_size:
                raise ConfigError(
                    f"tp size {tp_size} does not divide {name} = {size} of this model; "
                    f"choose a tp size that does"
                )
        units = self.moe_intermediate_size // (1 if sharding.moe_split == "experts" else tp_size)
        require_expert_blocks(self.stored_experts, self.hidden_size, units, tp_size)


def dequantize_experts(config: InklingConfig) -> tuple[InklingConfig, bool]:
    """The same with the values of all quantized experts; whether some have global scales."""
    forms = dequantized(config.stored_experts)
    return replace(config, experts=forms), "scaled" in forms


def parse_config(values: Mapping[str, Any]) -> InklingConfig:
    """Read the text configuration from a whole `inkling_mm_model` config or a text one.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    is_whole = values.get("model_type") == "inkling_mm_model"
    text = values.get("text_config", values) if is_whole else values
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config must be an object, got {text!r}")
    read = ConfigReader(text, FAMILY, _ALIASES)
    for switch in _SWITCHES:
        read.require(switch, True)
    for key in ("q_bias", "o_bias", "tie_word_embeddings"):
        read.require(key, False)
    read.require("hidden_act", "silu")
    read.require("gate_activation", "sigmoid")
    read.require("final_logit_softcapping", None)
    ConfigReader(values, FAMILY).require("tie_word_embeddings", False)
    quantization = read_quantization(
        FAMILY, (values, text), ("nvfp4",), "experts, as ModelOpt writes them"
    )

    num_layers = read.integer("num_hidden_layers", 66, maximum=MOST_LAYERS)
    full, sliding = read_shapes(read, window=512, num_heads=64, num_sliding_kv_heads=16)
    dense_width, expert_width = _widths(read, text)
    vocab_size = read.integer("vocab_size", 201024)
    is_dense = _mlp_kinds(read, text, num_layers)
    stored_experts = _expert_forms(quantization, is_dense)
    config = InklingConfig(
        vocab_size=vocab_size,
        unpadded_vocab_size=_optional(read, "unpadded_vocab_size") or vocab_size,
        hidden_size=read.integer("hidden_size", 6144),
        num_hidden_layers=num_layers,
        full=full,
        sliding=sliding,
        is_sliding=_layer_kinds(text, num_layers),
        is_dense=is_dense,
        d_rel=read.integer("d_rel", 16),
        log_scaling_n_floor=_optional(read, "log_scaling_n_floor"),
        log_scaling_alpha=read.number("log_scaling_alpha", 0.1),
        max_position_embeddings=read.integer("max_position_embeddings", 131072),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        conv_kernel_size=read.integer("conv_kernel_size", 4, minimum=2),
        intermediate_size=dense_width,
        moe_intermediate_size=expert_width,
        n_routed_experts=read.integer("n_routed_experts", 256, maximum=MOST_EXPERTS),
        num_experts_per_tok=read.integer("num_experts_per_tok", 6),
        n_shared_experts=read.integer("n_shared_experts", 2),
        route_scale=read.number("route_scale", 8.0),
        logits_mup_width_multiplier=read.number("logits_mup_width_multiplier", 24.0),
        eos_token_ids=read.token_ids("eos_token_id", None),
        dtype=ConfigReader(values, FAMILY).dtype() or read.dtype(),
        mtp=_mtp(values, text, full, sliding),
        stored_experts=stored_experts,
        experts=stored_experts,
    )
    for key, most, name in (
        ("unpadded_vocab_size", config.vocab_size, "vocab_size"),
        ("num_experts_per_tok", config.n_routed_experts, "n_routed_experts"),
    ):
        if getattr(config, key) > most:
            raise ConfigError(f"config.json: {key} {getattr(config, key)} exceeds {name} {most}")
    return config


def draft_target(config: InklingConfig) -> DraftTarget:
    """What a drafter has to fit."""
    return DraftTarget(
        config.hidden_size,
        config.num_hidden_layers,
        config.vocab_size,
        config.unpadded_vocab_size,
        config.max_position_embeddings,
        None,
        has_embed_norm=True,
        has_mlp_conv=True,
    )


def _optional(read: ConfigReader, key: str) -> int | None:
    return None if read.get(key, None) is None else read.integer(key, 0)


def _widths(read: ConfigReader, text: Mapping[str, Any]) -> tuple[int, int]:
    """Widths of a dense MLP and of an expert."""
    has_dense, has_expert = (
        text.get(key) is not None for key in ("dense_intermediate_size", "moe_intermediate_size")
    )
    if has_dense:
        expert = read.integer("intermediate_size", 3072)
        if has_expert and read.integer("moe_intermediate_size", expert) != expert:
            raise ConfigError(
                f"config.json: intermediate_size = {expert} beside dense_intermediate_size is the "
                f"width of an expert, but moe_intermediate_size = {text['moe_intermediate_size']}"
            )
        return read.integer("dense_intermediate_size", 24576), expert
    if "intermediate_size" in text and not has_expert:
        raise ConfigError(
            "config.json: intermediate_size alone may be the width of a dense MLP or of an expert; "
            "add dense_intermediate_size (it is an expert's) or moe_intermediate_size (it is not)"
        )
    return read.integer("intermediate_size", 24576), read.integer("moe_intermediate_size", 3072)


def _layer_kinds(text: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers are sliding."""
    kinds = text.get("layer_types")
    if kinds is None:
        local = text.get("local_layer_ids")
        if local is None:
            return tuple((layer + 1) % 6 != 0 for layer in range(num_layers))
        return _marked(local, num_layers, "local_layer_ids")
    names = ("hybrid", "hybrid_sliding")
    _require_kinds(kinds, num_layers, "layer_types", names)
    return tuple(kind == "hybrid_sliding" for kind in kinds)


def _mlp_kinds(read: ConfigReader, text: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers are dense."""
    kinds = text.get("mlp_layer_types")
    if kinds is None:
        num_dense = read.integer("dense_mlp_idx", 0, minimum=0)
        return tuple(layer < num_dense for layer in range(num_layers))
    _require_kinds(kinds, num_layers, "mlp_layer_types", ("dense", "sparse"))
    return tuple(kind == "dense" for kind in kinds)


def _expert_forms(quantization: Quantization, is_dense: tuple[bool, ...]) -> tuple[WeightForm, ...]:
    """The forms of every layer's routed experts; of a dense layer "plain".

    Shared experts and all else are never quantized, whether the configuration excludes them or not:
    their tensors are checked to be plain.
    """
    for name in quantization.modules:
        layer = layer_of_experts(name, len(is_dense))
        if layer is None or is_dense[layer]:
            raise ConfigError(
                f"config.json: quantized module {name!r} is not supported, only the routed experts "
                f"of layers that have some"
            )
    forms = expert_forms(quantization, len(is_dense))
    return tuple("plain" if dense else form for form, dense in zip(forms, is_dense, strict=True))


def _require_kinds(kinds: Any, num_layers: int, key: str, names: tuple[str, str]) -> None:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"config.json: {key} must list {num_layers} layers, got {kinds!r}")
    for kind in kinds:
        if kind not in names:
            raise ConfigError(
                f"config.json: {key} has {kind!r}, only {names[0]!r} and {names[1]!r} are supported"
            )


def _marked(ids: Any, count: int, key: str) -> tuple[bool, ...]:
    """Which of `count` places a list names."""
    if not isinstance(ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < count for i in ids
    ):
        raise ConfigError(f"config.json: {key} must list ids from 0 to {count - 1}, got {ids!r}")
    return tuple(place in ids for place in range(count))


def _mtp(
    values: Mapping[str, Any],
    text: Mapping[str, Any],
    full: AttentionShape,
    sliding: AttentionShape,
) -> MtpConfig | None:
    """The MTP heads: keys of the text configuration, else of the publisher's `mtp_config`."""
    nested = values.get("mtp_config") or text.get("mtp_config") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config.json: mtp_config must be an object, got {nested!r}")

    def get(key: str, *names: str) -> Any:
        for place, name in ((text, key), *((nested, name) for name in (key, *names))):
            if place.get(name) is not None:
                return place[name]
        return None

    found: dict[str, Any] = {
        "num_mtp_layers": get("num_mtp_layers", "num_nextn_predict_layers"),
        "chain_hidden_post_norm": get("chain_hidden_post_norm"),
        "mtp_hidden_states_first": get("mtp_hidden_states_first"),
    }
    given = {key: value for key, value in found.items() if value is not None}
    num_depths = ConfigReader(given, FAMILY).integer(
        "num_mtp_layers", 0, minimum=0, maximum=MOST_LAYERS
    )
    if num_depths == 0:
        return None
    extent = get("mtp_local_extent", "local_extent")
    if extent not in (None, sliding.window):
        raise ConfigError(
            f"config.json: MTP heads with mtp_local_extent = {extent!r} are not supported, only "
            f"{sliding.window}, the window of the text model"
        )
    for prefix, shape in (("", full), ("swa_", sliding)):
        own = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        for name, size in zip(_MTP_GEOMETRY, own, strict=True):
            value = get(f"mtp_{prefix}{name}", f"{prefix}{name}")
            if value not in (None, size):
                raise ConfigError(
                    f"config.json: MTP heads with mtp_{prefix}{name} = {value!r} are not "
                    f"supported, only {size}, that of the text model"
                )
    local = get("mtp_local_layer_ids", "local_layer_ids")
    for key in ("chain_hidden_post_norm", "mtp_hidden_states_first"):
        if not isinstance(given.get(key, True), bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {given[key]!r}")
    return MtpConfig(
        _marked(local or [], num_depths, "mtp_local_layer_ids"),
        given.get("chain_hidden_post_norm", False),
        given.get("mtp_hidden_states_first", True),
    )
