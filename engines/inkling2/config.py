"""The configuration of Inkling-2 text models, read from a checkpoint's config.json.

Source: the published key names and defaults of `inkling2` / `inkling2_text`. Each key is read once;
values that this definition does not implement are rejected by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from inkrt.engines.interface import DraftTarget, Sharding
from inkrt.engines.quantization import (
    Quantization,
    QuantizedForm,
    WeightForm,
    dequantized,
    expert_forms,
    layer_number,
    layer_of_experts,
    read_quantization,
    require_blocks,
    require_expert_blocks,
)
from inkrt.engines.reader import MOST_EXPERTS, MOST_LAYERS, ConfigReader
from inkrt.errors import ConfigError

# Published spelling first, accepted alias second.
_ALIASES = {
    "sliding_window_size": "sliding_window",
    "n_routed_experts": "num_local_experts",
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    "moe_intermediate_size": "intermediate_size",
    "route_scale": "routed_scaling_factor",
}


_PROJECTION_OF_LAYER = re.compile(r"layers\.(\d+)\.attn\.(\w+)$")
# Projections of attention that may be quantized, by their publisher's names. Those to sinks and to
# dynamic taps are too small to be worth a rounding.
_PROJECTIONS = {
    "wq_du": "wq", "wk_dv": "wk", "wv_dv": "wv", "wr_du": "wr", "gate_attn": "wgate", "wo_ud": "wo",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one kind of attention layer, over all ranks.

    Attributes:
        window: positions a query sees, itself included; 0 for full attention.
        rel_extent: distances that carry a relative bias.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    rel_extent: int


@dataclass(frozen=True, slots=True)
class ProjectionForms:
    """The forms of a layer's attention projections: queries, keys, values, relative states, ..."""

    wq: WeightForm = "plain"
    wk: WeightForm = "plain"
    wv: WeightForm = "plain"
    wr: WeightForm = "plain"
    wgate: WeightForm = "plain"
    wo: WeightForm = "plain"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What absent keys mean, where models of the family differ."""

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    log_scaling_n_floor: int
    moe_intermediate_size: int
    n_routed_experts: int


_DEFAULTS = Defaults(
    hidden_size=4608,
    num_hidden_layers=48,
    num_heads=48,
    log_scaling_n_floor=128000,
    moe_intermediate_size=2304,
    n_routed_experts=384,
)


@dataclass(frozen=True, slots=True)
class Inkling2Config:
    """Dimensions and constants of the text model; names follow the published config.

    Attributes:
        stored_experts: forms in the checkpoint, of each layer.
        experts: forms in the engine.
        stored_projections: as of experts.
        projections: as of experts.
    """

    vocab_size: int
    unpadded_vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    full: AttentionShape
    sliding: AttentionShape
    is_sliding: tuple[bool, ...]
    d_rel: int
    log_scaling_n_floor: int
    log_scaling_alpha: float
    max_position_embeddings: int
    rms_norm_eps: float
    conv_kernel_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    route_scale: float
    qk_l2_clip_threshold: float
    rel_l2_clip_threshold: float
    n_layers_per_attn_res_block: int
    mlp_gate_softcap: float
    mlp_up_softcap: float
    final_logit_softcapping: float
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    stored_experts: tuple[WeightForm, ...]
    experts: tuple[WeightForm, ...]
    stored_projections: tuple[ProjectionForms, ...]
    projections: tuple[ProjectionForms, ...]

    def attention(self, layer: int) -> AttentionShape:
        """Heads of layer `layer`."""
        return self.sliding if self.is_sliding[layer] else self.full

    def check_sharding(self, sharding: Sharding) -> None:
        """Raise ConfigError unless every dimension that ranks share divides by their number."""
        tp_size = sharding.tp_size
        is_by_expert = sharding.moe_split == "experts"
        for name, size in (
            ("num_attention_heads", self.full.num_heads),
            ("num_key_value_heads", self.full.num_kv_heads),
            ("swa_num_attention_heads", self.sliding.num_heads),
            ("swa_num_key_value_heads", self.sliding.num_kv_heads),
            ("n_routed_experts", self.n_routed_experts)
            if is_by_expert
            else ("moe_intermediate_size", self.moe_intermediate_size),
        ):
            if size % tp_size:
                raise ConfigError(
                    f"tp size {tp_size} does not divide {name} = {size} of this model; "
                    f"choose a tp size that does"
                )
        share = self.moe_intermediate_size // (1 if is_by_expert else tp_size)
        require_expert_blocks(self.stored_experts, self.hidden_size, share, tp_size)
        for layer, forms in enumerate(self.projections):
            shape = self.attention(layer)
            for name, form in astuples(forms):
                width = self.hidden_size
                if name == "wo":
                    width = shape.num_heads * shape.head_dim // tp_size
                require_blocks(
                    form,
                    width,
                    f"tp size {tp_size} gives ranks {width} columns of {name} in layer {layer}",
                    "leave --projections out or choose a smaller tp size",
                )


def astuples(forms: ProjectionForms) -> list[tuple[str, WeightForm]]:
    """Names and forms."""
    return [(field.name, getattr(forms, field.name)) for field in fields(forms)]


def quantize_projections(config: Inkling2Config, form: QuantizedForm) -> Inkling2Config:
    """The same with all projections in `form` that the checkpoint has in bf16 or float32."""
    layers = tuple(
        replace(forms, **{name: form for name, stored in astuples(forms) if stored == "plain"})
        for forms in config.stored_projections
    )
    return replace(config, projections=layers)


def dequantize_experts(config: Inkling2Config) -> tuple[Inkling2Config, bool]:
    """The same with the values of all quantized experts; whether some have global scales."""
    forms = dequantized(config.stored_experts)
    return replace(config, experts=forms), "scaled" in forms


def parse_config(values: Mapping[str, Any]) -> Inkling2Config:
    """Read the text configuration from a whole `inkling2` config or an `inkling2_text` one.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    text = text_object(values, "inkling2")
    return read_text(values, text, text_reader(text, "inkling2"), _DEFAULTS)


