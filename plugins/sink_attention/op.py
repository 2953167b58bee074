"""sink_attention: grouped-query attention with one learned sink logit per head.

    S[t,h,u] = q[t,h] . k[u,g(h)]                for 0 <= t-u < window (0: any); float32
    m        = max_u S[t,h,u],  c = scale * log2(e)
    P[u]     = exp2((S[u] - m) c),  l = sum_u P[u] + exp2(sinks[h] log2(e) - m c)
    out[t,h] = dtype( (sum_u dtype(P[u]) v[u,g(h)]) / l )

The sink takes probability and gives no value; it is no part of the maximum. Sums are float32, the
one in l is of the unrounded P. A kernel may split the keys, refer each part to a maximum of its own
and use ex2.approx (relative error 2^-22); P is then rounded at other points, which is what the
tolerance is for. Which keys are read where, and when `kv_write` may run:
`plugins.state.attend_to_session`.
Source: flint.md sections 4 to 6. transformers gives the sink a column of its softmax instead.
"""

import math

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, shuffled_pages, step_arguments
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import attend_to_session, fit_attention

LOG2_E = math.log2(math.e)


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Shape and dtype of q."""
    axes = Axes("sink_attention")
    axes.fit("q", q, "T", "H", "d", dtype=MODEL_DTYPES)
    axes.fit("sinks", sinks, "H", dtype=torch.float32)
    axes.step(position, num_tokens, slot)
    fit_attention(axes, q, k, v, k_cache, v_cache, page_table, window, scale)
    return q.new_empty(q.shape)


def _case(
    name: str,
    num_rows: int,
    position: int,
    *,
    num_tokens: int | None = None,
    heads: tuple[int, int] = (8, 1),
    window: int = 6,
    rows: int = 8,
    max_pages: int | None = None,
    slot: int = 0,
    spread: float = 1.0,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        num_heads, num_kv_heads = heads
        head_dim = 10
        entries = 3 if max_pages is None else max_pages + 2
        cache = (entries, rows, num_kv_heads, head_dim)
        return {
            "q": normal(generator, dtype, num_rows, num_heads, head_dim, scale=spread),
            "k": normal(generator, dtype, num_rows, num_kv_heads, head_dim, scale=spread),
            "v": normal(generator, dtype, num_rows, num_kv_heads, head_dim),
            "sinks": normal(generator, torch.float32, num_heads, scale=2.0),
            "k_cache": normal(generator, dtype, *cache, scale=spread),
            "v_cache": normal(generator, dtype, *cache),
            "page_table": (
                None if max_pages is None else shuffled_pages(generator, entries, max_pages)
            ),
            **step_arguments(position, num_tokens or num_rows, slot),
            "window": window,
            "scale": head_dim**-0.5,
        }

    # Two bfloat16 roundings: of P, whose errors average out in the sum, and of the result.
    return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 6e-3})


def cases() -> list[Case]:
    """Rings at the window's edge and their wrap, pages and their ends, padding, large logits."""
    return [
        _case("ring, first token", 1, 0, slot=1),
        _case("ring, last token before the window is full", 1, 5),
        _case("ring, first token to drop a key", 1, 6, slot=2),
        _case("ring, verify across its end", 5, 13, heads=(4, 4)),
        _case("ring of window-1, padded verify", 8, 12, num_tokens=3, rows=5),
        _case("ring, prefill wider than it", 13, 0, num_tokens=11, heads=(6, 2)),
        _case("ring, later chunk", 11, 19, heads=(16, 2), slot=1),
        _case("window of one", 3, 4, window=1),
        _case("pages, first token", 1, 0, window=0, rows=4, max_pages=1),
        _case("pages, verify over a page's end", 5, 14, window=0, rows=4, max_pages=6),
        _case("pages, padded chunk", 13, 6, num_tokens=9, window=0, rows=4, max_pages=4),
        _case("pages with a window", 4, 9, window=6, rows=4, max_pages=4),
        _case("pages, logits of tens", 3, 20, window=0, rows=4, max_pages=6, spread=3.0),
    ]


@operator("sink_attention", fake=fake, cases=cases)
def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Attend from the valid rows of a step to the session's keys up to each row.

    Args:
        q: float32 or bfloat16 [T, H, d]; all tensors but the sinks have its dtype.
        k: [T, KV, d], keys of the step; q head h uses kv head h // (H / KV).
        v: [T, KV, d].
        sinks: float32 [H], logits.
        k_cache: [slots, R, KV, d] with R >= window - 1, or [pages, page_tokens, KV, d] with a page
            table. Holds the positions before the step.
        v_cache: like k_cache.
        page_table: int32 [max_pages], or None for rings.
        position: int32 [1], of row 0.
        num_tokens: int32 [1], valid rows.
        slot: int32 [1]; pages do not use it.
        window: number of keys a row sees, itself included; 0 for all.
        scale: of the scores.

    Returns:
        [T, H, d] in q's dtype; rows from num_tokens on are zero.
    """

    def attend(
        rows: slice, keys: Tensor, values: Tensor, _distance: Tensor, is_masked: Tensor
    ) -> Tensor:
        return sink_softmax(q[rows].clone(), keys[0], values[0], sinks, is_masked, scale)

    return attend_to_session(
        attend, q, k, v, k_cache, v_cache, page_table, position, num_tokens, slot, window
    )


def sink_softmax(
    q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, is_masked: Tensor, scale: float
) -> Tensor:
    """The equations above.

    Args:
        q: [n, H, d].
        keys: [S, KV, d], of which every row sees at least one.
        values: [S, KV, d].
        sinks: float32 [H], or None for heads without.
        is_masked: bool [n, S].
        scale: of the scores.

    Returns:
        [n, H, d] in q's dtype.
    """
    groups = q.shape[1] // keys.shape[1]
    keys = keys.float().transpose(0, 1).repeat_interleave(groups, dim=0)  # [H, S, d]
    values = values.float().transpose(0, 1).repeat_interleave(groups, dim=0)
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2)  # [H, n, S]
    scores = scores.masked_fill(is_masked, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    to_log2 = scale * LOG2_E
    p = torch.exp2((scores - largest) * to_log2)
    total = p.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp2(sinks[:, None, None] * LOG2_E - largest * to_log2)
    out = (p.to(q.dtype).float() @ values) / total
    return out.to(q.dtype).transpose(0, 1)
