"""Checks of the w4a16 kernels on a GPU against float64, as JSON lines; `ink-bench ops` times them.

    PYTHONPATH=. python perf/kernels/w4a16.py --compile            (no GPU: fills the cubin folder)
    PYTHONPATH=. python perf/kernels/w4a16.py --check              (small sizes, then the model's)
    PYTHONPATH=. python perf/kernels/w4a16.py --check --chunk 512  (the tiled kernels instead)

Cubins that are in the folder are not compiled again. Exit status 1: a check failed.
"""

import argparse
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from records import Tally, emit
from w4a16_cases import all_tactics
from w4a16_checks import Checks
from w4a16_tile_checks import TileChecks

from inkrt.plugins.w4a16.shapes import Dims

SMALL = Dims(
    hidden=256, heads=8, kv_heads=1, experts=16, top_k=6, width=256, shared_width=256,
    dense_width=512, vocab=300,
)  # fmt: skip
# A part of the vocabulary is enough to check, with a last tile that is not full.
MODEL = Dims(vocab=20_006)


def _check(options: argparse.Namespace) -> int:
    from w4a16_gpu import Gpu

    gpu = Gpu(options.cubins, pdl=not options.no_pdl)
    report = Tally(verbose=options.verbose)

    # With a chunk, fewer experts: the oracle would take minutes.
    model = replace(MODEL, experts=64) if options.chunk else MODEL
    for label, dims in (("small", SMALL), ("model", model)):
        for bf16 in (False, True):
            if bf16 and not options.bf16:
                continue
            start, before, known = time.monotonic(), report.failed, report.total
            sizes = replace(dims, bf16=bf16)
            if options.chunk:
                counts = (9, options.chunk - 13, options.chunk)
                TileChecks(gpu, sizes, report, counts, chunk=options.chunk).all()
            else:
                Checks(gpu, sizes, report).all()
            emit({
                "checks": label, "bf16": bf16, "failed": report.failed - before,
                "total": report.total - known,
                "seconds": round(time.monotonic() - start, 1),
            })  # fmt: skip
    return report.failed


def _chain_check(options: argparse.Namespace) -> int:
    """Six layers and the head: rows of every T bit-equal to those of T = 8, PDL on equal to off."""
    import torch
    from w4a16_chain import Chain, Model
    from w4a16_gpu import Gpu

    gpu = Gpu(options.cubins)
    model = Model(gpu, replace(Dims(), bf16=options.bf16), 6)
    kept = {
        name: model.shared[name].owner.clone()  # type: ignore[attr-defined]
        for name in ("residual_a", "delta_b")
    }
    results, failed = {}, 0
    for pdl, widths in ((True, (1, 2, 3, 5, 8)), (False, (8,))):
        gpu.pdl = pdl
        for tokens in widths:
            for name, value in kept.items():
                model.shared[name].owner.copy_(value)  # type: ignore[attr-defined]
            model.shared["logits"].owner.fill_(0xFF)  # type: ignore[attr-defined]
            for launch in Chain(model, tokens).step(6, logits=True):
                launch()
            torch.cuda.synchronize()
            rows = gpu.download(model.shared["logits"]).reshape(8, -1)[:tokens]
            results[pdl, tokens] = rows
            finite = bool(np.isfinite(rows.view(np.float32)).all())
            failed += not finite
            if not finite:
                emit({"check": f"chain T={tokens} pdl={pdl} finite", "ok": False})
    for (pdl, tokens), rows in results.items():
        same = bool(np.array_equal(rows, results[True, 8][:tokens]))
        failed += not same
        emit({"check": f"chain T={tokens} pdl={pdl} equals T=8", "ok": same})
    return failed


def _compile(options: argparse.Namespace) -> None:
    from w4a16_chain import chain_tactics
    from w4a16_gpu import cubin

    start = time.monotonic()
    for bf16 in (False, True):
        found = chain_tactics(replace(Dims(), bf16=bf16))
        for tokens in (1, 2):
            for dims in (SMALL, MODEL):
                found += all_tactics(replace(dims, bf16=bf16), tokens)
        for tactic in found:
            for kernel in tactic.kernels:
                cubin(options.cubins, kernel)
    number = len(list(options.cubins.glob("*.cubin")))
    emit({"cubins": number, "seconds": round(time.monotonic() - start, 1)})


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="check bf16 weights as well")
    parser.add_argument("--chunk", type=int, default=0, help="check steps of so many tokens")
    parser.add_argument("--verbose", action="store_true", help="print passing checks too")
    parser.add_argument("--cubins", type=Path, default=Path("build/cubins"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    failed = 0
    if options.compile:
        _compile(options)
    if options.check:
        failed += _check(options)
        failed += 0 if options.chunk else _chain_check(options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
