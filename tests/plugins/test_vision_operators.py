"""What the cases of the vision towers' operators do not reach."""

import pytest
import torch

from inkrt.plugins.bidirectional_attention import op
from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.grid_embedding.op import grid_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1, 100, 37 * 37, 2 * 37 * 37, 5000])
def test_large_images_go_in_parts(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few rows of a head, of one head, of two of three."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (normal(g, dtype, 41, 3, 8) for _ in range(3))
    whole = op.bidirectional_attention(q, k, v, int32(37), 0.3)
    monkeypatch.setattr(op, "_MAX_SCORES", most)
    parts = op.bidirectional_attention(q, k, v, int32(37), 0.3)
    bound = 1e-6 if dtype is torch.float32 else 4e-3
    assert (parts - whole).norm() <= bound * whole.norm()
    assert parts[37:].abs().max() == 0


def test_what_stands_in_rows_of_padding_is_not_read() -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (normal(g, torch.float32, 12, 2, 8) for _ in range(3))
    whole = op.bidirectional_attention(q, k, v, int32(9), 0.3)
    for x in (q, k, v):
        x[9:] = torch.nan
    assert torch.equal(op.bidirectional_attention(q, k, v, int32(9), 0.3), whole)


def test_an_image_as_fine_as_the_table_reads_its_points() -> None:
    side, width = 5, 7
    g = torch.Generator().manual_seed(3)
    table = normal(g, torch.float32, side, side, width)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=1) + 1
    positions = torch.cat([torch.zeros(1, 2), places]).int()
    nothing = torch.zeros(width)
    x = torch.zeros(side * side, width)
    out = grid_embedding(x, positions, int32(side, side), table, nothing, nothing)
    assert torch.equal(out[1:], table.flatten(0, 1))
