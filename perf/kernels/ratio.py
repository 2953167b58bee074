"""Runner of the ratio test's kernels on a GPU: checks against the CPU and times, as JSON lines.

    PYTHONPATH=. python perf/kernels/ratio.py --compile            (no GPU: fills the cubin folder)
    PYTHONPATH=. python perf/kernels/ratio.py --check [--verbose]
    PYTHONPATH=. python perf/kernels/ratio.py --time [--widths 0,3,7]

Times are for eight rows of the target, in a graph of a chain of rounds; logits are in the L2 cache,
as they are behind a step. Exit status 1: a check failed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ratio_checks import FILTERS, Judge, check_blocks, make_block
from w4a16_backend import bind

INKLING, PADDED = 200_058, 201_024
CHECKED = ((INKLING, 8), (PADDED, 8), (INKLING, 2), (INKLING, 1), (1003, 8), (131, 8))
LAUNCHES = 20


def _emit(record: dict[str, str | int | float | bool]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _check(options: argparse.Namespace) -> int:
    from w4a16_gpu import Gpu

    gpu = Gpu(options.cubins)
    failed = total = 0

    def report(name: str, ok: bool, detail: str) -> None:
        nonlocal failed, total
        total += 1
        failed += not ok
        if not ok or options.verbose:
            _emit({"check": name, "ok": ok, "detail": detail})

    for vocab, num_rows in CHECKED:
        check_blocks(Judge(gpu, vocab, num_rows), 91 if vocab > 2000 else 910, report)
        _emit({"checks": f"ratio V={vocab} n={num_rows}", "failed": failed, "total": total})
    return failed


def _times(options: argparse.Namespace) -> None:
    from w4a16_gpu import Gpu, time_graph

    gpu = Gpu(options.cubins)
    generator = np.random.default_rng(1)
    for width in options.widths:
        judge = Judge(gpu, INKLING)
        for name, sampling in FILTERS.items():
            block = make_block("near", INKLING, sampling, width, generator)
            bounds = bind(gpu, judge.tactic, judge.arguments(block), [], judge.scratch)
            launches = [gpu.prepare(bound.kernel, bound.values) for bound in bounds]
            # The first kernel alone, then both.
            for part in (launches[:1], launches):

                def body(part: list[Callable[[], None]] = part) -> None:
                    for _ in range(LAUNCHES):
                        for launch in part:
                            launch()

                us = round(time_graph(body) / LAUNCHES, 2)
                kernels = "both" if len(part) == 2 else "ratio_rows"
                _emit({"kernels": kernels, "filters": name, "V": INKLING, "w": width, "us": us})


def _compile(options: argparse.Namespace) -> None:
    from w4a16_gpu import cubin

    for vocab, num_rows in CHECKED:
        for kernel in Judge(None, vocab, num_rows).tactic.kernels:  # type: ignore[arg-type]
            cubin(options.cubins, kernel)
    _emit({"cubins": len(list(options.cubins.glob("*.cubin")))})


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print passing checks too")
    parser.add_argument(
        "--widths", type=lambda s: [int(w) for w in s.split(",")], default=[0, 3, 7]
    )
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
