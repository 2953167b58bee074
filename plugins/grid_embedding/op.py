"""grid_embedding: patches with a position embedding read between the points of a learned grid.

    out[0]   = class_token + class_position
    out[1+p] = dtype( x[p] + dtype(sum over 4 neighbors of weight * table[neighbor]) )

A patch in row r of N rows stands at (r + 1/2) S / N - 1/2 of the grid's S rows, and likewise its
column; its neighbors are the grid's points around that place, those outside moved to the border,
with weights 1 - distance of each axis multiplied. Place, weights and sum are float32.
Source: Inkling-2's vision tower, `Inkling2VisionEmbeddings` of transformers (bilinear
interpolation, corners not aligned).
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor,
    positions: Tensor,
    grid: Tensor,
    table: Tensor,
    class_token: Tensor,
    class_position: Tensor,
) -> Tensor:
    """Shape [1 + P, D] in x's dtype."""
    axes = Axes("grid_embedding")
    axes.fit("x", x, "P", "D", dtype=MODEL_DTYPES)
    axes.fit("positions", positions, "1+P", 2, dtype=torch.int32)
    axes.require(
        axes["1+P"] == axes["P"] + 1,
        f"positions has {axes['1+P']} rows, expected 1 + P with P={axes['P']}",
    )
    axes.fit("grid", grid, 2, dtype=torch.int32)
    axes.fit("table", table, "S", "S", "D", dtype=x.dtype)
    axes.fit("class_token", class_token, "D", dtype=x.dtype)
    axes.fit("class_position", class_position, "D", dtype=x.dtype)
    return x.new_empty(x.shape[0] + 1, x.shape[1])


def cases() -> list[Case]:
    """Grids smaller and larger than the table, of one patch, of one row, and padding behind one."""

    def make(name: str, rows: int, columns: int, side: int, *, padding: int = 0) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            width, count = 13, rows * columns
            places = [(r + 1, c + 1) for r in range(rows) for c in range(columns)]
            order = torch.randperm(count, generator=generator).tolist()
            listed = [(0, 0), *(places[i] for i in order), *[(0, 0)] * padding]
            return {
                "x": normal(generator, dtype, count + padding, width),
                "positions": torch.tensor(listed, dtype=torch.int32),
                "grid": int32(rows, columns),
                "table": normal(generator, dtype, side, side, width),
                "class_token": normal(generator, dtype, width),
                "class_position": normal(generator, dtype, width),
            }

        return Case(name, arguments)

    return [
        make("finer than the table", 14, 10, 6),
        make("coarser than the table", 4, 6, 32),
        make("as the table", 6, 6, 6),
        make("one patch", 1, 1, 5),
        make("one row, padded", 1, 8, 3, padding=3),
    ]


@operator("grid_embedding", fake=fake, cases=cases)
def grid_embedding(
    x: Tensor,
    positions: Tensor,
    grid: Tensor,
    table: Tensor,
    class_token: Tensor,
    class_position: Tensor,
) -> Tensor:
    """Add position embeddings to an image's patches and put its class token in front.

    Args:
        x: float32 or bfloat16 [P, D], embedded patches.
        positions: int32 [1 + P, 2], row and column of each result, counted from 1; of the class
            token, and of rows of padding, (0, 0).
        grid: int32 [2], the image's rows and columns of patches.
        table: [S, S, D], dtype of x.
        class_token: [D], dtype of x.
        class_position: [D], dtype of x.

    Returns:
        [1 + P, D] in x's dtype; rows of padding are finite.
    """
    side = table.shape[0]
    place = (positions[1:].float() - 0.5) * side / grid - 0.5  # [P, 2]
    below = torch.floor(place)
    offsets = torch.arange(2, dtype=torch.float32, device=x.device)
    weights = 1 - ((place - below)[..., None] - offsets).abs()  # [P, axis, 2]
    taps = (below[..., None] + offsets).long().clamp(0, side - 1)
    index = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    weight = weights[:, 0, :, None] * weights[:, 1, None, :]
    rows = table.flatten(0, 1)[index.flatten(1)]  # [P, 4, D]
    embedded = (rows * weight.flatten(1)[..., None]).sum(1)
    first = class_token + class_position
    return torch.cat([first[None], x + embedded.to(x.dtype)])
