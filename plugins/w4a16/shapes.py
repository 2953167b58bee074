"""Sizes of the model that the w4a16 kernels serve, what they require, and their shared memory.

The shared-memory sizes here repeat the `Shared` structs of the CUDA files; the tests compare both.
"""

from dataclasses import dataclass

from inkrt.errors import BuildError

MAX_TOKENS = 8
MAX_SMEM = 227 * 1024
LARGE_BLOCK = 116 * 1024  # more than half of an SM's shared memory
MULTIPROCESSORS = 132
MAX_NORM_WIDTH = 2048
HEAD = 128
PAGE = 64
MOE_WARPS = 16
SAMPLE_BINS = 2048


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of a model; those of Flint as defaults.

    Attributes:
        hidden: a multiple of 256, at most 2048.
        heads: of 128 values each.
        kv_heads: likewise.
        experts: at most 256, a multiple of 8.
        top_k: at most 8.
        width: of a routed expert, a multiple of 256, at most 512.
        shared_width: of the shared expert, a multiple of `width`; at least experts rows / 8.
        dense_width: of the dense layers' MLP, a multiple of 256.
        vocab: rows of the head.
        bf16: weights are bf16, not NVFP4.
    """

    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    experts: int = 256
    top_k: int = 6
    width: int = 512
    shared_width: int = 1024
    dense_width: int = 6144
    vocab: int = 150144
    bf16: bool = False

    @property
    def chunk_bytes(self) -> int:
        """Bytes of 16 rows x 256 k."""
        return 8192 if self.bf16 else 2304

    def tile_bytes(self, width: int) -> int:
        """Bytes of 16 rows of `width` values."""
        return width // 256 * self.chunk_bytes


def require(holds: bool, kernel: str, message: str) -> None:
    """Raise BuildError with `message` (got, expected) unless `holds`."""
    if not holds:
        raise BuildError(f"w4a16 {kernel}: {message}; this model needs another tactic")


def check_tokens(kernel: str, num_tokens: int) -> None:
    """T is 1 to 8."""
    require(1 <= num_tokens <= MAX_TOKENS, kernel, f"T={num_tokens}, expected 1 to {MAX_TOKENS}")


def check_width(kernel: str, name: str, width: int, most: int) -> None:
    """A K dimension is a multiple of 256 and at most `most`."""
    require(
        width % 256 == 0 and 0 < width <= most,
        kernel,
        f"{name}={width}, expected a multiple of 256 up to {most}",
    )


def check_smem(kernel: str, num_bytes: int) -> int:
    """The size itself, if a block can have it."""
    require(
        num_bytes <= MAX_SMEM, kernel, f"{num_bytes} B of shared memory, expected up to {MAX_SMEM}"
    )
    return num_bytes


def vectors_per_warp(width: int, warps: int) -> int:
    """As in w4a16.cuh: vectors of 64 k for each warp that has any."""
    vectors = width // 64
    share = -(-vectors // warps)
    while vectors % share:
        share += 1
    return share


def live_warps(width: int, warps: int) -> int:
    """Warps that have vectors."""
    return width // 64 // vectors_per_warp(width, warps)


def struct_bytes(*members: tuple[int, int]) -> int:
    """Size of a C struct of members (bytes, alignment); those of no bytes are not there."""
    size, largest = 0, 1
    for num_bytes, align in members:
        if num_bytes:
            size = -(-size // align) * align + num_bytes
            largest = max(largest, align)
    return -(-size // largest) * largest


def columns(num_tokens: int) -> int:
    """`TOKEN_COLUMNS` of w4a16.cuh: tokens that sums and rows in shared memory have room for."""
    return 1 if num_tokens == 1 else MAX_TOKENS


def norm_bytes(hidden: int, num_tokens: int) -> int:
    """`Norm::Memory`."""
    rows = columns(num_tokens)
    return struct_bytes((rows * (hidden + 8) * 2, 16), (rows * 32, 16), (4096, 16))


def partial_bytes(width: int, warps: int, num_tokens: int) -> int:
    """A tile's sums, of all warps that have any."""
    return live_warps(width, warps) * 64 * columns(num_tokens)


