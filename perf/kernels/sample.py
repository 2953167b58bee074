"""Runner of the kernel `sample` on a GPU: checks against the CPU and times, as JSON lines.

    PYTHONPATH=. python perf/kernels/sample.py --compile            (no GPU: fills the cubin folder)
    PYTHONPATH=. python perf/kernels/sample.py --check [--verbose]
    PYTHONPATH=. python perf/kernels/sample.py --time [--tokens 1,8]

Times are of the last kernel alone, in a graph of a chain of launches; its logits are in the L2
cache, as they are behind the head. `argmax` is the kernel of a head that cannot sample. Exit status
1: a check failed.
"""

import argparse
import sys
from pathlib import Path

from records import Tally, emit
from sample_checks import (
    FILTERS,
    MOST,
    Report,
    Sampler,
    check,
    check_head,
    check_noise,
    check_special,
    expected,
    rows_of,
)
from w4a16_backend import Buffer, bind, empty

from inkrt.plugins.tactic import Output, Pointer, Tactic
from inkrt.plugins.w4a16.sample_tactics import argmax
from inkrt.plugins.w4a16.shapes import Dims
from inkrt.plugins.w4a16.tactics import lm_head

FLINT, INKLING = 150_144, 201_024
HEAD_BLOCKS = 264
# Whole rows, rows without 16-byte alignment, one part, and more parts than have work.
CHECKED = ((FLINT, None), (INKLING, None), (50_257, None), (1000, None), (131, 3), (40_001, 1))
HEADS = (Dims(vocab=20_006), Dims(vocab=20_006, bf16=True), Dims(hidden=256, vocab=301))
LAUNCHES = 20


def _check(options: argparse.Namespace) -> int:
    from w4a16_gpu import Gpu

    gpu = Gpu(options.cubins)
    report = Tally(verbose=options.verbose)

    check_noise(gpu, report)
    for vocab, parts in CHECKED:
        sampler = Sampler(gpu, vocab, parts, count=HEAD_BLOCKS)
        check(sampler, report)
        check_special(sampler, report)
        _many(sampler, report)
        report.sum_up(f"sample V={vocab}")
    for dims in HEADS:
        check_head(gpu, dims, report)
    report.sum_up("all")
    return report.failed


def _many(sampler: Sampler, report: Report) -> None:
    """Many positions and seeds on the same scratch."""
    rows = rows_of(sampler.vocab, "wide", seed=4)
    filters = {"temperature": 1.1, "top_k": 60, "top_p": 0.95}
    wrong = 0
    for step in range(100):
        sampling = {**(filters if step % 2 else {}), "seed": step // 3}
        got = sampler.draw(rows, position=8 * step, **sampling)
        wrong += int((got != expected(rows, position=8 * step, **sampling)).sum())
    report(f"sample V={sampler.vocab} many", wrong == 0, f"{wrong} of 800 draws differ")


def _times(options: argparse.Namespace) -> None:
    from w4a16_gpu import Gpu, time_graph

    gpu = Gpu(options.cubins)

    def time(tactic: Tactic, arguments: dict[str, Buffer]) -> float:
        tokens = empty(gpu, 4 * MOST)
        scratch: dict[str, Buffer] = {}
        (bound,) = bind(gpu, tactic, arguments, [tokens], scratch)
        launch = gpu.prepare(bound.kernel, bound.values)

        def body() -> None:
            for _ in range(LAUNCHES):
                launch()

        return round(time_graph(body) / LAUNCHES, 3)

    for vocab in (FLINT, INKLING):
        sampler = Sampler(gpu, vocab, count=HEAD_BLOCKS)
        for width in options.tokens:
            names = {"best": Pointer("best"), "row": Pointer("row"), "tokens": Output(0)}
            greedy = Tactic("argmax", (argmax(width, HEAD_BLOCKS, names=names),), 0, 0)
            rows = rows_of(vocab, "wide")[:width]
            us = time(greedy, sampler.arguments(rows, 0, width, {}))
            emit({"kernel": "argmax", "V": vocab, "T": width, "us": us})
            for kind in ("wide", "flat"):
                rows = rows_of(vocab, kind)[:width]
                for name, filters in FILTERS.items():
                    arguments = sampler.arguments(rows, 0, width, filters)
                    us = time(sampler.tactic(width), arguments)
                    emit({"kernel": f"sample {kind} {name}", "V": vocab, "T": width, "us": us})


def _compile(options: argparse.Namespace) -> None:
    from w4a16_gpu import cubin

    found = []
    for vocab, parts in CHECKED:
        sampler = Sampler(None, vocab, parts)  # type: ignore[arg-type]
        found += [sampler.tactic(width) for width in range(1, MOST + 1)]
    for dims in HEADS:
        found += [
            lm_head(dims, width, eps=1e-6, logits=True, greedy=True, sampled=True, norm=False,
                    has_delta=False)
            for width in (1, 3, 8)
        ]  # fmt: skip
    found.append(Tactic("argmax", (argmax(1, HEAD_BLOCKS),), 0, 0))
    for tactic in found:
        for kernel in tactic.kernels:
            cubin(options.cubins, kernel)
    emit({"cubins": len(list(options.cubins.glob("*.cubin")))})


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print passing checks too")
    parser.add_argument("--tokens", type=lambda s: [int(t) for t in s.split(",")], default=[1, 8])
    parser.add_argument("--cubins", type=Path, default=Path("build/cubins"))
    options = parser.parse_args()
    if options.compile:
        _compile(options)
    failed = _check(options) if options.check else 0
    if options.time:
        _times(options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
