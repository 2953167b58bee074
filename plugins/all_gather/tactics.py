"""How `all_gather` runs on several GPUs: one push of a rank's slice to all ranks."""

from pathlib import Path

from inkrt.plugins.all_reduce.launches import (
    ERROR,
    MAX_RANKS,
    QUAD_BYTES,
    grid_of,
    is_wide,
    live_tokens,
)
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
            lowest column that has it, int32 [T, blocks].
    """
    assert 2 <= num_ranks <= MAX_RANKS, num_ranks
    assert best is None or row_words % 4 == 0, row_words
    num_quads = -(-num_tokens * row_words * 4 // QUAD_BYTES)
    # With `best` a row at a time.
    grid = grid_of(num_quads if best is None else row_words // 4)
    return KernelLaunch(
        source=Path(__file__).parent / "all_gather.cu",
        entry="all_gather",
        defines=(
            ("RANKS", num_ranks), ("NUM_TOKENS", num_tokens), ("ROW_WORDS", row_words),
            ("COLUMNS", columns), ("THREADS", grid.threads), ("HAS_BEST", int(best is not None)),
            ("IS_WIDE", int(is_wide(num_tokens))),
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
