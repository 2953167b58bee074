"""Launches of the ratio test of a round (`ratio.cu`): which kernels, how wide, with what memory.

They belong to no operator: the executor runs them behind a step that verifies drafts, where a
request's rule of acceptance is "probabilistic". Nothing is known here about where its memory is.
"""

from pathlib import Path

from inkrt.errors import BuildError
from inkrt.plugins.tactic import InputPointer, KernelLaunch, Param, Pointer, Scratch
from inkrt.plugins.w4a16.sample_tactics import draw_parts
from inkrt.plugins.w4a16.shapes import (
    MAX_SMEM,
    MULTIPROCESSORS,
    sample_bytes,
    sample_exchange_bytes,
    struct_bytes,
)

_SOURCE = Path(__file__).parent / "ratio.cu"
_MOST_ROWS, _MOST_VOCAB = 8, 2**18 - 1  # more tokens would overflow a sum of probabilities
_THREADS = 512
_TABLE = 128 * 8  # bytes of `Exponential`
_LISTED = 256  # keys of a part near a threshold, `kListed` of ratio.cu


def ratio_test(
    vocab: int,
    num_rows: int,
    num_drafts: int,
    *,
    parts: int | None = None,
    blocks: int | None = None,
    threads: int = _THREADS,
) -> tuple[KernelLaunch, KernelLaunch]:
    """The two kernels that judge the drafts of a step, in order.

    Their parameters by name, as addresses on the device:

    - `p_logits` float32 [num_rows, vocab] and `q_logits` float32 [num_drafts or more, vocab], of
      the step and of the drafter;
    - `drafts` int32 [num_drafts], the step's tokens behind the anchor;
    - `state`, the `RoundState` of state.cuh: `width`, at most the number of rows less one and at
      most `num_drafts`, is read, `accepted` and `token` are written;
    - the step inputs temperature (above 0), top_k, top_p, min_p, seed and position (of the anchor);
    - scratch, which both kernels share by name and which launches may only share one after another:
      `exchange` and `arrivals` are 0 before the first launch and after each, `error` is set where a
      kernel gave up waiting.

    Args:
        vocab: tokens of a row, V.
        num_rows: rows of the step, 1 to 8.
        num_drafts: rows of the drafter, 0 to 7; those that have no row of the step behind them are
            not read.
        parts: blocks of a row of the first kernel; together at most 132, as they wait for each
            other. None: as many as there are or have work.
        blocks: of the second kernel, at most 132 for the same reason.
        threads: of a block, a power of two from 32 to 512.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    if not 1 <= num_rows <= _MOST_ROWS:
        raise BuildError(f"ratio test: {num_rows} rows, expected 1 to {_MOST_ROWS}")
    if not 0 <= num_drafts < _MOST_ROWS:
        raise BuildError(f"ratio test: {num_drafts} drafts, expected 0 to {_MOST_ROWS - 1}")
    if not 1 <= vocab <= _MOST_VOCAB:
        raise BuildError(f"ratio test: {vocab} tokens, expected 1 to {_MOST_VOCAB}")
    num_drafts = min(num_drafts, num_rows - 1)
    rows = num_rows + num_drafts
    quads = -(-vocab // 4)
    if parts is None:
        parts = draw_parts(vocab, rows, threads)
    if blocks is None:
        blocks = min(MULTIPROCESSORS, -(-4 * quads // threads))
    assert threads in (32, 64, 128, 256, 512), threads
    assert 1 <= parts <= MULTIPROCESSORS // rows, parts
    assert 1 <= blocks <= MULTIPROCESSORS, blocks
    warps, widths = threads // 32, max(num_drafts, 1)
    rows_smem = struct_bytes(
        (sample_bytes(vocab, parts, threads), 16), (warps * 8 + _TABLE, 8), (16, 4)
    )
    test_smem = struct_bytes(
        (rows * -(-quads // blocks) * 16, 16),
        (rows * 24, 8),
        ((widths + 1 + widths + widths * warps) * 8, 8),
        (_TABLE + warps * 16, 8),
        (8, 4),
    )
    for entry, num_bytes in (("ratio_rows", rows_smem), ("ratio_test", test_smem)):
        if num_bytes > MAX_SMEM:
            raise BuildError(f"{entry}: {num_bytes} B of shared memory, expected up to {MAX_SMEM}")
    defines = (
        ("VOCAB", vocab),
        ("TARGET_ROWS", num_rows),
        ("DRAFT_ROWS", num_drafts),
        ("THREADS", threads),
        ("PARTS", parts),
        ("BLOCKS", blocks),
        ("ROWS_SMEM", rows_smem),
        ("TEST_SMEM", test_smem),
    )
    known: dict[str, Param] = {
        "rows": Scratch("rows", struct_bytes((rows * parts * 16, 8), (rows * 4, 4))),
        "lists": Scratch("lists", rows * parts * (1 + _LISTED) * 4),
        "exchange": Scratch("exchange", sample_exchange_bytes(rows), fill=0),
        "arrivals": Scratch("arrivals", (widths * 8 + 16) * blocks + 8, fill=0),
        "error": Scratch("error", 4, fill=0),
    }
    inputs = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    known |= {name: InputPointer(name) for name in inputs}
    known |= {name: Pointer(name) for name in ("p_logits", "q_logits", "drafts", "state")}

    def kernel(entry: str, num_blocks: int, smem: int, names: str) -> KernelLaunch:
        return KernelLaunch(
            source=_SOURCE,
            entry=entry,
            defines=defines,
            grid=(num_blocks, 1, 1),
            block=(threads, 1, 1),
            params=tuple(known[name] for name in names.split()),
            smem_bytes=smem,
        )

    return (
        kernel(
            "ratio_rows",
            rows * parts,
            rows_smem,
            "p_logits q_logits state temperature top_k top_p min_p rows lists exchange error",
        ),
        kernel(
            "ratio_test",
            blocks,
            test_smem,
            "p_logits q_logits drafts state temperature seed position rows arrivals error",
        ),
    )
