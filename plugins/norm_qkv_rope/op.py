"""norm_qkv_rope: from the residual stream to the queries, keys and values of an attention layer.

    residual, z = add_rms_norm(x, delta, norm_weight)
    [q | k | v] = linear(z, qkv)                         H, KV and KV heads of d columns
    q           = rope(rms_norm(q, q_norm))              per head; rope if rope_theta > 0
    k           = rope(rms_norm(k, k_norm))
    kv_write(k, v)

It has the bits of those operators one after the other; qkv may be NVFP4 (`plugins.nvfp4`). Keys and
values are returned too, and attention may read them from there or from the cache. Source: flint.md
sections 4 and 5. Letters: T tokens, D hidden size, H query heads, KV key/value heads, d head size.
"""

import torch
from torch import Tensor

from inkrt.plugins.add_rms_norm.op import add_rms_norm, fit_add_norm
from inkrt.plugins.caseutil import normal, shuffled_pages, step_arguments, weight_arguments
from inkrt.plugins.kv_write.op import kv_write
from inkrt.plugins.linear_nvfp4.op import project
from inkrt.plugins.nvfp4 import fit_weight
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.rms_norm.op import rms_norm
from inkrt.plugins.rope.op import rope
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    qkv: Tensor,
    qkv_scales: Tensor | None,
    qkv_global_scale: Tensor | None,
    q_norm: Tensor,
    k_norm: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    eps: float,
    rope_theta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Residual [T, D], q [T, H, d], k and v [T, KV, d], all in x's dtype."""
    axes = Axes("norm_qkv_rope")
    fit_add_norm(axes, x, delta, norm_weight, eps, "norm_weight")
    fit_weight(axes, "qkv", qkv, qkv_scales, qkv_global_scale, "N", "D", dtype=x.dtype)
    axes.fit("q_norm", q_norm, "d", dtype=MODEL_DTYPES)
    axes.fit("k_norm", k_norm, "d", dtype=MODEL_DTYPES)
    axes.fit("k_cache", k_cache, "entries", "rows", "KV", "d", dtype=x.dtype)
    axes.fit("v_cache", v_cache, "entries", "rows", "KV", "d", dtype=x.dtype)
    if page_table is not None:
        axes.fit("page_table", page_table, "max_pages", dtype=torch.int32)
    axes.step(position, num_tokens, slot)
    axes.require(rope_theta >= 0, f"rope_theta is {rope_theta}, expected >= 0, 0 being no rope")
    rows, num_kv, head_dim = axes["N"], axes["KV"], axes["d"]
    num_heads = rows // head_dim - 2 * num_kv
    axes.require(
        num_heads > 0 and rows % head_dim == 0 and num_heads % num_kv == 0,
        f"qkv has {rows} rows, expected (H+2*KV)*d with KV={num_kv}, d={head_dim} and H a multiple "
        f"of KV",
    )
    axes.require(
        rope_theta == 0 or head_dim % 2 == 0, f"heads have {head_dim} channels, expected even"
    )
    return (
        x.new_empty(x.shape),
        x.new_empty(axes["T"], num_heads, head_dim),
        x.new_empty(axes["T"], num_kv, head_dim),
        x.new_empty(axes["T"], num_kv, head_dim),
    )


