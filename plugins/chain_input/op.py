"""chain_input: what a chained drafter reads of a token: its embedding and the hidden row before.

    out[t] = [ hidden at position p-1 | embedded[t] ]      p = position + t, or the halves swapped
    out[t] = 0                                             for p < first_row

Bits are copied, there is no arithmetic. The ring of state keeps hidden rows by position, for the
first row of the next step. Depth i of a chain has nothing to read for its first i+1 tokens; rows of
zeros stay zeros through projections, convolutions and norms, and attention is told not to see them.
Source: dspark.md section 9.1, with entries at the position of the token that they read.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, step_arguments
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import step_positions, with_older_rows, write_step


def fake(
    hidden: Tensor | None,
    embedded: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor | None,
    slot: Tensor,
    first_row: int,
    hidden_first: bool,  # noqa: ARG001
) -> Tensor:
    """[T, 2 D] in the dtype of embedded."""
    axes = Axes("chain_input")
    axes.fit("embedded", embedded, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("state", state, "slots", "R", "D", dtype=embedded.dtype)
    axes.step(position, num_tokens, slot)
    num_hidden = 0
    if hidden is not None:
        axes.fit("hidden", hidden, "N", "D", dtype=embedded.dtype)
        num_hidden = axes["N"]
    needed = axes["T"] - (1 if num_tokens is None else 0)
    axes.require(num_hidden >= needed, f"hidden has {num_hidden} rows, expected at least {needed}")
    axes.require(first_row >= 0, f"first_row is {first_row}, expected >= 0")
    return embedded.new_empty(axes["T"], 2 * axes["D"])


def _case(
    name: str,
    num_rows: int,
    position: int,
    *,
    num_tokens: int | None = None,
    first_row: int = 0,
    hidden_first: bool = True,
    ring: int = 5,
    slot: int = 0,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "hidden": normal(generator, dtype, num_rows, 7),
            "embedded": normal(generator, dtype, num_rows, 7),
            "state": normal(generator, dtype, 3, ring, 7),
            **step_arguments(position, num_tokens or num_rows, slot),
            "first_row": first_row,
            "hidden_first": hidden_first,
        }

    return Case(name, arguments, {torch.float32: 0.0, torch.bfloat16: 0.0})


def cases() -> list[Case]:
    """First tokens, rows before the first, a step wider than the ring, padding, both orders."""
    return [
        _case("first token", 1, 0, slot=1, first_row=1),
        _case("second token", 1, 1, first_row=1),
        _case("over the first row", 5, 1, first_row=3, hidden_first=False),
        _case("all before the first row", 4, 0, first_row=8),
        _case("verify across the ring's end", 5, 8, slot=2, hidden_first=False),
        _case("padded verify", 8, 4, num_tokens=3, ring=16),
        _case("prefill wider than the ring", 11, 0, first_row=2),
    ]


@operator("chain_input", fake=fake, cases=cases, mutates=("state",))
def chain_input(
    hidden: Tensor | None,
    embedded: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor | None,
    slot: Tensor,
    first_row: int,
    hidden_first: bool,
) -> Tensor:
    """Put each token's embedding beside the hidden row of the token before it.

    Args:
        hidden: float32 or bfloat16 [N, D], rows of positions `position` and up, N >= T; N >= T-1 or
            None for T = 1 in a step that remembers nothing.
        embedded: [T, D], all tensors of one dtype.
        state: [slots, R, D]; a ring of hidden rows by position. Written.
        position: int32 [1], of row 0.
        num_tokens: int32 [1], valid rows; the others are not remembered. None for a step that
            remembers nothing.
        slot: int32 [1].
        first_row: position of the first token that has an input.
        hidden_first: whether the hidden half stands in front.

    Returns:
        [T, 2 D].
    """
    num_rows = len(embedded)
    hidden = embedded.new_empty(0, embedded.shape[1]) if hidden is None else hidden
    before = with_older_rows(state, hidden, 1, position, slot)[:num_rows]
    out = torch.cat([before, embedded] if hidden_first else [embedded, before], dim=1)
    out[step_positions(position, num_rows) < first_row] = 0
    if num_tokens is not None:
        write_step(state, hidden, position, num_tokens, slot)
    return out
