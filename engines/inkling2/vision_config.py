"""The configuration of Inkling-2's vision tower, from the `vision_config` of a config.json.

Source: the published key names and defaults of `inkling2_vision`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inkrt.engines.inkling2.config import Inkling2Config
from inkrt.engines.reader import LARGEST, MOST_LAYERS, ConfigReader
from inkrt.errors import ConfigError

# Published spelling first, accepted alias second.
_ALIASES = {"patch_size": "native_patch_size", "spatial_merge_size": "adapter_merge_size"}
_SECTION = "vision_config."
_TEXT_HIDDEN = {"inkling2": 4608, "inkling2_loop": 2304}  # of a whole model, by its type


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Dimensions and constants of the tower; names follow the published config.

    Attributes:
        patch_size: pixels of a patch's side.
        spatial_merge_size: patches of the side of a tile, which becomes one token.
        posemb_grid_size: points of the side of the learned grid of position embeddings.
        projection_hidden_dim: width between the merger's projections.
        text_hidden_size: width of a token's features.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    patch_size: int
    spatial_merge_size: int
    posemb_grid_size: int
    projection_hidden_dim: int
    text_hidden_size: int
    layer_norm_eps: float
    rope_theta: float

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def patches_per_token(self) -> int:
        """Patches of a tile."""
        return self.spatial_merge_size**2

    @property
    def patch_values(self) -> int:
        """Numbers of a patch."""
        return self.num_channels * self.patch_size**2


def parse_vision_config(values: Mapping[str, Any], text: Inkling2Config) -> VisionConfig | None:
    """Read the tower's configuration; None for a text model (`inkling2_text` and the like).

    Args:
        values: content of config.json.
        text: what the text model's configuration came to.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    family = str(values.get("model_type"))
    if family not in _TEXT_HIDDEN:
        return None
    own = values.get("vision_config")
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        raise ConfigError(f"config.json: vision_config must be an object, got {own!r}")
    read = ConfigReader(own, family, _ALIASES, _SECTION)
    read.require("hidden_act", "gelu")
    read.require("projector_bias", False)
    rope = own.get("rope_parameters")
    rope = {} if rope is None else rope
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: {_SECTION}rope_parameters must be an object, got {rope!r}")
    read_rope = ConfigReader(rope, family, section=f"{_SECTION}rope_parameters.")
    read_rope.require("rope_type", "axial")
    hidden = read.integer("hidden_size", 1024)
    config = VisionConfig(
        hidden_size=hidden,
        intermediate_size=_mlp_width(read, own, hidden),
        num_hidden_layers=read.integer("num_hidden_layers", 23, maximum=MOST_LAYERS),
        num_attention_heads=read.integer("num_attention_heads", 16),
        num_channels=read.integer("num_channels", 3),
        patch_size=read.integer("patch_size", 20),
        spatial_merge_size=read.integer("spatial_merge_size", 2),
        posemb_grid_size=read.integer("posemb_grid_size", 32),
        projection_hidden_dim=read.integer("projection_hidden_dim", 4096),
        text_hidden_size=read.integer("text_hidden_size", _TEXT_HIDDEN[family]),
        layer_norm_eps=read.number("layer_norm_eps", 1e-5),
        rope_theta=read_rope.number("rope_theta", 10000.0),
    )
    if config.hidden_size % (4 * config.num_attention_heads):
        raise ConfigError(
            f"config.json: {_SECTION}hidden_size = {config.hidden_size} does not make "
            f"{config.num_attention_heads} heads (num_attention_heads) of a multiple of four "
            f"channels, which its rotation by rows and columns needs"
        )
    if config.num_channels != 3:
        raise ConfigError(
            f"config.json: {_SECTION}num_channels = {config.num_channels} is not supported for "
            f"{family}, only 3"
        )
    if config.text_hidden_size != text.hidden_size:
        raise ConfigError(
            f"config.json: {_SECTION}text_hidden_size = {config.text_hidden_size} differs from "
            f"text_config.hidden_size = {text.hidden_size}; image features take a token's place"
        )
    return config


def _mlp_width(read: ConfigReader, own: Mapping[str, Any], hidden: int) -> int:
    """Units of a layer's MLP, given as their number or by a ratio."""
    if own.get("intermediate_size") is not None:
        return read.integer("intermediate_size", 1)
    ratio = read.number("mlp_ratio", 4.0)
    if not 1 <= hidden * ratio <= LARGEST:
        raise ConfigError(
            f"config.json: {_SECTION}mlp_ratio = {ratio} does not make an MLP of hidden_size = "
            f"{hidden} channels; give intermediate_size"
        )
    return int(hidden * ratio)