def qkv_tiles(dims: Dims, blocks: int) -> int:
    """Row tiles of a block of `qkv`, at most."""
    return -(-(dims.heads + 2 * dims.kv_heads) * 8 // blocks)


def qkv_bytes(dims: Dims, blocks: int, num_tokens: int, staged: int) -> int:
    """`Shared` of qkv.cu; `staged` tiles of a block stand in it."""
    tiles = qkv_tiles(dims, blocks)
    return struct_bytes(
        (staged * dims.tile_bytes(dims.hidden), 128),
        (norm_bytes(dims.hidden, num_tokens), 16),
        (tiles * partial_bytes(dims.hidden, 16, num_tokens), 16),
        (8, 8),
    )


def linear_bytes(dims: Dims, width: int, num_tokens: int) -> int:
    """`Shared` of linear.cu."""
    return struct_bytes(
        (dims.tile_bytes(width), 128), (partial_bytes(width, 16, num_tokens), 16), (8, 8)
    )


def router_rows(dims: Dims) -> int:
    """Router rows of a block."""
    return -(-dims.experts // (dims.shared_width // 8))


def router_bytes(dims: Dims, num_tokens: int) -> int:
    """`Shared` of router.cu."""
    sums = partial_bytes(dims.hidden, 16, num_tokens)
    return struct_bytes(
        (dims.tile_bytes(dims.hidden), 128),
        (router_rows(dims) * dims.hidden * 2, 128),
        (norm_bytes(dims.hidden, num_tokens), 16),
        (sums, 16),
        (sums // 2, 16),
        (8, 8),
    )


def check_moe(dims: Dims) -> None:
    """Sizes of a mixture-of-experts block that its kernels take, for any T."""
    check_width("moe", "hidden", dims.hidden, MAX_NORM_WIDTH)
    check_width("moe", "width", dims.width, 512)
    check_width("moe", "shared_width", dims.shared_width, 8192)
    require(
        dims.shared_width % dims.width == 0,
        "moe",
        f"shared_width={dims.shared_width}, expected a multiple of width={dims.width}",
    )
    require(
        dims.experts <= 256 and dims.experts % 8 == 0,
        "moe",
        f"experts={dims.experts}, expected a multiple of 8 up to 256",
    )
    most = min(8, dims.experts)
    require(1 <= dims.top_k <= most, "moe", f"top_k={dims.top_k}, expected 1 to {most}")
    require(
        router_rows(dims) <= 8,
        "moe",
        f"experts={dims.experts} over shared_width={dims.shared_width}, expected at most one "
        f"expert for each shared row",
    )


def route_bytes(dims: Dims) -> int:
    """`Route` of route.cuh."""
    slots = MAX_TOKENS * dims.top_k
    return struct_bytes(
        (slots * 4, 4), (32, 4), (4, 4), (slots * 8, 8), (slots * 2, 2), (slots * 2, 2), (slots, 1)
    )


def gate_up_bytes(dims: Dims, tiles: int, depth: int) -> int:
    """`Shared` of gate_up.cu, for one token; all but `depth` tiles stand in it."""
    staged = tiles - depth
    return struct_bytes(
        (staged * dims.tile_bytes(dims.hidden), 128),
        (staged * MOE_WARPS * 8, 8),
        (tiles * partial_bytes(dims.hidden, MOE_WARPS, 1), 16),
        (MOE_WARPS * vectors_per_warp(dims.hidden, MOE_WARPS) * 128, 16),
        (dims.experts * 4, 4),
        (tiles * 4, 4),
    )


def down_bytes(dims: Dims) -> int:
    """`Shared` of down.cu, for one token."""
    jobs = dims.shared_width // dims.width + dims.top_k
    return struct_bytes(
        (8 * dims.tile_bytes(dims.width), 128), (jobs * 512, 16), (256 + 32, 4), (32, 4), (64, 8)
    )


def experts_bytes(dims: Dims, stages: int) -> int:
    """`Shared` of experts.cu."""
    slots, scales = MAX_TOKENS * dims.top_k, dims.experts * 4
    stage = dims.chunk_bytes // 4 if dims.bf16 else dims.chunk_bytes
    jobs = (dims.shared_width // dims.width + slots) * 512
    share = vectors_per_warp(dims.hidden, MOE_WARPS)
    sums = 0  # of slices of the tiles that warps share
    if dims.hidden // 64 == 8 * max(2 * share, 4):
        sums = 2 * MOE_WARPS // 8 * live_warps(dims.hidden, MOE_WARPS) * 512
    inputs = MAX_TOKENS * (dims.hidden + 8 + dims.shared_width + 8) * 2
    return struct_bytes(
        (MOE_WARPS * stages * stage, 128),
        (max(inputs, slots * (dims.width + 8) * 2), 16),
        (max(jobs + scales, sums), 16),
        (route_bytes(dims), 8),
        (scales, 4),
        (MOE_WARPS * stages // 2 * 8, 8),
    )


def stream_bytes(dims: Dims, depth: int, num_tokens: int, *, norm: bool) -> int:
    """`Shared` of stream.cu."""
    members = [(2 * depth * partial_bytes(dims.hidden, 8, num_tokens), 16)]
    if norm:
        members.append((norm_bytes(dims.hidden, num_tokens), 16))
    return struct_bytes(*members, (256, 4), (256, 4))


def tiled_bytes(
    dims: Dims, warp_tiles: int, token_tiles: int, stages: int, out_rows: int, *, row_major: bool,
    lists: int,
) -> int:  # fmt: skip
    """`Shared` of the tiled kernels, see tile.cuh.

    Args:
        dims: sizes; only the kind of weights matters.
        warp_tiles: row tiles of a warp.
        token_tiles: of eight tokens.
        stages: steps of K.
        out_rows: results of a token.
        row_major: a bf16 matrix that is not packed.
        lists: of a number for each token.
    """
    step_k = 128 if dims.bf16 or row_major else 256
    row_bytes = 2 * (step_k + 8)
    tokens = 8 * token_tiles
    step = 16 * row_bytes if row_major else dims.chunk_bytes * step_k // 256
    stage = struct_bytes((4 * warp_tiles * step, 128), (tokens * row_bytes, 16))
    out = struct_bytes((tokens * (out_rows + 8) * 2, 16))
    size = struct_bytes((max(stages * stage, out), 128), (lists * tokens * 4, 4))
    return check_smem("tile", size)


def sample_bytes(vocab: int, parts: int, threads: int) -> int:
    """`Shared` of sample.cu."""
    warps = threads // 32
    quads = -(-vocab // (4 * parts))
    return struct_bytes(
        (quads * 16, 16), (2 * SAMPLE_BINS * 4, 4), (warps * 8, 8), (warps * 8, 4), (8, 8), (8, 4)
    )


def sample_exchange_bytes(rows: int) -> int:
    """`Exchange` of sample.cu for each row."""
    return rows * (16 + 3 * SAMPLE_BINS * 8)
