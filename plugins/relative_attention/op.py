"""relative_attention: grouped-query attention with a bias by distance, with sinks or without.

    s[t,h,u] = q[t,h] . k[u,g(h)] * scale + bias(t,h,t-u)    for 0 <= t-u < window (0: any)
                                                             and u >= first_key
    bias(t,h,n) = rel[t,h] . bank[:,n] if n < extent, else 0
    out[t,h] = sum_u softmax([s[t,h,:], sinks[t,h]])_u * v[u,g(h)]

and with a gate `sigmoid_gate(out, gate)`, with its bits. The sink takes probability and gives no
value. A row that sees no key is zero. Which keys are read where, and when `kv_write` may run:
`plugins.state.attend_to_session`.

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
from inkrt.plugins.sigmoid_gate.op import sigmoid_gate
from inkrt.plugins.state import attend_to_session, fit_attention, write_step


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
    gate: Tensor | None = None,
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
    if gate is not None:
        axes.fit("gate", gate, "T", "H*d", dtype=q.dtype)
        width = axes["H"] * axes["d"]
        axes.require(axes["H*d"] == width, f"gate has {axes['H*d']} columns, expected H*d={width}")
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
    sizes: tuple[int, int, int] | None = None,
    has_gate: bool = False,
) -> Case:
    """A case; `sizes` are of a head, of relative states and the extent."""

    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        num_heads, num_kv_heads = heads
        head_dim, rel_dim, extent = sizes or (7, 3, window or 9)
        entries = 3 if max_pages is None else max_pages + 2
        # Of wide heads; else a few keys have all the weight, and scores are large for bfloat16.
        q_scale, bank_scale = (0.5, 0.125) if sizes else (1.0, 1.0)
        found: Arguments = {
            "q": normal(generator, dtype, num_rows, num_heads, head_dim, scale=q_scale),
            "k": normal(generator, dtype, num_rows, num_kv_heads, head_dim),
            "v": normal(generator, dtype, num_rows, num_kv_heads, head_dim),
            "rel": normal(generator, dtype, num_rows, num_heads, rel_dim),
            "bank": normal(generator, dtype, rel_dim, extent, scale=bank_scale),
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
            "gate": (
                normal(generator, dtype, num_rows, num_heads * head_dim, scale=2.0)
                if has_gate
                else None
            ),
        }
        if sizes:  # kernels find the step's own rows there; to the reference they are nothing
            where = (found["position"], found["num_tokens"], found["slot"], found["page_table"])
            for rows_name in ("k", "v"):
                write_step(found[f"{rows_name}_cache"], found[rows_name], *where)
        return found

    # Five bfloat16 roundings (see above), three of them on scores that softmax exponentiates.
    # Wide heads come with thousands of keys, whose values cancel.
    return Case(name, arguments, {torch.float32: 5e-6 if sizes else 1e-6, torch.bfloat16: 1.5e-2})


# Head, relative states, extent: of Inkling-2, and of the small checkpoint that comes with inkrt.
_FULL_SIZE = (128, 16, 1024)
_NANO = (32, 8, 128)


def _kernel_cases() -> list[Case]:
    """Sizes that GPU kernels take, at the ends of pages, extent, window and ring."""

    def paged(num_rows: int, position: int, *, num_tokens: int | None = None) -> Case:
        name = f"full size, pages, {num_rows} rows at {position}"
        pages = (position + num_rows - 1) // 64 + 1
        return _case(
            name, num_rows, position, num_tokens=num_tokens, window=0, rows=64, max_pages=pages,
            sizes=_FULL_SIZE, has_gate=True,
        )  # fmt: skip

    def ring(num_rows: int, position: int, *, num_tokens: int | None = None) -> Case:
        name = f"full size, ring, {num_rows} rows at {position}"
        return _case(
            name, num_rows, position, num_tokens=num_tokens, heads=(6, 1), window=1024, rows=1088,
            slot=1, sizes=_FULL_SIZE, has_gate=True,
        )  # fmt: skip

    def nano(name: str, num_rows: int, position: int, *, window: int = 64) -> Case:
        rows, pages = (192, None) if window else (64, (position + num_rows - 1) // 64 + 1)
        return _case(
            f"small, {name}", num_rows, position, heads=(4, 2), window=window, rows=rows,
            max_pages=pages, sizes=_NANO, has_gate=True,
        )  # fmt: skip

    return [
        *(paged(1, context - 1) for context in (1, 63, 64, 65, 1023, 1024, 1025, 8191)),
        paged(8, 1019),
        paged(8, 60, num_tokens=5),
        paged(3, 4222),  # behind a change of how keys are split
        paged(20, 1010, num_tokens=17),
        *(ring(1, context - 1) for context in (1, 64, 1024, 1025, 1088, 1089, 2177)),
        ring(8, 1084),
        ring(5, 1020, num_tokens=3),
        ring(17, 1075, num_tokens=14),
        nano("ring, first token", 1, 0),
        nano("ring, verify over its end", 8, 188),
        nano("ring, prefill", 70, 150),
        nano("pages, verify past the extent", 5, 126, window=0),
        nano("pages, prefill", 33, 100, window=0),
    ]


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
        _case("pages, gate", 5, 14, window=0, rows=4, max_pages=6, has_gate=True),
        _case("ring, gate of padded rows", 8, 12, num_tokens=3, has_gate=True),
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
        *_kernel_cases(),
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
    gate: Tensor | None = None,
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
        gate: [T, H * d], before the sigmoid; or None for a result without a gate.

    Returns:
        [T, H, d] in q's dtype; rows from num_tokens on, and before the first key, are zero.
    """

    def attend(
        rows: slice, keys: Tensor, values: Tensor, distance: Tensor, is_masked: Tensor
    ) -> Tensor:
        bias = _bias(rel[rows], bank, distance)
        row_sinks = None if sinks is None else sinks[rows]
        return _attention(q[rows], keys, values, bias, row_sinks, is_masked, scale)

    out = attend_to_session(
        attend, q, k, v, k_cache, v_cache, page_table, position, num_tokens, slot, window,
        first_key, is_batched=True,
    )  # fmt: skip
    return out if gate is None else sigmoid_gate(out.view(gate.shape), gate).view(out.shape)


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
