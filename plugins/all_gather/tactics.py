"""How `all_gather` runs on several GPUs: one push of a rank's slice to all ranks."""

from pathlib import Path

from inkrt.plugins.all_reduce.launches import (
    ERROR,
    MAX_BLOCKS,
    MAX_RANKS,
    QUAD_BYTES,
    Grid,
    grid_of,
    is_wide,
    live_tokens,
)
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    KernelLaunch,
    Output,
    Param,
    Peers,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
)

# Rows whose best are found side by side.
_MOST_ROWS = MAX_VERIFY_TOKENS


def grid_of_rows(num_tokens: int, row_words: int) -> tuple[Grid, int]:
    """Blocks of the kernel that finds the best of every row, and how many of them have a row."""
    quads, rows = row_words // 4, min(num_tokens, _MOST_ROWS)
    threads, parts = 512, 0
    for threads in (128, 256, 512):
        parts = -(-quads // threads)
        if parts * rows <= MAX_BLOCKS:
            break
    parts = min(parts, MAX_BLOCKS // rows)
    return Grid(parts * rows, threads), parts


def gather(
    num_ranks: int,
    num_tokens: int,
    row_words: int,
    columns: int,
    *,
    x: Param,
    out: Param,
    best: tuple[Param, Param] | None = None,
) -> KernelLaunch:
    """The kernel: out [T, columns] = the first columns of all ranks' x [T, row_words] side by side.

    Args:
        num_ranks: 2 to 8.
        num_tokens: T.
        row_words: of x, 32-bit words; with `best` a multiple of 4.
        columns: at most num_ranks * row_words.
        x: rows of this rank.
        out: rows of all ranks.
        best: where each block's largest float of every row goes, float32 [T, blocks], and the
            lowest column that has it, int32 [T, blocks]; blocks are those of a row.
    """
    assert 2 <= num_ranks <= MAX_RANKS, num_ranks
    assert best is None or row_words % 4 == 0, row_words
    num_quads = -(-num_tokens * row_words * 4 // QUAD_BYTES)
    grid, parts = grid_of(num_quads), 0
    if best is not None:
        grid, parts = grid_of_rows(num_tokens, row_words)
    return KernelLaunch(
        source=Path(__file__).parent / "all_gather.cu",
        entry="all_gather",
        defines=(
            ("RANKS", num_ranks), ("NUM_TOKENS", num_tokens), ("ROW_WORDS", row_words),
            ("COLUMNS", columns), ("THREADS", grid.threads), ("HAS_BEST", int(best is not None)),
            ("PARTS", parts), ("IS_WIDE", int(is_wide(num_tokens))),
        ),
        grid=(grid.blocks, 1, 1),
        block=(grid.threads, 1, 1),
        params=(
            x, out, Peers(num_quads * QUAD_BYTES), live_tokens(num_tokens, x), *(best or (x, x)),
            ERROR,
        ),
    )  # fmt: skip


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for 2 to 8 ranks and slices of whole 32-bit words; no other."""
    x, num_ranks = tensor_arg(args, "x"), int(number_arg(args, "tp_size"))
    num_tokens, width = x.shape
    row_bytes = width * x.dtype.itemsize
    fits = 2 <= num_ranks <= MAX_RANKS and row_bytes % 4 == 0
    if target not in GPU_TARGETS or not fits:
        return []
    words = row_bytes // 4
    kernel = gather(num_ranks, num_tokens, words, num_ranks * words, x=Pointer("x"), out=Output(0))
    return [Tactic("push", (kernel,), (1 + num_ranks) * num_tokens * row_bytes, 0)]
