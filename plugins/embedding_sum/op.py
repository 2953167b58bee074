"""embedding_sum: the sum of one row from each of several tables that stand behind each other.

    out[n] = sum_b table[b V + codes[n, b]]        b < B

Added up in float32, one rounding to the table's dtype.
Source: Inkling's audio tower, `InklingAudioModelEmbeddings` of transformers: a frame of sound has B
frequency bands with V levels each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import int32, integers, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(codes: Tensor, table: Tensor) -> Tensor:
    """Shape [N, D] in the table's dtype."""
    axes = Axes("embedding_sum")
    axes.fit("codes", codes, "N", "B", dtype=torch.int32)
    axes.fit("table", table, "R", "D", dtype=MODEL_DTYPES)
    axes.require(
        axes["R"] % axes["B"] == 0,
        f"table has {axes['R']} rows, expected a multiple of the {axes['B']} codes of a row",
    )
    return table.new_empty(codes.shape[0], table.shape[1])


def _case(name: str, num_rows: int, num_tables: int, levels: int, width: int) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "codes": integers(generator, levels, num_rows, num_tables),
            "table": normal(generator, dtype, num_tables * levels, width),
        }

    return Case(name, arguments)


def _ends(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
    return {"codes": int32(0, 2, 2, 0).view(2, 2), "table": normal(generator, dtype, 6, 5)}


def cases() -> list[Case]:
    """One table, tables of odd sizes, the first and last level of each."""
    return [
        _case("one table", 3, 1, 4, 7),
        _case("frames", 11, 6, 5, 33),
        _case("many tables", 2, 80, 16, 60),
        Case("first and last level", _ends),
    ]


@operator("embedding_sum", fake=fake, cases=cases)
def embedding_sum(codes: Tensor, table: Tensor) -> Tensor:
    """Look up and add.

    Args:
        codes: int32 [N, B], each in [0, V).
        table: float32 or bfloat16 [B V, D].

    Returns:
        [N, D] in the table's dtype.

    Raises:
        IndexError: a code is below 0 or leads behind the table.
    """
    num_tables = codes.shape[1]
    first = torch.arange(num_tables, dtype=torch.int32, device=codes.device)
    first = first * (table.shape[0] // num_tables)
    return F.embedding(codes + first, table).float().sum(1).to(table.dtype)
