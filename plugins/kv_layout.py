"""Where GPU kernels keep keys and values in a cache buffer; the mirror of kv_layout.cuh.

A buffer is a row of pages, a page is 64 tokens of all kv heads of a rank:

    [page][kv head][column block][token (64)][min(d, 64) dims]          bfloat16

k_cache and v_cache are two buffers of this same form. Where a row is 128 bytes (d >= 64), its
16-byte chunk c stands at chunk c ^ (token & 7). A ring of R rows per slot, R a multiple of 64, is
R / 64 consecutive pages per slot. The reference operators' view [entries, rows, KV, d] of the same
buffer holds the same number of bytes in another order; `pack` and `unpack` go between them.
"""

from functools import cache

import torch
from torch import Tensor

PAGE_TOKENS = 64
_SWIZZLED_ROW_BYTES = 128
_CHUNK_BYTES = 16


def has_layout(head_dim: int) -> bool:
    """Whether the kernels have a layout for a head dim."""
    is_one_block = 16 <= head_dim <= 64 and head_dim % 16 == 0
    return is_one_block or (head_dim > 64 and head_dim % 64 == 0)


def tile_bytes(head_dim: int) -> int:
    """Bytes of one kv head's keys (or values) of a page."""
    return PAGE_TOKENS * head_dim * 2


def byte_in_tile(token: int, dim: int, head_dim: int) -> int:
    """Byte of a value in its tile.

    Args:
        token: row in the page, 0..63.
        dim: 0..head_dim-1.
        head_dim: one for which `has_layout` holds.
    """
    block_dims = min(head_dim, 64)
    row_bytes = 2 * block_dims
    block, in_block = divmod(dim, block_dims)
    chunk, in_chunk = divmod(2 * in_block, _CHUNK_BYTES)
    if row_bytes == _SWIZZLED_ROW_BYTES:
        chunk ^= token & 7
    return (block * PAGE_TOKENS + token) * row_bytes + chunk * _CHUNK_BYTES + in_chunk


def ring_page(position: int, slot: int, ring_rows: int) -> int:
    """Page of a position in a ring buffer of `ring_rows` rows (a multiple of 64) per slot."""
    return slot * (ring_rows // PAGE_TOKENS) + position % ring_rows // PAGE_TOKENS


def byte_in_buffer(
    page: int, kv_head: int, token: int, dim: int, num_kv_heads: int, head_dim: int
) -> int:
    """Byte of a value in a buffer; `page` is an entry of the page table or `ring_page`."""
    tile = page * num_kv_heads + kv_head
    return tile * tile_bytes(head_dim) + byte_in_tile(token, dim, head_dim)


@cache
def tile_order(head_dim: int) -> Tensor:
    """Index in a tile's elements of (token, dim), int64 [64, head_dim]; not to be written to."""
    return torch.tensor(
        [
            [byte_in_tile(token, dim, head_dim) // 2 for dim in range(head_dim)]
            for token in range(PAGE_TOKENS)
        ]
    )


def pack(cache: Tensor) -> Tensor:
    """Bytes of a buffer as kernels read it.

    Args:
        cache: [entries, rows, KV, d] as the reference operators index it, 2 bytes an element, rows
            a multiple of 64: [pages, 64, KV, d] or rings [slots, R, KV, d].

    Returns:
        [entries * rows / 64, KV, 64 * d] in the same dtype.
    """
    entries, rows, num_kv_heads, head_dim = cache.shape
    pages = cache.reshape(entries * rows // PAGE_TOKENS, PAGE_TOKENS, num_kv_heads, head_dim)
    tiles = pages.transpose(1, 2).reshape(len(pages), num_kv_heads, PAGE_TOKENS * head_dim)
    packed = torch.empty_like(tiles)
    packed[:, :, tile_order(head_dim).flatten().to(cache.device)] = tiles
    return packed


def unpack(packed: Tensor, rows: int, head_dim: int) -> Tensor:
    """The inverse of `pack`.

    Args:
        packed: [pages, KV, 64 * head_dim].
        rows: tokens of an entry of the result, a multiple of 64.
        head_dim: d.

    Returns:
        [pages * 64 / rows, rows, KV, d].
    """
    num_kv_heads = packed.shape[1]
    tiles = packed[:, :, tile_order(head_dim).flatten().to(packed.device)]
    pages = tiles.view(len(packed), num_kv_heads, PAGE_TOKENS, head_dim).transpose(1, 2)
    return pages.reshape(-1, rows, num_kv_heads, head_dim)
