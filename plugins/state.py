"""Where a state buffer keeps an absolute token position, and how attention reads what it keeps.

A ring buffer [slots, R, ...] keeps position p of a slot in row p mod R; a paged buffer
[pages, page_tokens, ...] keeps it in row p mod page_tokens of page page_table[p // page_tokens].
Indexing by position is what makes rolling back a step a matter of forgetting its length.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.shapes import Axes

# Attention of some rows of a step over keys and values [S, KV, d]: takes the rows, keys, values,
# int64 distances [n, S] from row to key, and where they are out of sight, bool [n, S].
Attend = Callable[[slice, Tensor, Tensor, Tensor, Tensor], Tensor]


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


def attend_to_session(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor | None,
    slot: Tensor,
    window: int,
    first_key: int = 0,
) -> Tensor:
    """Run attention of the valid rows of a step over all keys that they see.

    Keys before the step come from the cache, those of the step from k and v, so it does not matter
    whether `kv_write` runs before or after, as long as a ring has window - 1 + T rows; with fewer
    it must run after, or it overwrites keys still wanted.

    Args:
        attend: called with rows that have a key and end at num_tokens at most; for steps of up to
            MAX_VERIFY_TOKENS rows once per row, with the keys and shapes of a decode step there.
        q: [T, H, d].
        k: [T, KV, d], keys of the step.
        v: like k.
        k_cache: as for `locate`; the positions before the step.
        v_cache: like k_cache.
        page_table: as for `locate`.
        position: int32 [1], of row 0.
        num_tokens: int32 [1], valid rows; None for all.
        slot: int32 [1].
        window: number of keys a row sees, itself included; 0 for all.
        first_key: position of the first key that there is.

    Returns:
        [T, H, d] in q's dtype; rows from num_tokens on, and those without a key, are zero.
    """
    first, count = int(position), len(q) if num_tokens is None else int(num_tokens)
    oldest = min(_oldest_key(first, window, first_key), first)
    where = locate(k_cache, torch.arange(oldest, first, device=q.device), slot, page_table)
    keys = torch.cat([k_cache[where], k[:count]])
    values = torch.cat([v_cache[where], v[:count]])
    positions = step_positions(position, count)
    out = q.new_zeros(q.shape)

    def attend_to(rows: slice, begin: int, end: int) -> Tensor:
        """Rows of the step over the keys at positions begin..end-1."""
        distance = positions[rows, None] - torch.arange(begin, end, device=q.device)
        is_masked = distance < 0
        if window:
            is_masked |= distance >= window
        seen = slice(begin - oldest, end - oldest)
        return attend(rows, keys[seen], values[seen], distance, is_masked)

    start = max(first_key - first, 0)
    if len(q) > MAX_VERIFY_TOKENS and start < count:
        begin = max(oldest, first_key)
        out[start:count] = attend_to(slice(start, count), begin, first + count)
    elif len(q) <= MAX_VERIFY_TOKENS:
        # Each row exactly as a decode step at its position: same keys, same shapes.
        for i in range(start, count):
            begin, end = _oldest_key(first + i, window, first_key), first + i + 1
            out[i : i + 1] = attend_to(slice(i, i + 1), begin, end)
    return out


def fit_attention(
    axes: Axes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    window: int,
    scale: float,
) -> None:
    """Check what attention operators share; q [T, H, d] gives the dtype.

    Raises:
        BuildError: a shape or dtype does not fit, or a ring is too short for the window.
    """
    axes.fit("k", k, "T", "KV", "d", dtype=q.dtype)
    axes.fit("v", v, "T", "KV", "d", dtype=q.dtype)
    axes.fit("k_cache", k_cache, "entries", "rows", "KV", "d", dtype=q.dtype)
    axes.fit("v_cache", v_cache, "entries", "rows", "KV", "d", dtype=q.dtype)
    axes.require(
        axes["H"] % axes["KV"] == 0, f"q has {axes['H']} heads, expected a multiple of {axes['KV']}"
    )
    axes.require(window >= 0, f"window is {window}, expected >= 0")
    axes.require(scale > 0, f"scale is {scale}, expected > 0")
    if page_table is not None:
        axes.fit("page_table", page_table, "max_pages", dtype=torch.int32)
    else:
        axes.require(window > 0, "window is 0 (all keys) on a ring cache, expected a page table")
        axes.require(
            axes["rows"] >= window - 1,
            f"k_cache keeps {axes['rows']} positions, expected at least window-1={window - 1}",
        )


def _oldest_key(position: int, window: int, first_key: int) -> int:
    """Position of the oldest key that a row sees."""
    return max(position - window + 1, first_key) if window else first_key
