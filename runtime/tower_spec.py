"""What an engine's configuration says of its towers: what they take, and how files become that.

Part of the engine format; see `runtime.engine_file`.
"""

from typing import Literal

from msgspec import Struct

Kind = Literal["vision", "audio"]


class InklingTiles(Struct, frozen=True, forbid_unknown_fields=True, tag="inkling-tiles"):
    """Tiles of an image, whose pixels are nested as the stages of the tower fold them.

    Attributes:
        tile_size: height and width in pixels.
        num_frames: times that an image is repeated.
        folds: positions in time, height and width that each stage makes one of.
    """

    tile_size: int
    num_frames: int
    folds: tuple[tuple[int, int, int], ...]


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


Processor = InklingTiles | Dmel


class TowerInputSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One input of a tower's steps, [rows, *shape].

    Attributes:
        name: as in plans.
        dtype: as in plans.
        shape: of the values of one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class TowerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One tower; its steps are named `<kind><rows>`.

    Attributes:
        kind: what it reads.
        token_id: of the placeholder that each of its rows replaces.
        marker_id: of the token before placeholders; None if there is none.
        sizes: rows of its steps, ascending.
        inputs: of its steps, besides `num_rows`.
        is_rowwise: whether the rows of one image or recording may be spread over several steps.
        processor: how files become inputs.
    """

    kind: Kind
    token_id: int
    marker_id: int | None
    sizes: tuple[int, ...]
    inputs: tuple[TowerInputSpec, ...]
    is_rowwise: bool
    processor: Processor

    def step_of(self, num_rows: int) -> str:
        """Name of the step of a size."""
        return f"{self.kind}{num_rows}"
