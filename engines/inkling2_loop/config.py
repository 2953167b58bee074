"""The configuration of looped Inkling-2 models, read from a checkpoint's config.json.

Source: the published key names and defaults of `inkling2_loop` / `inkling2_loop_text`. All that is
not about the loop is read as for Inkling-2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from inkrt.engines.inkling2 import config as inkling2
from inkrt.engines.inkling2.config import Defaults, Inkling2Config
from inkrt.engines.interface import DraftTarget
from inkrt.engines.reader import ConfigReader
from inkrt.errors import ConfigError

_FAMILY = "inkling2_loop"
_DEFAULTS = Defaults(
    hidden_size=2304,
    num_hidden_layers=24,
    num_heads=24,
    log_scaling_n_floor=8192,
    moe_intermediate_size=1152,
    n_routed_experts=128,
)
# Flat key -> key in `loop_config`, which goes before it.
_NESTED = {
    "loop_layer_index_start": "core_start",
    "loop_layer_index_end": "core_end",
    "loop_num_passes": "num_passes",
    "loop_gate_rank": "gate_rank",
}


@dataclass(frozen=True, slots=True)
class Visit:
    """One execution of a layer, with keys, values and convolution inputs of its own.

    Attributes:
        layer: whose weights it has.
        number: of this layer's visits, from 0; from 1 on, messages of the pass before come in.
    """

    layer: int
    number: int


@dataclass(frozen=True, slots=True)
class Inkling2LoopConfig(Inkling2Config):
    """An Inkling-2 text model whose middle layers run several times.

    Attributes:
        core_start: first layer of the core.
        core_end: first layer behind it.
        num_passes: over the core.
        gate_rank: of the gates that let messages in.
    """

    core_start: int
    core_end: int
    num_passes: int
    gate_rank: int

    @property
    def num_core_layers(self) -> int:
        """Layers of the core."""
        return self.core_end - self.core_start

    @property
    def visits(self) -> tuple[Visit, ...]:
        """All visits of layers in the order in which a token passes them."""
        core = range(self.core_start, self.core_end)
        return (
            *(Visit(layer, 0) for layer in range(self.core_start)),
            *(Visit(layer, number) for number in range(self.num_passes) for layer in core),
            *(Visit(layer, 0) for layer in range(self.core_end, self.num_hidden_layers)),
        )


def parse_config(values: Mapping[str, Any]) -> Inkling2LoopConfig:
    """Read the text configuration from a whole `inkling2_loop` config or a text model's.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    text = inkling2.text_object(values, _FAMILY)
    read = inkling2.text_reader(text, _FAMILY)
    base = inkling2.read_text(values, text, read, _DEFAULTS)
    nested = text.get("loop_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError(f"config.json: loop_config must be an object, got {nested!r}")
    loop = {"loop_layer_index_start": 6, "loop_layer_index_end": 18}
    loop |= {"loop_num_passes": 3, "loop_gate_rank": 64}
    for flat, key in _NESTED.items():
        loop[flat] = read.integer(flat, loop[flat])
        loop[flat] = ConfigReader(nested or {}, _FAMILY).integer(key, loop[flat])
    config = Inkling2LoopConfig(
        **{field.name: getattr(base, field.name) for field in fields(base)},
        core_start=loop["loop_layer_index_start"],
        core_end=loop["loop_layer_index_end"],
        num_passes=loop["loop_num_passes"],
        gate_rank=loop["loop_gate_rank"],
    )
    _check(config)
    return config


def draft_target(config: Inkling2LoopConfig) -> DraftTarget:
    """What a drafter has to fit: taps are visits, or the state in front of the vocabulary."""
    target = inkling2.draft_target(config)
    return replace(target, num_hidden_layers=len(config.visits), has_final_tap=True)


def _check(config: Inkling2LoopConfig) -> None:
    block = config.n_layers_per_attn_res_block
    for name, value in (
        ("loop_layer_index_start", config.core_start),
        ("loop_layer_index_end", config.core_end),
    ):
        if value % block:
            raise ConfigError(
                f"config.json: {name} = {value} is no multiple of "
                f"n_layers_per_attn_res_block = {block}"
            )
    if not config.core_start < config.core_end <= config.num_hidden_layers:
        raise ConfigError(
            f"config.json: loop_layer_index_end = {config.core_end} must be above "
            f"loop_layer_index_start = {config.core_start} and at most "
            f"num_hidden_layers = {config.num_hidden_layers}"
        )
