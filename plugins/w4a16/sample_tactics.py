"""The last kernel of a head: a token of each row from the head's candidates and logits."""

from inkrt.plugins.tactic import Int32, KernelLaunch, Output, Scratch
from inkrt.plugins.w4a16.launches import Names, candidates, launch, params_of
from inkrt.plugins.w4a16.shapes import (
    MULTIPROCESSORS,
    check_smem,
    check_tokens,
    require,
    sample_bytes,
    sample_exchange_bytes,
)

_THREADS = 512
_MOST_VOCAB = 2**18 - 1  # more would overflow a sum of probabilities


def argmax(num_tokens: int, count: int, *, names: Names | None = None) -> KernelLaunch:
    """Token int32 [T] of the largest of `count` candidates; the lowest id if several are equal.

    Names: best, row (scratch of the head by default); tokens is output 0 by default.
    """
    return launch(
        "argmax",
        [("HIDDEN", 8)],  # of `embed`, which stands in the same file
        source="token",
        blocks=num_tokens,
        threads=256,
        smem=64,
        params=params_of(
            "best row tokens count",
            names,
            {**candidates(num_tokens, count), "tokens": Output(0), "count": Int32(count)},
        ),
    )


def draw_parts(vocab: int, num_tokens: int, threads: int) -> int:
    """Blocks of a row: as many as can wait for each other or have work."""
    return max(1, min(MULTIPROCESSORS // num_tokens, -(-vocab // (2 * threads))))


def sample(
    vocab: int,
    num_tokens: int,
    count: int,
    *,
    last_row: bool = False,
    parts: int | None = None,
    threads: int = _THREADS,
    names: Names | None = None,
) -> KernelLaunch:
    """Token int32 [T] as the operator `sample` draws it; see `sample.cu`.

    Args:
        vocab: tokens of a row, at most 2^18.
        num_tokens: T.
        count: candidates of a row.
        last_row: see the operator.
        parts: blocks of a row; T times parts is at most 132, because they wait for each other. None
            for as many as there are or as have work.
        threads: of a block, a power of two from 32 to 512.
        names: best, row (scratch of the head by default); logits float32 [T, vocab]; temperature,
            top_k, top_p, min_p, seed, position, num_tokens; tokens and logits are outputs 0 and 1
            by default.

    Raises:
        BuildError: sizes that the kernel does not take.
    """
    check_tokens("sample", num_tokens)
    require(1 <= vocab <= _MOST_VOCAB, "sample", f"vocab={vocab}, expected 1 to {_MOST_VOCAB}")
    most = MULTIPROCESSORS // num_tokens
    if parts is None:
        parts = draw_parts(vocab, num_tokens, threads)
    require(1 <= parts <= most, "sample", f"{parts} blocks a row, expected 1 to {most}")
    assert threads in (32, 64, 128, 256, 512), threads
    return launch(
        "sample",
        [("VOCAB", vocab), ("PARTS", parts), ("THREADS", threads), ("LAST_ROW", int(last_row))],
        blocks=num_tokens * parts,
        threads=threads,
        smem=check_smem("sample", sample_bytes(vocab, parts, threads)),
        params=params_of(
            "best row logits temperature top_k top_p min_p seed position num_tokens tokens "
            "exchange error count",
            names,
            {
                **candidates(num_tokens, count),
                "logits": Output(1),
                "tokens": Output(0),
                "exchange": Scratch("exchange", sample_exchange_bytes(num_tokens), fill=0),
                "count": Int32(count),
            },
        ),
    )
