"""The configuration of Flint, read from a checkpoint's config.json.

Source: key names and defaults of `flint` in transformers, and the further keys that vLLM reads
(flint.md section 2). Each key is read once; values that this definition does not implement are
rejected by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inkrt.engines.interface import DraftTarget, Sharding
from inkrt.engines.reader import MOST_EXPERTS, MOST_LAYERS, ConfigReader
from inkrt.errors import ConfigError
from inkrt.plugins.nvfp4 import BLOCK

# Keys of rope_parameters that change nothing at these values.
_PLAIN_ROPE = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


@dataclass(frozen=True, slots=True)
class FlintConfig:
    """Dimensions and constants; names follow the published config.

    Attributes:
        is_sliding: by layer; sliding layers have a window and rotary positions, the others see
            everything and have no positional encoding.
        is_dense: by layer; whether it has an MLP instead of experts.
        sliding_window: positions a query of a sliding layer sees, itself included.
        has_nvfp4: whether projections and experts are NVFP4.
        has_nvfp4_head: whether the head is too.
        decodes_experts: whether an engine has the values of NVFP4 routed experts.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    sliding_window: int
    rope_theta: float
    is_sliding: tuple[bool, ...]
    is_dense: tuple[bool, ...]
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    has_nvfp4: bool
    has_nvfp4_head: bool
    decodes_experts: bool = False

    @property
    def unpadded_vocab_size(self) -> int:
        """Tokens that can be sampled: all rows of the embedding."""
        return self.vocab_size

    def check_sharding(self, sharding: Sharding) -> None:
        """Raise ConfigError unless every dimension that ranks share divides by their number."""
        tp_size = sharding.tp_size
        is_by_expert = sharding.moe_split == "experts"
        summed = [
            ("num_attention_heads * head_dim", self.num_attention_heads * self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("shared_expert_intermediate_size", self.shared_expert_intermediate_size),
        ]
        if not is_by_expert:
            summed.append(("moe_intermediate_size", self.moe_intermediate_size))
        shared = [
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            *summed,
        ]
        if is_by_expert:
            shared.append(("num_experts", self.num_experts))
        for name, size in shared:
            if size % tp_size:
                raise ConfigError(
                    f"tp size {tp_size} does not divide {name} = {size} of this model; "
                    f"choose a tp size that does"
                )
        for name, size in summed if self.has_nvfp4 else []:
            if size // tp_size % BLOCK:
                raise ConfigError(
                    f"tp size {tp_size} cuts {name} = {size} of this NVFP4 model into "
                    f"{size // tp_size} columns, which is no multiple of {BLOCK}; "
                    f"choose a smaller tp size"
                )


def parse_config(values: Mapping[str, Any]) -> FlintConfig:
    """Read a `flint` configuration.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    read = ConfigReader(values, "flint")
    for key, allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("norm_topk_prob", True),
        ("router_score_function", "sigmoid"),
        ("decoder_sparse_step", 1),
        ("use_sliding_window", True),
    ):
        read.require(key, allowed)
    num_layers = read.integer("num_hidden_layers", 49, maximum=MOST_LAYERS)
    is_sliding = _sliding_layers(read.get("layer_types", None), num_layers)
    _check_rotary_layers(read.get("no_rope_layer_indices", None), is_sliding)
    has_nvfp4, has_nvfp4_head = _quantization(read.get("quantization_config", None))
    config = FlintConfig(
        vocab_size=read.integer("vocab_size", 150144),
        hidden_size=read.integer("hidden_size", 2048),
        intermediate_size=read.integer("intermediate_size", 6144),
        num_hidden_layers=num_layers,
        num_attention_heads=read.integer("num_attention_heads", 32),
        num_key_value_heads=read.integer("num_key_value_heads", 4),
        head_dim=read.integer("head_dim", 128, minimum=2),
        max_position_embeddings=read.integer("max_position_embeddings", 262144),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        sliding_window=read.integer("sliding_window", 513),
        rope_theta=_rope_theta(read),
        is_sliding=is_sliding,
        is_dense=_dense_layers(read.get("mlp_only_layers", None), num_layers),
        moe_intermediate_size=read.integer("moe_intermediate_size", 512),
        shared_expert_intermediate_size=read.integer("shared_expert_intermediate_size", 1024),
        num_experts=read.integer("num_experts", 256, maximum=MOST_EXPERTS),
        num_experts_per_tok=read.integer("num_experts_per_tok", 6),
        eos_token_ids=read.token_ids("eos_token_id", None),
        dtype=read.dtype(),
        has_nvfp4=has_nvfp4,
        has_nvfp4_head=has_nvfp4_head,
    )
    _check_consistency(config)
    return config


def draft_target(config: FlintConfig) -> DraftTarget:
    """What a drafter has to fit."""
    return DraftTarget(
        config.hidden_size,
        config.num_hidden_layers,
        config.vocab_size,
        config.unpadded_vocab_size,
        config.max_position_embeddings,
        softcap=None,
        has_embed_norm=False,
        has_mlp_conv=False,
        unembed="lm_head.weight",
    )


def _check_consistency(config: FlintConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads = {heads} is no multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"config.json: head_dim = {config.head_dim} must be even to be rotated")
    if config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {config.num_experts_per_tok} exceeds "
            f"num_experts {config.num_experts}"
        )
    if config.has_nvfp4:
        for name, size in (
            ("hidden_size", config.hidden_size),
            ("num_attention_heads * head_dim", heads * config.head_dim),
            ("intermediate_size", config.intermediate_size),
            ("moe_intermediate_size", config.moe_intermediate_size),
            ("shared_expert_intermediate_size", config.shared_expert_intermediate_size),
        ):
            if size % BLOCK:
                raise ConfigError(
                    f"config.json: {name} = {size} cannot be the width of an NVFP4 matrix, "
                    f"only multiples of {BLOCK} can"
                )


def _sliding_layers(layer_types: Any, num_layers: int) -> tuple[bool, ...]:
    if layer_types is None:
        # The rule of the published configuration.
        return tuple(
            not (layer < 2 or layer % 4 == 1 or layer == num_layers - 1)
            for layer in range(num_layers)
        )
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types must list {num_layers} layers, got {layer_types!r}"
        )
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"config.json: layer type {kind!r} is not supported, "
                f"only 'full_attention' and 'sliding_attention'"
            )
    return tuple(kind == "sliding_attention" for kind in layer_types)


def _check_rotary_layers(no_rope: Any, is_sliding: tuple[bool, ...]) -> None:
    """Layers without rotary positions must be the full ones, as in the published model."""
    full = [layer for layer, sliding in enumerate(is_sliding) if not sliding]
    if no_rope is not None and no_rope != full:
        raise ConfigError(
            f"config.json: no_rope_layer_indices = {no_rope!r} is not supported, only the "
            f"full-attention layers {full}"
        )


def _dense_layers(indices: Any, num_layers: int) -> tuple[bool, ...]:
    indices = [0, 1] if indices is None else indices
    if not isinstance(indices, list) or not all(
        isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices
    ):
        raise ConfigError(f"config.json: mlp_only_layers must list layers, got {indices!r}")
    return tuple(layer in indices for layer in range(num_layers))


def _rope_theta(read: ConfigReader) -> float:
    """The base, from `rope_parameters` or from the older key `rope_theta`."""
    read.require("rope_scaling", None)
    parameters = read.get("rope_parameters", None)
    if parameters is None:
        return read.number("rope_theta", 10000.0)
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"config.json: rope_parameters must be an object, got {parameters!r}")
    for key, value in parameters.items():
        if key != "rope_theta" and (key not in _PLAIN_ROPE or value != _PLAIN_ROPE[key]):
            raise ConfigError(
                f"config.json: {key} = {value!r} in rope_parameters is not supported for flint, "
                f"only rotations of all channels without scaling"
            )
    return ConfigReader(parameters, "flint").number("rope_theta", 10000.0)


def _quantization(value: Any) -> tuple[bool, bool]:
    """Whether projections and head are NVFP4; `tensors` lists what is, else everything is.

    A GGUF checkpoint gives the list. Its own names tell nothing but whether the head is in it: that
    all the others are is checked when they are read.
    """
    if value is None:
        return False, False
    if not isinstance(value, Mapping) or value.get("quant_method") != "nvfp4":
        raise ConfigError(
            f"config.json: quantization_config {value!r} is not supported for flint, only "
            f"{{'quant_method': 'nvfp4'}}"
        )
    tensors = value.get("tensors")
    return True, tensors is None or "output.weight" in tensors
