"""Where a state buffer keeps an absolute token position, and how attention reads what it keeps.

A ring buffer [slots, R, ...] keeps position p of a slot in row p mod R; a paged buffer
[pages, page_tokens, ...] keeps it in row p mod page_tokens of page page_table[p // page_tokens].
Indexing by position is what makes rolling back a step a matter of forgetting its length.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.shapes import Axes

# Attention of some rows of a step, [n, H, d]: takes the rows, their keys and values, [1, S, KV, d]
# for all or [n, S, KV, d] for each, int64 distances [n, S] from row to key, and where keys are out
# of sight, bool [n, S].
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


@lru_cache
def _ring_rows(begin: int, end: int, num_rows: int, device: torch.device) -> Tensor:
    """Rows of a ring that keep positions begin..end-1, int64; shared by launches of a step."""
    return torch.arange(begin, end, device=device) % num_rows


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
    begin, count = int(position), int(num_tokens)
    if page_table is None:
        first = max(count - buffer.shape[1], 0)
        where = _ring_rows(begin + first, begin + count, buffer.shape[1], buffer.device)
        buffer[int(slot)][where] = rows[first:count]
    else:
        positions = torch.arange(begin, begin + count, device=buffer.device)
        buffer[locate(buffer, positions, slot, page_table)] = rows[:count]


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
    first = int(position)
    missing = max(num_older - first, 0)
    where = _ring_rows(first - num_older + missing, first, buffer.shape[1], buffer.device)
    older = buffer[int(slot)][where]
    if missing:
        older = torch.cat([buffer.new_zeros(missing, *buffer.shape[2:]), older])
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
    *,
    is_batched: bool = False,
) -> Tensor:
    """Run attention of the valid rows of a step over all keys that they see.

    Keys before the step come from the cache, those of the step from k and v, so it does not matter
    whether `kv_write` runs before or after, as long as a ring has window - 1 + T rows; with fewer
    it must run after, or it overwrites keys still wanted.

    Args:
        attend: called with rows that have a key and end at num_tokens at most; for steps of up to
            MAX_VERIFY_TOKENS rows once per row, with the keys and shapes of a decode step there, or
            `is_batched`.
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
        is_batched: whether attend takes several rows of a narrow step, giving each the bits that it
            has alone: those that see equally many keys.

    Returns:
        [T, H, d] in q's dtype; rows from num_tokens on, and those without a key, are zero.
    """
    first, count = int(position), len(q) if num_tokens is None else int(num_tokens)
    oldest = min(_oldest_key(first, window, first_key), first)
    where = locate(k_cache, torch.arange(oldest, first, device=q.device), slot, page_table)
    keys = torch.cat([k_cache[where], k[:count]])
    values = torch.cat([v_cache[where], v[:count]])
    out = q.new_zeros(q.shape)
    start = max(first_key - first, 0)  # rows before it have no key
    if len(q) > MAX_VERIFY_TOKENS:
        if start < count:
            begin = max(oldest, first_key)
            positions = step_positions(position, count)[start:]
            distance = positions[:, None] - torch.arange(begin, first + count, device=q.device)
            is_masked = distance < 0
            if window:
                is_masked |= distance >= window
            seen = slice(begin - oldest, None)
            out[start:count] = attend(
                slice(start, count), keys[None, seen], values[None, seen], distance, is_masked
            )
        return out
    sights = _sights(first, start, count, window, first_key, is_batched, q.device)
    for rows, seen_at, distance, is_masked in sights:
        places = seen_at - oldest
        out[rows] = attend(rows, keys[places], values[places], distance, is_masked)
    return out


@lru_cache(maxsize=16)
def _sights(
    first: int,
    start: int,
    count: int,
    window: int,
    first_key: int,
    is_batched: bool,
    device: torch.device,
) -> list[tuple[slice, Tensor, Tensor, Tensor]]:
    """What the rows of a narrow step see; launches of a step share it.

    A row is treated exactly as in a decode step at its position: same keys, same shapes.

    Args:
        first: position of row 0.
        start: first row with a key.
        count: valid rows.
        window: number of keys a row sees, itself included; 0 for all.
        first_key: position of the first key that there is.
        is_batched: see `attend_to_session`.
        device: of the results.

    Returns:
        Rows and, int64 [n, S] each, the positions of the keys they see and their distances; and
        which are masked, bool [n, S], none of them.
    """
    begins = [_oldest_key(first + i, window, first_key) for i in range(count)]
    sizes = [first + i + 1 - begin for i, begin in enumerate(begins)]
    sights = []
    row = start
    while row < count:
        # A row sees at least as many keys as the row before it.
        stop = row + (sizes[row:].count(sizes[row]) if is_batched else 1)
        begin = torch.tensor(begins[row:stop], device=device)[:, None]
        seen = begin + torch.arange(sizes[row], device=device)
        distance = torch.arange(first + row, first + stop, device=device)[:, None] - seen
        sights.append((slice(row, stop), seen, distance, distance < 0))
        row = stop
    return sights


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
