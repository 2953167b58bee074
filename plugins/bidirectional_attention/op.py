"""bidirectional_attention: every row of an image attends to all of them.

    s[t,h,u] = q[t,h] . k[u,h] * scale                u < num_rows
    out[t,h] = sum_u softmax(s[t,h,:])_u * v[u,h]     t < num_rows

Rows of padding behind the image are zero. In bfloat16 the product and its scaling round to
bfloat16 each; softmax is float32 and its probabilities round to bfloat16. A fused kernel keeps
scores in float32 and is compared with this within a tolerance.
Source: Inkling-2's vision tower, `eager_attention_forward` of transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

# Scores that the reference holds at once, 1 GiB of float32; larger images go head by head.
_MAX_SCORES = 1 << 28


def fake(q: Tensor, k: Tensor, v: Tensor, num_rows: Tensor, scale: float) -> Tensor:
    """Shape and dtype of q."""
    axes = Axes("bidirectional_attention")
    axes.fit("q", q, "T", "H", "d", dtype=MODEL_DTYPES)
    axes.fit("k", k, "T", "H", "d", dtype=q.dtype)
    axes.fit("v", v, "T", "H", "d", dtype=q.dtype)
    axes.fit("num_rows", num_rows, 1, dtype=torch.int32)
    axes.require(scale > 0, f"scale is {scale}, expected > 0")
    return q.new_empty(q.shape)


def cases() -> list[Case]:
    """One row, an image of odd size, padding behind it, heads as published."""

    def make(
        name: str, num_rows: int, padding: int = 0, *, heads: tuple[int, int] = (3, 7)
    ) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            shape = (num_rows + padding, *heads)
            return {
                "q": normal(generator, dtype, *shape),
                "k": normal(generator, dtype, *shape),
                "v": normal(generator, dtype, *shape),
                "num_rows": int32(num_rows),
                "scale": heads[1] ** -0.5,
            }

        # Four bfloat16 roundings, two of them on scores that softmax exponentiates.
        return Case(name, arguments, {torch.float32: 2e-6, torch.bfloat16: 1.5e-2})

    return [
        make("one row", 1),
        make("an image", 61),
        make("an image and padding", 29, 12),
        make("one row and padding", 1, 4),
        make("full heads", 37, 3, heads=(2, 64)),
    ]


def masked(q: Tensor, k: Tensor, v: Tensor, num_rows: Tensor, scale: float) -> Tensor:
    """The same without a look at the number of rows: padding is masked, not left out."""
    is_row = torch.arange(q.shape[0], device=q.device) < num_rows
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale  # [H, T, T]
    scores = scores.masked_fill(~is_row, float("-inf"))
    probabilities = torch.softmax(scores.float(), dim=-1).to(q.dtype)
    out = torch.matmul(probabilities, v.transpose(0, 1)).transpose(0, 1)
    return (out * is_row[:, None, None].to(q.dtype)).contiguous()


@operator("bidirectional_attention", fake=fake, cases=cases, plain=masked)
def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, num_rows: Tensor, scale: float
) -> Tensor:
    """Attend from all valid rows to all valid rows.

    Args:
        q: float32 or bfloat16 [T, H, d].
        k: [T, H, d], dtype of q.
        v: [T, H, d], dtype of q.
        num_rows: int32 [1], valid rows, which come first; at least 1.
        scale: of the scores.

    Returns:
        [T, H, d] in q's dtype; rows from num_rows on are zero.
    """
    count, num_heads = int(num_rows.item()), q.shape[1]
    out = torch.zeros_like(q)
    heads = max(1, min(num_heads, _MAX_SCORES // count**2))
    rows = max(1, min(count, _MAX_SCORES // (heads * count)))
    for head in range(0, num_heads, heads):
        some = slice(head, head + heads)
        keys = k[:count, some].permute(1, 2, 0)
        values = v[:count, some].transpose(0, 1)
        for row in range(0, count, rows):
            here = slice(row, min(row + rows, count))
            scores = torch.matmul(q[here, some].transpose(0, 1), keys) * scale
            probabilities = torch.softmax(scores.float(), dim=-1).to(q.dtype)
            out[here, some] = torch.matmul(probabilities, values).transpose(0, 1)
    return out
