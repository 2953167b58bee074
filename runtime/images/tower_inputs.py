"""What Inkling-2's vision tower reads of one image, computed by the host.

The shapes are those of `engines.inkling2.vision.VisionTower`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inkrt.runtime.images.grid import ImageGrid
from inkrt.runtime.images.patches import folded


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """The tower's inputs for one image of N tiles, P = N * merge^2 patches.

    Attributes:
        patches: float32 [P, 3 * patch^2], tile by tile; rounded to the tower's dtype when used.
        positions: int32 [1 + P, 2], row and column of the class token (0, 0) and of each patch,
            counted from 1.
        grid: int32 [2], rows and columns of patches.
        num_rows: int32 [1], 1 + P.
    """

    patches: NDArray[np.float32]
    positions: NDArray[np.int32]
    grid: NDArray[np.int32]
    num_rows: NDArray[np.int32]


def tower_inputs(tiles: NDArray[np.float32], grid: ImageGrid, merge: int) -> TowerInputs:
    """The inputs of one image.

    Args:
        tiles: float32 [N, tile, tile, 3], from `patches.tiles`.
        grid: of the image.
        merge: patches of a tile's side (`spatial_merge_size`).
    """
    patch = tiles.shape[1] // merge
    num_patches = grid.num_tokens * merge**2
    patches = folded(tiles, (patch,)).reshape(num_patches, -1)
    row, column, inner_row, inner_column = np.indices(
        (grid.rows, grid.columns, merge, merge), dtype=np.int32
    ).reshape(4, -1)
    positions = np.zeros((num_patches + 1, 2), np.int32)
    positions[1:, 0] = row * merge + inner_row + 1
    positions[1:, 1] = column * merge + inner_column + 1
    size = np.array([grid.rows * merge, grid.columns * merge], np.int32)
    return TowerInputs(patches, positions, size, np.array([num_patches + 1], np.int32))
