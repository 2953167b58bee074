"""relative_attention: grouped-query attention with a bias by distance, with sinks or without.

    s[t,h,u] = q[t,h] . k[u,g(h)] * scale + bias(t,h,t-u)    for 0 <= t-u < window (0: any)
                                                             and u >= first_key
    bias(t,h,n) = rel[t,h] . bank[:,n] if n < extent, else 0
    out[t,h] = sum_u softmax([s[t,h,:], sinks[t,h]])_u * v[u,g(h)]

The sink takes probability and gives no value. A row that sees no key is zero. Which keys are read
where, and when `kv_write` may run: `plugins.state.attend_to_session`.

In bfloat16 the product, its scaling, the bias and its addition round to bfloat16 each; softmax is
float32 and its probabilities round to bfloat16. These are the steps of `[HF eager]` in the model
facts. A fused kernel keeps scores in float32 and is compared with this within a tolerance.
Source: Inkling-2 attention, `eager_attention_forward` and `Inkling2RelativePositionBias` of
transformers; bit-equal to them for a prefill of more than 8 rows. Inkling attention has no sinks,
and its chained drafters no keys at their first positions.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, shuffled_pages, step_arguments
from inkrt.plugins.narrow import linear_rows, row_by_row
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import attend_to_session, fit_attention


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    bank: Tensor,
    sinks: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor | None,
    slot: Tensor,
    window: int,
    scale: float,
    first_key: int = 0,
) -> Tensor:
    """Shape and dtype of q."""
    axes = Axes("relative_attention")
    axes.fit("q", q, "T", "H", "d", dtype=MODEL_DTYPES)
    axes.fit("rel", rel, "T", "H", "r", dtype=q.dtype)
    axes.fit("bank", bank, "r", "extent", dtype=q.dtype)
    if sinks is not None:
        axes.fit("sinks", sinks, "T", "H", dtype=q.dtype)
    axes.require(first_key >= 0, f"first_key is {first_key}, expected >= 0")
    axes.step(position, num_tokens, slot)
    fit_attention(axes, q, k, v, k_cache, v_cache, page_table, window, scale)
    return q.new_empty(q.shape)


def _case(
    name: str,
    num_rows: int,
    position: int,
    *,
    num_tokens: int | None = None,
    heads: tuple[int, int] = (6, 2),
    window: int = 6,
    rows: int = 8,
    max_pages: int | None = None,
    slot: int = 0,
    has_sinks: bool = True,
    first_key: int = 0,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        num_heads, num_kv_heads = heads
        head_dim, rel_dim, extent = 7, 3, window or 9
        entries = 3 if max_pages is None else max_pages + 2
        return {
            "q": normal(generator, dtype, num_rows, num_heads, head_dim),
            "k": normal(generator, dtype, num_rows, num_kv_heads, head_dim),
            "v": normal(generator, dtype, num_rows, num_kv_heads, head_dim),
            "rel": normal(generator, dtype, num_rows, num_heads, rel_dim),
            "bank": normal(generator, dtype, rel_dim, extent),
            "sinks": normal(generator, dtype, num_rows, num_heads) if has_sinks else None,
            "k_cache": normal(generator, dtype, entries, rows, num_kv_heads, head_dim),
            "v_cache": normal(generator, dtype, entries, rows, num_kv_heads, head_dim),
            "page_table": (
                None if max_pages is None else shuffled_pages(generator, entries, max_pages)
            ),
            **step_arguments(position, num_tokens or num_rows, slot),
            "window": window,
            "scale": head_dim**-0.5,
            "first_key": first_key,
        }

    # Five bfloat16 roundings (see above), three of them on scores that softmax exponentiates.
    return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 1.5e-2})


def cases() -> list[Case]:
    """Rings around the window's edge and their wrap; pages around extent and page ends; padding."""
    return [
        _case("ring, first token", 1, 0, slot=1),
        _case("ring, last token before the window is full", 1, 5),
        _case("ring, first token to drop a key", 1, 6, slot=2),
        _case("ring, verify across its end", 5, 13, heads=(4, 4)),
        _case("ring of window-1, padded verify", 8, 12, num_tokens=3, rows=5),
        _case("ring, prefill wider than it", 13, 0, num_tokens=11),
        _case("ring, later chunk", 11, 19, heads=(3, 1), slot=1),
        _case("window of one", 3, 4, window=1),
        _case("pages, first token", 1, 0, window=0, rows=4, max_pages=1),
        _case("pages, verify past the extent", 5, 14, window=0, rows=4, max_pages=6),
        _case("pages, padded chunk", 13, 6, num_tokens=9, window=0, rows=4, max_pages=4),
        _case("pages with a window", 4, 9, window=6, rows=4, max_pages=4),
        _case("no sinks", 5, 13, heads=(4, 4), has_sinks=False),
        _case("no sinks, one key", 1, 0, window=0, rows=4, max_pages=1, has_sinks=False),
        _case("ring, rows before the first key", 5, 0, has_sinks=False, first_key=3),
        _case("ring, all rows before it", 2, 1, has_sinks=False, first_key=4),
        _case("pages, prefill over it", 13, 0, window=0, rows=4, max_pages=4, first_key=5,
              has_sinks=False),
        _case("pages, all of a chunk before it", 9, 0, window=0, rows=4, max_pages=4, first_key=9,
              has_sinks=False),
        _case("ring, window over it", 5, 6, has_sinks=False, first_key=4),
        _case("pages, sinks and a first key", 4, 9, window=6, rows=4, max_pages=4, first_key=7),
    ]  # fmt: skip


