"""draft_attention: the rows of a drafted block attend to the context and to their block.

Row j stands at position P + j. It sees

    context keys at p < P, of them those with p >= P + j - (window - 1) if there is a window
    block keys i: all of them, or those with i <= j if the block is causal

and takes the softmax of `sink_attention` over them, with sinks or without. The anchor, row 0, has
no context key yet: the token's features are made by the step that appends it. A window counts the
row itself and bounds the context only: of its block a row sees what the mask above says, however
short the window is. Context keys come from the pages; keys of the block are written nowhere.
Source: dspark.md sections 2.2 and 2.4.
"""

from typing import Any

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal, shuffled_pages
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.sink_attention.op import sink_softmax
from inkrt.plugins.state import locate


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    position: Tensor,
    is_causal: bool,  # noqa: ARG001 (any value is right)
    window: int,
    scale: float,
) -> Tensor:
    """Shape and dtype of q."""
    axes = Axes("draft_attention")
    axes.fit("q", q, "G", "H", "d", dtype=MODEL_DTYPES)
    axes.fit("k", k, "G", "KV", "d", dtype=q.dtype)
    axes.fit("v", v, "G", "KV", "d", dtype=q.dtype)
    if sinks is not None:
        axes.fit("sinks", sinks, "H", dtype=torch.float32)
    axes.fit("k_cache", k_cache, "pages", "rows", "KV", "d", dtype=q.dtype)
    axes.fit("v_cache", v_cache, "pages", "rows", "KV", "d", dtype=q.dtype)
    axes.fit("page_table", page_table, "max_pages", dtype=torch.int32)
    axes.fit("position", position, 1, dtype=torch.int32)
    axes.require(
        axes["H"] % axes["KV"] == 0, f"q has {axes['H']} heads, expected a multiple of {axes['KV']}"
    )
    axes.require(window >= 0, f"window is {window}, expected >= 0")
    axes.require(scale > 0, f"scale is {scale}, expected > 0")
    return q.new_empty(q.shape)


def _case(
    name: str,
    position: int,
    *,
    num_rows: int = 7,
    heads: tuple[int, int] = (6, 2),
    is_causal: bool = False,
    window: int = 0,
    has_sinks: bool = False,
    spread: float = 1.0,
    head_dim: int = 10,
    page_tokens: int = 4,
    max_pages: int = 6,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        num_heads, num_kv_heads = heads
        cache = (max_pages + 2, page_tokens, num_kv_heads, head_dim)
        return {
            "q": normal(generator, dtype, num_rows, num_heads, head_dim, scale=spread),
            "k": normal(generator, dtype, num_rows, num_kv_heads, head_dim, scale=spread),
            "v": normal(generator, dtype, num_rows, num_kv_heads, head_dim),
            "sinks": normal(generator, torch.float32, num_heads, scale=2.0) if has_sinks else None,
            "k_cache": normal(generator, dtype, *cache, scale=spread),
            "v_cache": normal(generator, dtype, *cache),
            "page_table": shuffled_pages(generator, max_pages + 2, max_pages),
            "position": int32(position),
            "is_causal": is_causal,
            "window": window,
            "scale": head_dim**-0.5,
        }

    # As sink_attention: of P, whose errors average out in the sum, and of the result.
    return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 6e-3})


def cases() -> list[Case]:
    """No context, one key, page ends, windows at their edge and below the block, sinks, widths.

    Those of pages of 64 tokens have the layouts that kernels know.
    """

    def paged(name: str, position: int, head_dim: int, **options: Any) -> Case:
        return _case(name, position, head_dim=head_dim, page_tokens=64, **options)

    many: dict[str, Any] = {"is_causal": True, "has_sinks": True, "max_pages": 5}
    return [
        _case("whole context", 22),
        _case("no context", 0),
        _case("no context, causal", 0, is_causal=True),
        _case("one key of context", 1, has_sinks=True),
        _case("last key of a page", 8),
        _case("first key of a page", 9, is_causal=True),
        _case("all pages full", 24),
        _case("context of window-1", 11, window=12),
        _case("context of a window", 12, window=12, is_causal=True),
        _case("context of window+1", 13, window=12, has_sinks=True),
        _case("causal window", 21, window=9, is_causal=True, has_sinks=True),
        _case("window below the block", 17, window=3, is_causal=True),
        _case("window of one", 5, window=1),
        _case("one row", 13, num_rows=1, heads=(4, 4)),
        _case("one kv head, 17 rows", 19, num_rows=17, heads=(8, 1), is_causal=True),
        _case("logits of tens", 20, spread=3.0),
        paged("64 dims", 300, 64, heads=(4, 2)),
        paged("64 dims, no context", 0, 64, heads=(4, 2), is_causal=True),
        paged("64 dims, one key", 1, 64, heads=(4, 2), has_sinks=True),
        paged("64 dims, whole pages", 128, 64, heads=(4, 2), num_rows=8),
        paged("64 dims, all pages full", 384, 64, heads=(4, 2), spread=3.0),
        paged("64 dims, window", 230, 64, heads=(4, 2), window=100, **many),
        paged("64 dims, window below the block", 66, 64, heads=(4, 4), window=3, is_causal=True),
        paged("64 dims, one row", 65, 64, heads=(2, 2), num_rows=1),
        paged("128 dims", 255, 128, heads=(6, 1), max_pages=4),
        paged("128 dims, 42 rows of a head", 70, 128, heads=(12, 2), max_pages=3),
        paged("128 dims, window", 200, 128, heads=(8, 2), window=64, num_rows=8, **many),
        paged("128 dims, 16 rows", 130, 128, heads=(12, 2), num_rows=16, window=130, **many),
        paged("32 dims", 129, 32, heads=(3, 1), has_sinks=True),
    ]


@operator("draft_attention", fake=fake, cases=cases)
def draft_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    position: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> Tensor:
    """Attend from every row of a block.

    Args:
        q: float32 or bfloat16 [G, H, d]; all tensors but the sinks have its dtype.
        k: [G, KV, d], keys of the block; q head h uses kv head h // (H / KV).
        v: [G, KV, d].
        sinks: float32 [H], logits, or None for heads without.
        k_cache: [pages, page_tokens, KV, d]; the positions before the block.
        v_cache: like k_cache.
        page_table: int32 [max_pages]; only entries of positions before the block are read.
        position: int32 [1], P, of row 0.
        is_causal: whether a row sees only block rows up to itself.
        window: positions a row sees, its own included; 0 for all.
        scale: of the scores.

    Returns:
        [G, H, d] in q's dtype.
    """
    first, num_rows = int(position), len(q)
    oldest = max(first - window + 1, 0) if window else 0
    context = torch.arange(oldest, first, device=q.device)
    where = locate(k_cache, context, position, page_table)
    rows = torch.arange(num_rows, device=q.device)[:, None]
    is_masked = torch.zeros(num_rows, len(context) + num_rows, dtype=torch.bool, device=q.device)
    if window:
        is_masked[:, : len(context)] = first + rows - context >= window
    if is_causal:
        is_masked[:, len(context) :] = rows < rows.T
    keys, values = torch.cat([k_cache[where], k]), torch.cat([v_cache[where], v])
    return sink_softmax(q, keys, values, sinks, is_masked, scale).contiguous()
