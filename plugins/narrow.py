"""Arithmetic of narrow steps: a row has the same bits whatever the number of rows beside it.

A decode or verify step has at most MAX_VERIFY_TOKENS rows; "T-invariance" in docs/architecture.md
says why their bits must not depend on how many. What torch guarantees by itself, and references
therefore simply write for all rows:

- +, -, *, /, sqrt and rsqrt round each element correctly, wherever it stands;
- a softmax, sum, mean or norm over the last dimension adds each row by itself, in an order that
  its length alone decides (below 32768 elements, which threads do not share).

What it does not guarantee has a function here. Wider steps are evaluated as torch does by itself,
like the reference models.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.registry import MAX_VERIFY_TOKENS

# Vector loops of torch take this many elements, or a divisor of it, at a time.
_LANES = 64
# From this many elements on, torch may split a loop between threads, at any place.
_SPLIT = 2**15
# Bytes to whose multiples torch aligns tensors.
_ALIGNMENT = 64


def row_by_row(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Evaluate `function` on one row at a time if the step is narrow, else on all rows at once.

    For products of matrices: their library chooses its summation order by the number of rows, of
    matrices in a batch, and by the alignment of their memory.

    Args:
        function: takes tensors of shape [T, ...] and returns one of shape [T, ...].
        rows: its arguments, equal in their first dimension T.
    """
    num_rows = rows[0].shape[0]
    if num_rows > MAX_VERIFY_TOKENS:
        return function(*rows)
    columns = [_aligned_rows(x) for x in rows]
    results = [function(*row) for row in zip(*columns, strict=True)]
    return results[0] if num_rows == 1 else torch.cat(results)


def _aligned_rows(x: Tensor) -> list[Tensor]:
    """Rows [1, ...] of x [T, ...], each aligned as a new tensor is."""
    rows = [x[i : i + 1] for i in range(len(x))]
    if x.data_ptr() % _ALIGNMENT or x.stride(0) * x.itemsize % _ALIGNMENT:
        return [row.clone() for row in rows]
    return rows


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single elements, such as `torch.sigmoid`, to a step of any width.

    Args:
        function: works on each element by itself.
        x: float32 [T, ...].
    """
    return function(x) if len(x) > MAX_VERIFY_TOKENS else elementwise_rows(function, x)


def elementwise_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single elements to rows that belong to a narrow step.

    Vector loops and the scalar loop for what remains behind them round transcendental functions
    differently. Rows of whole vectors leave nothing to scalar loops; others are evaluated alone.

    Args:
        function: works on each element by itself.
        x: float32 [n, ...], any number of rows.
    """
    if x[0].numel() % _LANES == 0 and x.numel() < _SPLIT:
        return function(x)
    return torch.cat([function(x[i : i + 1]) for i in range(len(x))])


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows by a transposed weight, as `F.linear` does.

    In bfloat16 a narrow step is filled up to MAX_VERIFY_TOKENS rows and multiplied at once where a
    product of that shape adds in the order of a product of one row.

    Args:
        x: float32 or bfloat16 [T, ..., K].
        weight: [N, K], dtype of x.

    Returns:
        [T, ..., N] in x's dtype.
    """
    num_rows = len(x)
    if (
        1 < num_rows <= MAX_VERIFY_TOKENS
        and x.dim() == 2
        and x.dtype is torch.bfloat16
        and weight.is_contiguous()
        and _adds_like_one_row(*weight.shape, torch.get_num_threads())
    ):
        filling = x.new_zeros(MAX_VERIFY_TOKENS - num_rows, x.shape[1])
        return F.linear(torch.cat([x, filling]), weight)[:num_rows]
    return row_by_row(lambda rows: F.linear(rows, weight), x)


@cache
def _adds_like_one_row(num_outputs: int, width: int, num_threads: int) -> bool:  # noqa: ARG001
    """Whether products of MAX_VERIFY_TOKENS rows and of one have the same order of additions.

    It depends on the shape, the processor and the library, so it is tried, on rows whose products
    cancel exactly: all that is left is the rounding noise of the order.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(width, generator=generator)

    def rows(count: int, sign: int) -> Tensor:
        half = torch.randn(count, width // 2, generator=generator).bfloat16()
        rest = torch.zeros(count, width % 2, dtype=torch.bfloat16)
        return torch.cat([half, sign * half, rest], dim=1)[:, order].contiguous()

    x, weight = rows(MAX_VERIFY_TOKENS, 1), rows(num_outputs, -1)
    alone = torch.cat([F.linear(x[i : i + 1].clone(), weight) for i in range(len(x))])
    return torch.equal(F.linear(x, weight), alone)
