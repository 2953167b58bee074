"""embedding: the rows of a token table.

    out[t] = table[tokens[t]]

It does not normalize: the embedding norm of Inkling-2 is a `rms_norm` of its own.
Source: Inkling-2 (`inkling2`), `Inkling2NormedEmbedding` of transformers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import int32, integers, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(tokens: Tensor, table: Tensor) -> Tensor:
    """Shape [T, D] in the table's dtype."""
    axes = Axes("embedding")
    axes.fit("tokens", tokens, "T", dtype=torch.int32)
    axes.fit("table", table, "V", "D", dtype=MODEL_DTYPES)
    return table.new_empty(tokens.shape[0], table.shape[1])


def _case(name: str, num_tokens: int, vocab: int, width: int) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "tokens": integers(generator, vocab, num_tokens),
            "table": normal(generator, dtype, vocab, width),
        }

    return Case(name, arguments)


def _first_and_last_row(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
    return {"tokens": int32(0, 12, 0), "table": normal(generator, dtype, 13, 5)}


def cases() -> list[Case]:
    """One token, several, and both ends of the table with a repeated token."""
    return [
        _case("one token", 1, 13, 7),
        _case("prefill", 11, 29, 55),
        Case("first and last row", _first_and_last_row),
    ]


@operator("embedding", fake=fake, cases=cases)
def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Look up the table's row of every token.

    Args:
        tokens: int32 [T], each in [0, V).
        table: float32 or bfloat16 [V, D].

    Returns:
        [T, D] in the table's dtype.

    Raises:
        IndexError: a token is not in the table.
    """
    return F.embedding(tokens, table)