def cases() -> list[Case]:
    """Rings with rope, pages without, both forms of the weight, first layer, wrap, padding."""

    def make(
        name: str, num_rows: int, position: int, *, num_tokens: int | None = None,
        has_delta: bool = True, paged: bool = False, heads: tuple[int, int] = (8, 1),
        head_dim: int = 10, quantized: bool = False, theta: float = 10000.0,
    ) -> Case:  # fmt: skip
        num_heads, num_kv = heads
        width, ring_rows, page_tokens, num_pages = 32, 16, 4, 12

        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            first = (num_pages, page_tokens) if paged else (3, ring_rows)
            rows = (num_heads + 2 * num_kv) * head_dim
            return {
                "x": normal(generator, dtype, num_rows, width),
                "delta": normal(generator, dtype, num_rows, width) if has_delta else None,
                "norm_weight": 1 + normal(generator, dtype, width, scale=0.2),
                **weight_arguments(
                    "qkv", generator, dtype, rows, width, scale=width**-0.5, quantized=quantized
                ),
                "q_norm": 1 + normal(generator, dtype, head_dim, scale=0.2),
                "k_norm": 1 + normal(generator, dtype, head_dim, scale=0.2),
                "k_cache": normal(generator, dtype, *first, num_kv, head_dim),
                "v_cache": normal(generator, dtype, *first, num_kv, head_dim),
                "page_table": shuffled_pages(generator, num_pages, num_pages) if paged else None,
                **step_arguments(position, num_tokens or num_rows, slot=1),
                "eps": 1e-6,
                "rope_theta": theta,
            }

        # bfloat16 rounds z, the projection, the head's norm and the rotation.
        return Case(name, arguments, {torch.float32: 2e-6, torch.bfloat16: 7e-3})

    return [
        make("first token", 1, 0, has_delta=False),
        make("ring wraps", 5, 13, heads=(6, 3)),
        make("padding", 8, 2, num_tokens=3),
        make("pages without rope", 7, 21, paged=True, heads=(4, 2), theta=0.0),
        make("odd heads without rope", 2, 5, paged=True, head_dim=7, theta=0.0),
        make("prefill", 11, 30, num_tokens=9, heads=(4, 4)),
        make("nvfp4 decode", 1, 77, quantized=True),
        make("nvfp4 prefill in pages", 10, 3, paged=True, quantized=True, theta=0.0),
    ]


@operator("norm_qkv_rope", fake=fake, cases=cases, mutates=("k_cache", "v_cache"))
def norm_qkv_rope(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    qkv: Tensor,
    qkv_scales: Tensor | None,
    qkv_global_scale: Tensor | None,
    q_norm: Tensor,
    k_norm: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    eps: float,
    rope_theta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add an update to the residual stream, project its norm, and store keys and values.

    Args:
        x: [T, D] float32 or bfloat16, the residual stream.
        delta: [T, D], the last sub-layer's output, or None for zero.
        norm_weight: [D].
        qkv: x's dtype [(H + 2 * KV) * d, D]: rows of queries, keys, values; or NVFP4.
        qkv_scales: see `plugins.nvfp4`.
        qkv_global_scale: float32 [1] or None; the three share one.
        q_norm: [d], of every query head.
        k_norm: [d], of every key head.
        k_cache: [slots, R, KV, d], or [pages, page_tokens, KV, d] with a page table; written.
        v_cache: likewise.
        page_table: int32 [max_pages] or None.
        position: int32 [1], of the first token.
        num_tokens: int32 [1]; rows at and above it are padding.
        slot: int32 [1].
        eps: of all norms.
        rope_theta: base of the rotation; 0 for none.

    Returns:
        The new residual [T, D], q [T, H, d], k [T, KV, d], v [T, KV, d]; all in x's dtype.
    """
    residual, z = add_rms_norm(x, delta, norm_weight, eps, x.dtype)
    rows = project(z, qkv, qkv_scales, qkv_global_scale, False)
    heads = rows.view(len(rows), -1, len(q_norm))
    num_kv = k_cache.shape[2]
    q = rms_norm(heads[:, : -2 * num_kv], q_norm, eps, x.dtype)
    k = rms_norm(heads[:, -2 * num_kv : -num_kv], k_norm, eps, x.dtype)
    if rope_theta > 0:
        q, k = rope(q, position, rope_theta), rope(k, position, rope_theta)
    v = heads[:, -num_kv:].clone(memory_format=torch.contiguous_format)
    kv_write(k, v, k_cache, v_cache, page_table, position, num_tokens, slot)
    return residual, q, k, v