def text_object(values: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """The text model's part of a config.json, or all of it if that is the text model's."""
    text = values.get("text_config", values) if values.get("model_type") == family else values
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config must be an object, got {text!r}")
    return text


def text_reader(text: Mapping[str, Any], family: str) -> ConfigReader:
    """Reads the keys of the text model under either spelling."""
    return ConfigReader(text, family, _ALIASES)


def read_text(
    values: Mapping[str, Any], text: Mapping[str, Any], read: ConfigReader, default: Defaults
) -> Inkling2Config:
    """Read what all models of the family have.

    Args:
        values: the whole config.json.
        text: the text model's part of it.
        read: reads that part.
        default: for what is absent.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    read.require("scoring_func", "sigmoid")
    read.require("tie_word_embeddings", False)
    read.require("hidden_act", "silu")
    read.require("number_of_conv_states", 4)
    whole = ConfigReader(values, "inkling2")
    whole.require("tie_word_embeddings", False)
    num_layers = read.integer("num_hidden_layers", default.num_hidden_layers, maximum=MOST_LAYERS)
    quantization = read_quantization(
        "inkling2", (values, text), ("nvfp4", "mxfp8"), "experts and attention projections"
    )
    full, sliding = read_shapes(
        read, window=1024, num_heads=default.num_heads, num_sliding_kv_heads=8
    )
    stored_experts = expert_forms(quantization, num_layers)
    projections = _projection_forms(quantization, num_layers)
    config = Inkling2Config(
        vocab_size=read.integer("vocab_size", 201024),
        unpadded_vocab_size=read.integer("unpadded_vocab_size", 200058),
        hidden_size=read.integer("hidden_size", default.hidden_size),
        num_hidden_layers=num_layers,
        full=full,
        sliding=sliding,
        is_sliding=_layer_kinds(text.get("layer_types"), num_layers),
        d_rel=read.integer("d_rel", 16),
        log_scaling_n_floor=read.integer("log_scaling_n_floor", default.log_scaling_n_floor),
        log_scaling_alpha=read.number("log_scaling_alpha", 0.1),
        max_position_embeddings=read.integer("max_position_embeddings", 1048576),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        conv_kernel_size=read.integer("conv_kernel_size", 4, minimum=2),
        moe_intermediate_size=read.integer("moe_intermediate_size", default.moe_intermediate_size),
        n_routed_experts=read.integer(
            "n_routed_experts", default.n_routed_experts, maximum=MOST_EXPERTS
        ),
        num_experts_per_tok=read.integer("num_experts_per_tok", 8),
        route_scale=read.number("route_scale", 8.0),
        qk_l2_clip_threshold=read.number("qk_l2_clip_threshold", 22.627416997969522),
        rel_l2_clip_threshold=read.number("rel_l2_clip_threshold", 8.0),
        n_layers_per_attn_res_block=read.integer("n_layers_per_attn_res_block", 6),
        mlp_gate_softcap=read.number("mlp_gate_softcap", 4.0),
        mlp_up_softcap=read.number("mlp_up_softcap", 25.0),
        final_logit_softcapping=read.number("final_logit_softcapping", 30.0),
        eos_token_ids=read.token_ids("eos_token_id", 200006),
        dtype=whole.dtype() or read.dtype(),
        stored_experts=stored_experts,
        experts=stored_experts,
        stored_projections=projections,
        projections=projections,
    )
    if config.unpadded_vocab_size > config.vocab_size:
        raise ConfigError(
            f"config.json: unpadded_vocab_size {config.unpadded_vocab_size} exceeds "
            f"vocab_size {config.vocab_size}"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {config.num_experts_per_tok} exceeds "
            f"n_routed_experts {config.n_routed_experts}"
        )
    return config


def draft_target(config: Inkling2Config) -> DraftTarget:
    """What a drafter has to fit."""
    return DraftTarget(
        config.hidden_size,
        config.num_hidden_layers,
        config.vocab_size,
        config.unpadded_vocab_size,
        config.max_position_embeddings,
        config.final_logit_softcapping,
        has_embed_norm=True,
        has_mlp_conv=True,
    )


def read_shapes(
    read: ConfigReader, *, window: int, num_heads: int, num_sliding_kv_heads: int
) -> tuple[AttentionShape, AttentionShape]:
    """Full and sliding attention of the Inkling family; the arguments are a model's defaults.

    Raises:
        ConfigError: a value is invalid, or query heads are no multiple of key/value heads.
    """
    window = read.integer("sliding_window_size", window)
    full = AttentionShape(
        read.integer("num_attention_heads", num_heads),
        read.integer("num_key_value_heads", 8),
        read.integer("head_dim", 128),
        0,
        read.integer("rel_extent", 1024),
    )
    sliding = AttentionShape(
        read.integer("swa_num_attention_heads", num_heads),
        read.integer("swa_num_key_value_heads", num_sliding_kv_heads),
        read.integer("swa_head_dim", 128),
        window,
        window,
    )
    for shape, prefix in ((full, ""), (sliding, "swa_")):
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(
                f"config.json: {prefix}num_attention_heads = {shape.num_heads} is no multiple of "
                f"{prefix}num_key_value_heads = {shape.num_kv_heads}"
            )
    return full, sliding


def _layer_kinds(layer_types: Any, num_layers: int) -> tuple[bool, ...]:
    if layer_types is None:
        return tuple((layer + 1) % 6 != 0 for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types must list {num_layers} layers, got {layer_types!r}"
        )
    for kind in layer_types:
        if kind not in ("hybrid", "hybrid_sliding"):
            raise ConfigError(
                f"config.json: layer type {kind!r} is not supported, "
                f"only 'hybrid' and 'hybrid_sliding'"
            )
    return tuple(kind == "hybrid_sliding" for kind in layer_types)


def _projection_forms(quantization: Quantization, num_layers: int) -> tuple[ProjectionForms, ...]:
    """The forms of every layer's projections.

    Raises:
        ConfigError: what is quantized is neither such a projection nor experts.
    """
    projections = [ProjectionForms()] * num_layers
    for name, form in quantization.modules.items():
        if layer_of_experts(name, num_layers) is not None:
            continue
        match = _PROJECTION_OF_LAYER.search(name)
        layer = layer_number(match[1], num_layers) if match else None
        if match is None or layer is None or match[2] not in _PROJECTIONS:
            raise ConfigError(
                f"config.json: quantized module {name!r} is not supported, only the experts and "
                f"the attention projections {', '.join(_PROJECTIONS)} of the {num_layers} layers"
            )
        projections[layer] = replace(projections[layer], **{_PROJECTIONS[match[2]]: form})
    return tuple(projections)
