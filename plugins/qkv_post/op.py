"""qkv_post: what happens between the input projections of an attention layer and the attention.

    q   = log_scale(l2_clip(q, q_scale, qk_threshold))            log_scale if log_n_floor > 0
    rel = log_scale(l2_clip(rel, rel_scale, rel_threshold))       likewise
    k   = l2_clip(conv(k), qk_threshold)                          no scale, never log_scale
    v   = rms_norm(conv(v))                                       per head, no weight
    kv_write(k, v)

`conv` is `dynamic_short_conv` where the layer has per-token taps (k_dynamic, v_dynamic given), else
`short_conv`. It has the bits of those operators one after the other. Source: inkling2.md section
5.3. Letters: T tokens, H query heads, KV key/value heads, d head size, r relative size, W taps, R
rows of a ring.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, shuffled_pages, step_arguments
from inkrt.plugins.dynamic_short_conv.op import dynamic_short_conv
from inkrt.plugins.kv_write.op import kv_write
from inkrt.plugins.l2_clip.op import l2_clip
from inkrt.plugins.log_scale.op import log_scale
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.rms_norm.op import rms_norm
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.short_conv.op import short_conv


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    q_scale: Tensor,
    rel_scale: Tensor,
    k_conv_weight: Tensor,
    v_conv_weight: Tensor,
    k_dynamic: Tensor | None,
    v_dynamic: Tensor | None,
    k_conv_state: Tensor,
    v_conv_state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    qk_threshold: float,
    rel_threshold: float,
    log_n_floor: int,
    log_alpha: float,  # noqa: ARG001
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads of q, k, v and rel, in the model's dtype."""
    axes = Axes("qkv_post")
    axes.fit("q_scale", q_scale, "H", "d", dtype=MODEL_DTYPES)
    axes.fit("rel_scale", rel_scale, "H", "r", dtype=MODEL_DTYPES)
    # The first axis is a slot in a ring and a page in a paged cache.
    axes.fit("k_cache", k_cache, "S", "P", "KV", "d", dtype=q.dtype)
    axes.fit("v_cache", v_cache, "S", "P", "KV", "d", dtype=q.dtype)
    axes.fit("q", q, "T", "H*d", dtype=MODEL_DTYPES)
    axes.fit("k", k, "T", "KV*d", dtype=q.dtype)
    axes.fit("v", v, "T", "KV*d", dtype=q.dtype)
    axes.fit("rel", rel, "T", "H*r", dtype=q.dtype)
    _fit_product(axes, "q", "H", "d")
    _fit_product(axes, "k", "KV", "d")
    _fit_product(axes, "rel", "H", "r")
    for name, weight, dynamic, state in (
        ("k", k_conv_weight, k_dynamic, k_conv_state),
        ("v", v_conv_weight, v_dynamic, v_conv_state),
    ):
        if dynamic is None:
            axes.fit(f"{name}_conv_weight", weight, "KV*d", "W", dtype=torch.float32)
        else:
            axes.fit(f"{name}_conv_weight", weight, "W", "KV*d", dtype=MODEL_DTYPES)
            axes.fit(f"{name}_dynamic", dynamic, "T", "KV*W", dtype=MODEL_DTYPES)
            _fit_product(axes, f"{name}_dynamic", "KV", "W")
        axes.fit(f"{name}_conv_state", state, "slots", "R", "KV*d", dtype=q.dtype)
        axes.require(
            axes["R"] >= axes["W"] - 1,
            f"{name}_conv_state keeps {axes['R']} positions, expected at least W-1={axes['W'] - 1}",
        )
    if page_table is not None:
        axes.fit("page_table", page_table, "max_pages", dtype=torch.int32)
    axes.step(position, num_tokens, slot)
    axes.require(qk_threshold > 0, f"qk_threshold is {qk_threshold}, expected > 0")
    axes.require(rel_threshold > 0, f"rel_threshold is {rel_threshold}, expected > 0")
    axes.require(log_n_floor >= 0, f"log_n_floor is {log_n_floor}, expected >= 0, 0 being off")
    axes.require(eps > 0, f"eps is {eps}, expected > 0")
    rows = axes["T"]
    return (
        q.new_empty((rows, axes["H"], axes["d"])),
        k.new_empty((rows, axes["KV"], axes["d"])),
        v.new_empty((rows, axes["KV"], axes["d"])),
        rel.new_empty((rows, axes["H"], axes["r"])),
    )


def _fit_product(axes: Axes, name: str, left: str, right: str) -> None:
    """Check the columns of `name`, bound as "left*right"."""
    got, expected = axes[f"{left}*{right}"], axes[left] * axes[right]
    axes.require(got == expected, f"{name} has {got} columns, expected {left}*{right}={expected}")


