"""What an engine's configuration says of its towers: what they take, and how files become that.

Part of the engine format; see `runtime.engine_file`.
"""

import math
from typing import Literal

from msgspec import Struct

Shapes = dict[str, tuple[int, ...]]
Kind = Literal["vision", "audio"]


class InklingTiles(Struct, frozen=True, forbid_unknown_fields=True, tag="inkling-tiles"):
    """Tiles of an image, whose pixels are nested as the stages of the tower fold them.

    Attributes:
        tile_size: height and width in pixels.
        num_frames: times that an image is repeated.
        folds: sides of the squares that each stage makes one position of.
    """

    tile_size: int
    num_frames: int
    folds: tuple[int, ...]

    def shapes(self, num_rows: int) -> Shapes | None:
        """Shapes of what it makes for so many rows; None if its own numbers contradict."""
        if math.prod(self.folds) != self.tile_size or min(self.num_frames, *self.folds) < 1:
            return None
        return {"pixels": (num_rows, self.num_frames * self.tile_size**2 * 3)}


class Inkling2Patches(Struct, frozen=True, forbid_unknown_fields=True, tag="inkling2-patches"):
    """Patches of one image with their places, tile by tile.

    Attributes:
        tile_size: height and width in pixels of what gives a row.
        merge: patches of a tile's side.
    """

    tile_size: int
    merge: int

    def shapes(self, num_rows: int) -> Shapes | None:
        """See `InklingTiles`."""
        if self.merge < 1 or self.tile_size % self.merge:
            return None
        num_patches = num_rows * self.merge**2
        return {
            "patches": (num_patches, (self.tile_size // self.merge) ** 2 * 3),
            "positions": (num_patches + 1, 2),
            "grid": (2,),
            "num_rows": (1,),
        }


class Dmel(Struct, frozen=True, forbid_unknown_fields=True, tag="dmel"):
    """Levels of the frequency bands of a recording, 20 frames a second.

    Attributes:
        num_bands: mel bands.
        num_levels: that an amplitude is rounded to, evenly spaced in its logarithm.
        lowest: decimal logarithm of the amplitude of level 0.
        highest: that of the last level.
    """

    num_bands: int
    num_levels: int
    lowest: float
    highest: float

    def shapes(self, num_rows: int) -> Shapes | None:
        """See `InklingTiles`."""
        if self.num_bands < 1 or self.num_levels < 2 or not self.lowest < self.highest:
            return None
        return {"levels": (num_rows, self.num_bands)}


Processor = InklingTiles | Inkling2Patches | Dmel


class TowerInputSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One input of a tower's step; see `Plan` for the fields."""

    dtype: str
    shape: tuple[int, ...]


class TowerStepSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A step of a tower.

    Attributes:
        num_rows: feature rows that it gives at most.
        inputs: by name.
    """

    num_rows: int
    inputs: dict[str, TowerInputSpec]


class TowerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One tower; its steps are named `<kind><rows>`.

    Attributes:
        kind: what it reads.
        token_id: of the placeholder that each of its rows replaces.
        marker_id: of the token before placeholders; None if there is none.
        steps: by rows, ascending.
        is_rowwise: whether the rows of one image or recording may be spread over several steps;
            then the first dimension of every input counts rows.
        processor: how files become inputs.
    """

    kind: Kind
    token_id: int
    marker_id: int | None
    steps: tuple[TowerStepSpec, ...]
    is_rowwise: bool
    processor: Processor

    @property
    def most_rows(self) -> int:
        """Rows of the largest step."""
        return self.steps[-1].num_rows

    @property
    def named_rows(self) -> dict[str, int]:
        """Rows of its steps by the names of their plans."""
        return {self.name_of(step): step.num_rows for step in self.steps}

    def name_of(self, step: TowerStepSpec) -> str:
        """Name of a step's plan."""
        return f"{self.kind}{step.num_rows}"