@operator("relative_attention", fake=fake, cases=cases)
def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    bank: Tensor,
    sinks: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor | None,
    slot: Tensor,
    window: int,
    scale: float,
    first_key: int = 0,
) -> Tensor:
    """Attend from the valid rows of a step to the session's keys up to each row.

    Args:
        q: float32 or bfloat16 [T, H, d]; all tensors of one dtype.
        k: [T, KV, d], keys of the step; q head h uses kv head h // (H / KV).
        v: [T, KV, d].
        rel: [T, H, r], relative states.
        bank: [r, extent], a profile of bias by distance for each relative state.
        sinks: [T, H], logits; or None for heads without.
        k_cache: [slots, R, KV, d] with R >= window - 1, or [pages, page_tokens, KV, d] with a page
            table. Holds the positions before the step.
        v_cache: like k_cache.
        page_table: int32 [max_pages], or None for rings.
        position: int32 [1], of row 0.
        num_tokens: int32 [1], valid rows; None for all.
        slot: int32 [1]; pages do not use it.
        window: number of keys a row sees, itself included; 0 for all.
        scale: of the scores.
        first_key: position of the first key that there is.

    Returns:
        [T, H, d] in q's dtype; rows from num_tokens on, and before the first key, are zero.
    """

    def attend(
        rows: slice, keys: Tensor, values: Tensor, distance: Tensor, is_masked: Tensor
    ) -> Tensor:
        bias = _bias(rel[rows], bank, distance)
        row_sinks = None if sinks is None else sinks[rows]
        return _attention(q[rows], keys, values, bias, row_sinks, is_masked, scale)

    return attend_to_session(
        attend, q, k, v, k_cache, v_cache, page_table, position, num_tokens, slot, window,
        first_key, is_batched=True,
    )  # fmt: skip


def _bias(rel: Tensor, bank: Tensor, distance: Tensor) -> Tensor:
    """Bias [n, H, S] of relative states [n, H, r] at distances int64 [n, S]."""
    extent = bank.shape[1]
    by_distance = linear_rows(rel, bank.T)  # [n, H, extent]
    index = distance.clamp(0, extent - 1)[:, None].expand(-1, rel.shape[1], -1)
    outside = (distance < 0) | (distance >= extent)
    return by_distance.gather(-1, index).masked_fill(outside[:, None], 0.0)


def _attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    sinks: Tensor | None,
    is_masked: Tensor,
    scale: float,
) -> Tensor:
    """Output [n, H, d] of q [n, H, d] over keys and values [b, S, KV, d].

    b is 1 if the rows share the keys, else n. The bias is [n, H, S], the sinks [n, H] or None,
    and the mask bool [n, S].
    """
    num_heads, head_dim = q.shape[1:]
    num_batches, _, num_kv, _ = keys.shape
    groups = num_heads // num_kv

    def by_head(x: Tensor) -> Tensor:
        """[b, S, KV, d] to [b, H, S, d]."""
        x = x.transpose(1, 2)[:, :, None].expand(-1, -1, groups, -1, -1)
        return x.reshape(num_batches, num_heads, -1, head_dim)

    queries = q.view(num_batches, -1, num_heads, head_dim).transpose(1, 2)  # [b, H, n / b, d]
    products = row_by_row(torch.matmul, queries, by_head(keys).transpose(2, 3))
    scores = (products * scale).transpose(1, 2).flatten(0, 1)
    scores = (scores + bias).masked_fill(is_masked[:, None], float("-inf"))
    logits = scores if sinks is None else torch.cat([scores, sinks[..., None]], dim=-1)
    probabilities = torch.softmax(logits.float(), dim=-1)[..., : scores.shape[-1]].to(q.dtype)
    weights = probabilities.view(num_batches, -1, *probabilities.shape[1:]).transpose(1, 2)
    return row_by_row(torch.matmul, weights, by_head(values)).transpose(1, 2).reshape(q.shape)