def cases() -> list[Case]:
    """Ring and paged caches, static and dynamic taps, the start of a timeline, padding rows."""

    def make(
        name: str, *, dynamic: bool, paged: bool, num_rows: int, num_tokens: int, position: int,
        heads: tuple[int, int] = (6, 3), sizes: tuple[int, int] = (10, 5), log_n_floor: int = 0,
        cache: tuple[int, int] = (12, 4),
    ) -> Case:  # fmt: skip
        num_heads, num_kv = heads
        head_size, rel_size = sizes
        channels = num_kv * head_size
        taps, ring_rows = 4, 16
        num_pages, page_tokens = cache  # or three rings of num_pages * page_tokens / 3 rows

        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            def conv_weight() -> Tensor:
                if dynamic:
                    return normal(generator, dtype, taps, channels, scale=0.5)
                return normal(generator, torch.float32, channels, taps, scale=0.5)

            def taps_of_tokens() -> Tensor | None:
                return normal(generator, dtype, num_rows, num_kv * taps) if dynamic else None

            first = (num_pages, page_tokens)
            if not paged:
                first = (3, 32 if page_tokens == 4 else num_pages * page_tokens // 3)
            return {
                "q": normal(generator, dtype, num_rows, num_heads * head_size, scale=3.0),
                "k": normal(generator, dtype, num_rows, channels, scale=3.0),
                "v": normal(generator, dtype, num_rows, channels),
                "rel": normal(generator, dtype, num_rows, num_heads * rel_size, scale=4.0),
                "q_scale": 1 + normal(generator, dtype, num_heads, head_size, scale=0.3),
                "rel_scale": 1 + normal(generator, dtype, num_heads, rel_size, scale=0.3),
                "k_conv_weight": conv_weight(),
                "v_conv_weight": conv_weight(),
                "k_dynamic": taps_of_tokens(),
                "v_dynamic": taps_of_tokens(),
                "k_conv_state": normal(generator, dtype, 3, ring_rows, channels),
                "v_conv_state": normal(generator, dtype, 3, ring_rows, channels),
                "k_cache": normal(generator, dtype, *first, num_kv, head_size),
                "v_cache": normal(generator, dtype, *first, num_kv, head_size),
                "page_table": shuffled_pages(generator, num_pages, num_pages) if paged else None,
                **step_arguments(position, num_tokens, slot=1),
                "qk_threshold": 8.0,
                "rel_threshold": 7.0,
                "log_n_floor": log_n_floor,
                "log_alpha": 0.1,
                "eps": 1e-6,
            }

        return Case(name, arguments)

    return [
        make("first_token", dynamic=False, paged=False, num_rows=1, num_tokens=1, position=0),
        make("ring_wraps", dynamic=False, paged=False, num_rows=5, num_tokens=5, position=30),
        make("padding", dynamic=False, paged=False, num_rows=13, num_tokens=11, position=2),
        make(
            "paged_dynamic",
            dynamic=True,
            paged=True,
            num_rows=7,
            num_tokens=7,
            position=21,
            log_n_floor=24,
        ),
        make(
            "one_kv_head",
            dynamic=True,
            paged=True,
            num_rows=11,
            num_tokens=9,
            position=1,
            heads=(1, 1),
            sizes=(7, 3),
            log_n_floor=5,
        ),
        # Sizes that kernels take: pages of 64 positions, heads and relative states of 2^n values.
        make(
            "ring_of_pages",
            dynamic=False,
            paged=False,
            num_rows=8,
            num_tokens=8,
            position=123,
            heads=(4, 2),
            sizes=(32, 8),
            cache=(6, 64),
        ),
        make(
            "over_a_page",
            dynamic=True,
            paged=True,
            num_rows=7,
            num_tokens=7,
            position=60,
            heads=(6, 1),
            sizes=(128, 16),
            log_n_floor=62,
            cache=(5, 64),
        ),
        make(
            "first_of_a_slot",
            dynamic=False,
            paged=False,
            num_rows=1,
            num_tokens=1,
            position=0,
            heads=(12, 2),
            sizes=(128, 16),
            cache=(3, 64),
        ),
        make(
            "two_tokens_of_two",
            dynamic=True,
            paged=True,
            num_rows=2,
            num_tokens=2,
            position=1,
            heads=(3, 1),
            sizes=(64, 4),
            cache=(5, 64),
        ),
        # Where a model of 262,144 positions ends, and queries grow with the position.
        make(
            "last_positions",
            dynamic=True,
            paged=True,
            num_rows=8,
            num_tokens=8,
            position=262_136,
            heads=(2, 1),
            sizes=(16, 8),
            log_n_floor=128_000,
            cache=(4096, 64),
        ),
        make(
            "last_positions_of_a_ring",
            dynamic=False,
            paged=False,
            num_rows=8,
            num_tokens=8,
            position=262_136,
            heads=(4, 2),
            sizes=(32, 8),
            cache=(5 * 3, 64),
        ),
        make(
            "growth_begins",
            dynamic=True,
            paged=True,
            num_rows=8,
            num_tokens=8,
            position=127_996,
            heads=(2, 1),
            sizes=(16, 8),
            log_n_floor=128_000,
            cache=(2001, 64),
        ),
        make(
            "chunk_over_its_rings",
            dynamic=False,
            paged=False,
            num_rows=60,
            num_tokens=57,
            position=94,
            heads=(4, 2),
            sizes=(32, 8),
            cache=(6, 64),
        ),
        make(
            "dynamic_chunk_over_pages",
            dynamic=True,
            paged=True,
            num_rows=70,
            num_tokens=67,
            position=2,
            heads=(2, 2),
            sizes=(16, 16),
            log_n_floor=30,
            cache=(5, 64),
        ),
        make(
            "short_chunk",
            dynamic=True,
            paged=True,
            num_rows=40,
            num_tokens=2,
            position=126,
            heads=(2, 1),
            sizes=(64, 16),
            cache=(5, 64),
        ),
    ]


@operator(
    "qkv_post",
    fake=fake,
    cases=cases,
    mutates=("k_conv_state", "v_conv_state", "k_cache", "v_cache"),
)
def qkv_post(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    q_scale: Tensor,
    rel_scale: Tensor,
    k_conv_weight: Tensor,
    v_conv_weight: Tensor,
    k_dynamic: Tensor | None,
    v_dynamic: Tensor | None,
    k_conv_state: Tensor,
    v_conv_state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    qk_threshold: float,
    rel_threshold: float,
    log_n_floor: int,
    log_alpha: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finish queries, keys, values and relative states of a step, and store keys and values.

    Args:
        q: [T, H * d] float32 or bfloat16, output of the projection, as the three below.
        k: [T, KV * d].
        v: [T, KV * d].
        rel: [T, H * r].
        q_scale: [H, d].
        rel_scale: [H, r].
        k_conv_weight: float32 [KV * d, W], or the model's dtype [W, KV * d] if k_dynamic is given.
        v_conv_weight: likewise.
        k_dynamic: [T, KV * W], the tokens' own taps, or None.
        v_dynamic: likewise.
        k_conv_state: [slots, R, KV * d], ring of convolution inputs; written.
        v_conv_state: likewise.
        k_cache: [slots, R, KV, d], or [pages, page_tokens, KV, d] with a page table; written.
        v_cache: likewise.
        page_table: int32 [max_pages] or None.
        position: int32 [1], of the first token.
        num_tokens: int32 [1]; rows at and above it are padding.
        slot: int32 [1].
        qk_threshold: largest norm of a query or key head.
        rel_threshold: largest norm of a relative head.
        log_n_floor: tokens from which queries and relative states grow; 0 for never.
        log_alpha: their growth per e-fold of the position.
        eps: of the norm of values.

    Returns:
        q [T, H, d], k [T, KV, d], v [T, KV, d], rel [T, H, r].
    """
    num_rows, kv_heads = len(q), k_cache.shape[-2:]
    q = l2_clip(q.view(num_rows, *q_scale.shape), q_scale, qk_threshold)
    rel = l2_clip(rel.view(num_rows, *rel_scale.shape), rel_scale, rel_threshold)
    if log_n_floor > 0:
        q = log_scale(q, position, log_n_floor, log_alpha)
        rel = log_scale(rel, position, log_n_floor, log_alpha)

    step = (position, num_tokens, slot)
    k = _conv(k, k_conv_weight, k_dynamic, k_conv_state, *step)
    v = _conv(v, v_conv_weight, v_dynamic, v_conv_state, *step)
    k = l2_clip(k.view(num_rows, *kv_heads), None, qk_threshold)
    v = rms_norm(v.view(num_rows, *kv_heads), None, eps, v.dtype)
    kv_write(k, v, k_cache, v_cache, page_table, *step)
    return q, k, v, rel


def _conv(
    x: Tensor,
    weight: Tensor,
    dynamic: Tensor | None,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
) -> Tensor:
    out: Tensor
    if dynamic is None:
        out = short_conv(x, weight, state, position, num_tokens, slot)
    else:
        out = dynamic_short_conv(x, weight, dynamic, state, position, num_tokens, slot)
    return out
