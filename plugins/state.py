"""Where a state buffer keeps an absolute token position.

A ring buffer [slots, R, ...] keeps position p of a slot in row p mod R; a paged buffer
[pages, page_tokens, ...] keeps it in row p mod page_tokens of page page_table[p // page_tokens].
Indexing by position is what makes rolling back a step a matter of forgetting its length.
"""

import torch
from torch import Tensor


def locate(
    buffer: Tensor, positions: Tensor, slot: Tensor, page_table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Index of positions in a buffer, to be used as `buffer[locate(...)]`.

    Args:
        buffer: ring buffer [slots, R, ...] or paged buffer [pages, page_tokens, ...].
        positions: int64 [n], absolute, >= 0; distinct modulo R when they are written.
        slot: int32 [1]; a paged buffer does not use it.
        page_table: int32 [max_pages], or None for a ring buffer.

    Returns:
        Two int64 tensors [n] for the first two dimensions of `buffer`.
    """
    rows_per_entry = buffer.shape[1]
    rows = positions % rows_per_entry
    if page_table is None:
        return slot.long().expand(len(positions)), rows
    return page_table[positions // rows_per_entry].long(), rows


def step_positions(position: Tensor, num_tokens: int) -> Tensor:
    """Absolute positions of the first `num_tokens` rows of a step, int64 [num_tokens]."""
    return position.long() + torch.arange(num_tokens, device=position.device)


def write_step(
    buffer: Tensor,
    rows: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    page_table: Tensor | None = None,
) -> None:
    """Write the valid rows of a step in place; of a step wider than a ring, the rows that stay.

    Args:
        buffer: as for `locate`.
        rows: [T, ...] in the buffer's dtype; rows from `num_tokens` on are padding.
        position: int32 [1], of row 0.
        num_tokens: int32 [1].
        slot: int32 [1].
        page_table: as for `locate`.
    """
    count = int(num_tokens)
    first = max(count - buffer.shape[1], 0) if page_table is None else 0
    positions = step_positions(position, count)[first:]
    buffer[locate(buffer, positions, slot, page_table)] = rows[first:count]


def with_older_rows(
    buffer: Tensor, rows: Tensor, num_older: int, position: Tensor, slot: Tensor
) -> Tensor:
    """The rows of a step behind the `num_older` rows before it, zeros before the first token.

    Args:
        buffer: ring buffer [slots, R, ...] with R >= num_older; it is read only.
        rows: [T, ...] in the buffer's dtype.
        num_older: how many rows to put before them.
        position: int32 [1], of row 0.
        slot: int32 [1].

    Returns:
        [num_older + T, ...]; row i is at position - num_older + i.
    """
    positions = step_positions(position, num_older) - num_older
    older = buffer[locate(buffer, positions, slot, None)]
    older[positions < 0] = 0
    return torch.cat([older, rows])
