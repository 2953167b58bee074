"""Inkling's image tower: a hierarchical MLP that makes one row of each tile of an image.

Every stage folds neighbouring positions into channels, in the order (time, row, column, channel),
and projects; behind all but the last stand a norm and a GELU. With patches of 2 x 40 x 40 x 3:

    5 x 5 x 3 -> 128;   2 x 2 x 128 -> 320;   4 x 4 x 320 -> 4800;   2 (time) x 4800 -> hidden; norm

No tile sees another. A fold is a view if the positions that it takes stand together, so pixels come
in nested order: those of the last fold vary slowest, those of the first fastest, channels within.

Which folds there are follows from the sizes of the patch (`plan_scales`). Letters: N tiles, C
channels, D hidden.
Source: `InklingVisionModel` and `plan_out_scales` of transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inkrt.engines.interface import Sharding, WeightSource
from inkrt.engines.parts import ink, parameter
from inkrt.engines.reader import MOST_LAYERS, ConfigReader
from inkrt.engines.tower import InputShapes, Placeholder, Tower
from inkrt.engines.weight_map import RankMap
from inkrt.errors import ConfigError

Scale = tuple[int, int, int, int]  # size of a cell in time, height and width, and its channels
PUBLISHER_ROOT, TRANSFORMERS_ROOT = "model.visual.", "model.vision_tower."
# `InklingRMSNorm` of transformers, wherever the tower has one.
_EPS = 1e-6
# Sides of a patch, and frames, whose factors are tried one by one.
_MOST_PIXELS = 4096
_CHANNEL_MULTIPLE = 64
# Of most images; and what is left of a large one. Rows of padding cost as much as others.
_SIZES = (16, 128)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of the tower.

    Attributes:
        scales: before the first and behind every stage.
        hidden_size: of a feature row.
    """

    scales: tuple[Scale, ...]
    hidden_size: int

    @property
    def folds(self) -> tuple[tuple[int, int, int], ...]:
        """Positions in time, height and width that each stage folds."""
        return tuple(
            (after[0] // before[0], after[1] // before[1], after[2] // before[2])
            for before, after in zip(self.scales, self.scales[1:], strict=False)
        )

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Columns and rows of every projection."""
        outputs = [*(scale[3] for scale in self.scales[1:-1]), self.hidden_size]
        return tuple(
            (before[3] * math.prod(fold), rows)
            for before, fold, rows in zip(self.scales, self.folds, outputs, strict=False)
        )


def parse_vision(vision: Mapping[str, Any], hidden_size: int) -> VisionConfig:
    """Read `vision_config` of either spelling.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    read = ConfigReader(
        vision,
        "inkling",
        {"num_hidden_layers": "n_layers", "text_hidden_size": "decoder_dmodel"},
        "vision_config.",
    )
    read.require("use_vision_norm", True)
    read.require("text_hidden_size", hidden_size)
    read.require("num_channels", 3)
    sizes = (
        read.integer("temporal_patch_size", 2, maximum=_MOST_PIXELS),
        read.integer("patch_size", 40, maximum=_MOST_PIXELS),
        read.integer("num_hidden_layers", 24, maximum=MOST_LAYERS),
    )
    scales = plan_scales(*sizes, num_channels=3)
    return VisionConfig(scales, hidden_size)


def plan_scales(
    num_frames: int, patch_size: int, num_layers: int, num_channels: int
) -> tuple[Scale, ...]:
    """The cells of a patch that stages end with, from one pixel to the whole patch.

    Cells grow by prime factors, the largest first, in space and then in time. Stages want to fold
    alike: of all such cells, those are taken that are nearest to equal steps of the logarithm of
    their size, each once if there are enough of them.

    Args:
        num_frames: of a patch.
        patch_size: height and width of a patch in pixels.
        num_layers: stages.
        num_channels: of a pixel.

    Raises:
        ConfigError: the sizes give no stages.
    """
    cells: list[Scale] = [(1, 1, 1, num_channels)]
    for side in _products(patch_size):
        cells.append((1, side, side, _channels(side * side * num_channels)))
    for frames in _products(num_frames):
        # So many only matter if stages go on behind a whole patch; the last projects to the model.
        channels = patch_size**2 * num_channels * frames * _CHANNEL_MULTIPLE
        cells.append((frames, patch_size, patch_size, channels))
    sizes = [math.log(math.prod(cell[:3])) for cell in cells]
    step = math.log(patch_size**2 * num_frames * num_channels) / num_layers
    ideals = [step * i for i in range(num_layers + 1)]
    if num_layers >= len(cells):
        places = [min(range(len(cells)), key=lambda i: abs(x - sizes[i])) for x in ideals]
    else:
        places = _assign(ideals, sizes)
    places[0], places[-1] = 0, len(cells) - 1
    if places != sorted(places) or num_layers < 1:
        raise ConfigError(
            f"config.json: vision_config with num_hidden_layers {num_layers}, patch_size "
            f"{patch_size} and temporal_patch_size {num_frames} gives no order of stages"
        )
    return tuple(cells[place] for place in places)


def _products(number: int) -> list[int]:
    """Products of the first prime factors, the largest factor first; none for 1."""
    factors = []
    for factor in range(2, number + 1):
        while number % factor == 0:
            factors.append(factor)
            number //= factor
    products = [1]
    for factor in reversed(factors):
        products.append(products[-1] * factor)
    return products[1:]


def _channels(size: int) -> int:
    return -(-size // _CHANNEL_MULTIPLE) * _CHANNEL_MULTIPLE


def _assign(ideals: list[float], sizes: list[float]) -> list[int]:
    """Places in `sizes`, each once and ascending, of least total distance to `ideals`.

    Both ascend, so that no crossing assignment is better.
    """
    best: list[tuple[float, list[int]] | None] = [(0.0, []), *([None] * len(ideals))]
    for place, size in enumerate(sizes):
        for count in range(min(place + 1, len(ideals)), 0, -1):
            before = best[count - 1]
            if before is None:
                continue
            cost = before[0] + abs(ideals[count - 1] - size)
            known = best[count]
            if known is None or cost < known[0]:
                best[count] = (cost, [*before[1], place])
    found = best[-1]
    assert found is not None, "fewer places than ideals"
    return found[1]


class Stage(nn.Module):
    """One projection, and what follows it."""

    def __init__(self, columns: int, rows: int, dtype: torch.dtype, *, is_last: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.projection = parameter(rows, columns, dtype=dtype)
        self.norm = None if is_last else parameter(rows, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Cells with all channels of what they are folded from, [cells, C], to cells [cells, D]."""
        out: Tensor = ink.linear(x, self.projection, False)
        if self.norm is None:
            return out
        normed: Tensor = ink.gelu(ink.rms_norm(out, self.norm, _EPS, self.dtype))
        return normed


class HierarchicalMlp(nn.Module):
    """Pixels of tiles to feature rows."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        last = len(config.widths) - 1
        self.stages = nn.ModuleList(
            Stage(columns, rows, dtype, is_last=i == last)
            for i, (columns, rows) in enumerate(config.widths)
        )
        self.columns = [columns for columns, _ in config.widths]
        self.final_norm = parameter(config.hidden_size, dtype=dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [N, D].

        Args:
            pixels: compute dtype [N, frames * height * width * channels] in nested order.
        """
        x = pixels
        for stage, columns in zip(self.stages, self.columns, strict=True):
            x = stage(x.view(-1, columns))
        features_ND: Tensor = ink.rms_norm(x, self.final_norm, _EPS, self.dtype)
        return features_ND


def is_weight(name: str) -> bool:
    """Whether a checkpoint tensor is the tower's."""
    return name.startswith((PUBLISHER_ROOT, TRANSFORMERS_ROOT))


def weight_sources(config: VisionConfig, names: frozenset[str]) -> dict[str, WeightSource]:
    """Map every parameter of `HierarchicalMlp` to its place in a checkpoint of either spelling."""
    is_publisher = not any(name.startswith(TRANSFORMERS_ROOT) for name in names)
    root = PUBLISHER_ROOT if is_publisher else TRANSFORMERS_ROOT
    make = RankMap(0, Sharding(1, "experts"))
    sources = {"final_norm": make.whole(f"{root}final_norm.weight", (config.hidden_size,))}
    for i, (columns, rows) in enumerate(config.widths):
        projection, norm = (
            (f"layers.linear_{i}", f"layers.norm_{i}")
            if is_publisher
            else (f"encoder_layers.{i}.projection", f"encoder_layers.{i}.layer_norm")
        )
        sources[f"stages.{i}.projection"] = make.whole(
            f"{root}{projection}.weight", (rows, columns)
        )
        if i + 1 < len(config.widths):
            sources[f"stages.{i}.norm"] = make.whole(f"{root}{norm}.weight", (rows,))
    return sources


def _inputs(config: VisionConfig, num_rows: int, dtype: torch.dtype) -> InputShapes:
    num_values = math.prod(config.scales[-1][:3]) * config.scales[0][3]
    return {"pixels": ((num_rows, num_values), dtype)}


def vision_tower(config: VisionConfig, placeholder: Placeholder) -> Tower:
    """The tower, as the builder wants it."""
    num_frames, patch_size, _, _ = config.scales[-1]
    return Tower(
        kind="vision",
        placeholder=placeholder,
        inputs=partial(_inputs, config),
        sizes=_SIZES,
        is_rowwise=True,
        processor={
            "type": "inkling-tiles",
            "tile_size": patch_size,
            "num_frames": num_frames,
            # Those in time come last, so that frames are just one behind the other.
            "folds": [side for _, side, _ in config.folds],
        },
        build_module=partial(HierarchicalMlp, config),
        weight_sources=partial(weight_sources, config),
        is_weight=is_weight,
    )
