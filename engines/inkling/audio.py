"""Inkling's audio tower: one row for each frame of 50 ms, from the levels of its frequency bands.

    out = norm( sum_b table[b V + level_b] )        b < B bands of V levels

How sound becomes levels (dMel) is `runtime.media.dmel`. No frame sees another.
Source: `InklingAudioModel` of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inkrt.engines.interface import Sharding, WeightSource
from inkrt.engines.parts import ink, parameter
from inkrt.engines.reader import ConfigReader
from inkrt.engines.tower import InputShapes, Placeholder, Tower
from inkrt.engines.weight_map import RankMap
from inkrt.errors import ConfigError

PUBLISHER_ROOT, TRANSFORMERS_ROOT = "model.audio.", "model.audio_tower."
_EPS = 1e-6
_SIZES = (16, 256)


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """Sizes of the tower.

    Attributes:
        num_bands: B.
        num_levels: V.
        lowest: decimal logarithm of the amplitude of level 0; lower ones count as this.
        highest: that of the last level.
        hidden_size: of a feature row.
    """

    num_bands: int
    num_levels: int
    lowest: float
    highest: float
    hidden_size: int


def parse_audio(audio: Mapping[str, Any], hidden_size: int) -> AudioConfig:
    """Read `audio_config` of either spelling.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    aliases = {"text_hidden_size": "decoder_dmodel"}
    read = ConfigReader(audio, "inkling", aliases, "audio_config.")
    read.require("use_audio_norm", True)
    read.require("audio_mode", "dmel")
    read.require("text_hidden_size", hidden_size)
    lowest, highest = (
        _finite(audio, key, default)
        for key, default in (("dmel_min_value", -7.0), ("dmel_max_value", 2.0))
    )
    if lowest >= highest:
        raise ConfigError(
            f"config.json: audio_config.dmel_min_value {lowest} must be below dmel_max_value "
            f"{highest}"
        )
    return AudioConfig(
        num_bands=read.integer("n_mel_bins", 80),
        num_levels=read.integer("mel_vocab_size", 256, minimum=2),
        lowest=lowest,
        highest=highest,
        hidden_size=hidden_size,
    )


def _finite(audio: Mapping[str, Any], key: str, default: float) -> float:
    value = audio.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1000:
        raise ConfigError(
            f"config.json: audio_config.{key} must be a number from -1000 to 1000, got {value!r}"
        )
    return float(value)


class DmelTower(nn.Module):
    """Levels of frames to feature rows."""

    def __init__(self, config: AudioConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        rows = config.num_bands * config.num_levels
        self.table = parameter(rows, config.hidden_size, dtype=dtype)
        self.norm = parameter(config.hidden_size, dtype=dtype)

    def forward(self, levels: Tensor) -> Tensor:
        """Features [N, D].

        Args:
            levels: int32 [N, B].
        """
        summed_ND = ink.embedding_sum(levels, self.table)
        features_ND: Tensor = ink.rms_norm(summed_ND, self.norm, _EPS, self.dtype)
        return features_ND


def is_weight(name: str) -> bool:
    """Whether a checkpoint tensor is the tower's."""
    return name.startswith((PUBLISHER_ROOT, TRANSFORMERS_ROOT))


def weight_sources(config: AudioConfig, names: frozenset[str]) -> dict[str, WeightSource]:
    """Map every parameter of `DmelTower` to its place in a checkpoint of either spelling."""
    is_theirs = any(name.startswith(TRANSFORMERS_ROOT) for name in names)
    table, norm = (
        (f"{TRANSFORMERS_ROOT}embed_audio_tokens.embed_audio_tokens", f"{TRANSFORMERS_ROOT}norm")
        if is_theirs
        else (f"{PUBLISHER_ROOT}encoder", f"{PUBLISHER_ROOT}final_norm")
    )
    make = RankMap(0, Sharding(1, "experts"))
    rows = config.num_bands * config.num_levels
    return {
        "table": make.whole(f"{table}.weight", (rows, config.hidden_size)),
        "norm": make.whole(f"{norm}.weight", (config.hidden_size,)),
    }


def _inputs(config: AudioConfig, num_rows: int, dtype: torch.dtype) -> InputShapes:  # noqa: ARG001
    return {"levels": ((num_rows, config.num_bands), torch.int32)}


def audio_tower(config: AudioConfig, placeholder: Placeholder) -> Tower:
    """The tower, as the builder wants it."""
    return Tower(
        kind="audio",
        placeholder=placeholder,
        inputs=partial(_inputs, config),
        sizes=_SIZES,
        is_rowwise=True,
        processor={
            "type": "dmel",
            "num_bands": config.num_bands,
            "num_levels": config.num_levels,
            "lowest": config.lowest,
            "highest": config.highest,
        },
        build_module=partial(DmelTower, config),
        weight_sources=partial(weight_sources, config),
        is_weight=is_weight,
    )
