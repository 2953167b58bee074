"""kv_write: writes the keys and values of a step into their cache.

    cache[where(position + i)] = row i        for i < num_tokens

`where` is a ring of the slot's last R positions, or the session's pages (see `plugins.state`). Of a
step wider than the ring only the last R rows are written.
Source: the KV cache of Inkling-2, ring for sliding layers and pages for full ones.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, shuffled_pages, step_arguments
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import write_step


def fake(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
) -> None:
    """Checks only; there is no output."""
    axes = Axes("kv_write")
    axes.fit("k", k, "T", "KV", "d", dtype=MODEL_DTYPES)
    axes.fit("v", v, "T", "KV", "d", dtype=k.dtype)
    axes.fit("k_cache", k_cache, "entries", "rows", "KV", "d", dtype=k.dtype)
    axes.fit("v_cache", v_cache, "entries", "rows", "KV", "d", dtype=k.dtype)
    if page_table is not None:
        axes.fit("page_table", page_table, "max_pages", dtype=torch.int32)
    axes.step(position, num_tokens, slot)


def _case(
    name: str,
    num_rows: int,
    position: int,
    *,
    num_tokens: int | None = None,
    rows: int = 5,
    max_pages: int | None = None,
    slot: int = 0,
    heads: tuple[int, int] = (2, 7),
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        entries = 3 if max_pages is None else max_pages + 2
        return {
            "k": normal(generator, dtype, num_rows, *heads),
            "v": normal(generator, dtype, num_rows, *heads),
            "k_cache": normal(generator, dtype, entries, rows, *heads),
            "v_cache": normal(generator, dtype, entries, rows, *heads),
            "page_table": (
                None if max_pages is None else shuffled_pages(generator, entries, max_pages)
            ),
            **step_arguments(position, num_tokens or num_rows, slot),
        }

    # Rows are copied, so there is nothing to round.
    return Case(name, arguments, {torch.float32: 0.0, torch.bfloat16: 0.0})


def cases() -> list[Case]:
    """Ring and pages: first token, wrap, padding; a step wider than the ring or than a page."""
    return [
        _case("ring, first token", 1, 0, slot=1),
        _case("ring, across its end", 4, 8, slot=2),
        _case("ring, padded", 8, 3, num_tokens=2),
        _case("ring, wider step", 13, 2, num_tokens=12),
        _case("pages, first token", 1, 0, max_pages=3),
        _case("pages, across a page's end", 5, 3, max_pages=3, slot=2),
        _case("pages, padded chunk", 11, 4, num_tokens=9, rows=4, max_pages=4),
        _case("ring of pages", 8, 123, rows=128, slot=2, heads=(3, 32)),
        _case("ring of pages, wider step", 150, 60, num_tokens=141, rows=128, heads=(1, 16)),
        _case("over pages of 64", 7, 60, rows=64, max_pages=3, heads=(2, 128)),
        _case(
            "over pages of 64, padded", 80, 61, num_tokens=70, rows=64, max_pages=3, heads=(2, 64)
        ),
    ]


@operator("kv_write", fake=fake, cases=cases, mutates=("k_cache", "v_cache"))
def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
) -> None:
    """Write the valid rows of a step at their positions.

    Args:
        k: float32 or bfloat16 [T, KV, d].
        v: like k.
        k_cache: [slots, R, KV, d], or [pages, page_tokens, KV, d] with a page table. Written.
        v_cache: like k_cache. Written.
        page_table: int32 [max_pages], or None for rings.
        position: int32 [1], of row 0.
        num_tokens: int32 [1], valid rows; the others are not written.
        slot: int32 [1]; pages do not use it.

    Raises:
        IndexError: the page table has no page for a position.
    """
    write_step(k_cache, k, position, num_tokens, slot, page_table)
    write_step(v_cache, v, position, num_tokens, slot, page_table)
