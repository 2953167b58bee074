"""Check the decode and verify attention kernels of sm_90a on a GPU; `ink-bench ops` times them.

    python perf/kernels/attention.py --compile DIR          cubins of everything below; no GPU
    python perf/kernels/attention.py --check [--cubins DIR]

--check compares every tactic with float64 at positions around the edges of pages, windows, rings
and splits. Rows of the cache that a step does not read are NaN, and outputs are poisoned. A token's
bits must not depend on T, on its place in the step, on the tactic's group or stages, or on the run.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from attention_device import Gpu, compile_all, tactics
from torch import Tensor

from inkrt.plugins.attention_sm90.tactics import Call
from inkrt.plugins.kv_layout import PAGE_TOKENS, tile_order
from inkrt.plugins.tactic import Tactic

MAX_TOKENS = 8
MAX_ERROR = 6e-3  # two bf16 roundings, as the operator's own cases allow
FLINT_WINDOW, FLINT_RING = 513, 576
NUM_SLOTS, SLOT = 3, 1


def call(kv: int, per_kv: int, dim: int, window: int, num_tokens: int = MAX_TOKENS) -> Call:
    """A call with a ring for windows and pages otherwise."""
    ring = -(-(window + MAX_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS if window else 0
    return Call(num_tokens, kv, per_kv, dim, window, ring, dim**-0.5)


FULL = call(4, 8, 128, 0)
SLIDING = call(4, 8, 128, FLINT_WINDOW)
# Positions of row 0: page ends, changes of split length (2112, 4224 of 33 clusters), long contexts.
FULL_STARTS = (*range(9), 56, 60, 63, 64, 1016, 2044, 2104, 2108, 2111, 4220, 8184, 12668)
SLIDING_STARTS = (*range(9), 60, 64, 504, 508, 512, 513, 568, 572, 575, 576, 577, 640, 1084, 9001)
ALL_WIDTHS, SOME_WIDTHS = tuple(range(MAX_TOKENS, 0, -1)), (MAX_TOKENS, 3, 1)
CHECKS: tuple[tuple[Call, tuple[int, ...], tuple[int, ...]], ...] = (
    (FULL, ALL_WIDTHS, FULL_STARTS),
    (FULL, SOME_WIDTHS, (99_992, 262_144 - MAX_TOKENS)),
    (SLIDING, ALL_WIDTHS, SLIDING_STARTS),
    (replace(FULL, num_kv_heads=2), SOME_WIDTHS, (5, 60, 4220, 8184)),
    (replace(FULL, num_kv_heads=1), SOME_WIDTHS, (5, 8444, 30000)),
    (replace(SLIDING, num_kv_heads=1), SOME_WIDTHS, (5, 510, 1084)),
    (replace(FULL, num_kv_heads=2, heads_per_kv=6), SOME_WIDTHS, (5, 4220)),
    (replace(SLIDING, num_kv_heads=2, heads_per_kv=3), SOME_WIDTHS, (5, 572)),
    (call(2, 8, 128, 100), SOME_WIDTHS, (0, 95, 190, 1000)),
    (call(2, 4, 64, 0), SOME_WIDTHS, (0, 60, 700)),
    (call(2, 4, 64, 9), SOME_WIDTHS, (0, 5, 60, 127, 500)),
    (call(2, 4, 32, 0), SOME_WIDTHS, (0, 60, 700)),
    (call(1, 5, 16, 9), SOME_WIDTHS, (0, 60, 500)),
    (call(2, 2, 48, 9), SOME_WIDTHS, (0, 60, 500)),
    (call(1, 16, 256, 0), SOME_WIDTHS, (0, 60, 300)),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Data of one check: all tokens up to start + 8.

    Attributes:
        call: shapes; num_tokens is 8.
        start: position of row 0.
        q: [8, H, d].
        k: [start + 8, KV, d].
        v: like k.
        sinks: float32 [H].
        table: int32 [pages].
        reference: float64 [8, H, d].
    """

    call: Call
    start: int
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor
    table: Tensor
    reference: Tensor


def make_problem(shape: Call, start: int) -> Problem:
    """Random data and its float64 result."""
    generator = torch.Generator("cuda").manual_seed(start)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    keys, kv, dim = start + MAX_TOKENS, shape.num_kv_heads, shape.head_dim
    q = normal(MAX_TOKENS, shape.num_heads, dim) * 2
    k, v = normal(keys, kv, dim), normal(keys, kv, dim)
    sinks = torch.randn(shape.num_heads, generator=generator, device="cuda") * 2
    pages = -(-keys // PAGE_TOKENS)
    table = torch.randperm(pages + 3, generator=generator, device="cuda")[:pages].int()
    rows = []
    for t in range(MAX_TOKENS):
        end = start + t + 1
        begin = max(0, end - shape.window) if shape.window else 0
        grouped = q[t].double().view(kv, shape.heads_per_kv, dim)
        scores = grouped @ k[begin:end].double().permute(1, 2, 0) * shape.scale
        logits = torch.cat([scores, sinks.double().view(kv, -1, 1)], dim=-1)
        weights = logits.softmax(dim=-1)[..., :-1]
        rows.append((weights @ v[begin:end].double().transpose(0, 1)).reshape(-1, dim))
    return Problem(shape, start, q, k, v, sinks, table, torch.stack(rows))


def make_cache(problem: Problem, values: Tensor, first: int, count: int) -> Tensor:
    """A buffer with NaN everywhere but in the rows that `count` tokens from `first` on read.

    Args:
        problem: whose page table and layout to use.
        values: its k or v.
        first: position of the step.
        count: valid rows of the step.
    """
    shape = problem.call
    oldest = max(0, first - shape.window + 1) if shape.window else 0
    positions = torch.arange(oldest, first + count, device="cuda")
    if shape.ring_rows:
        in_ring = positions % shape.ring_rows
        per_slot = shape.ring_rows // PAGE_TOKENS
        pages, num_pages = SLOT * per_slot + in_ring // PAGE_TOKENS, NUM_SLOTS * per_slot
    else:
        pages = problem.table[positions // PAGE_TOKENS].long()
        num_pages = len(problem.table) + 3
    size = (num_pages, shape.num_kv_heads, PAGE_TOKENS * shape.head_dim)
    cache = torch.full(size, float("nan"), dtype=torch.bfloat16, device="cuda")
    order = tile_order(shape.head_dim).to("cuda")[positions % PAGE_TOKENS]
    heads = torch.arange(shape.num_kv_heads, device="cuda")
    cache[pages[:, None, None], heads[None, :, None], order[:, None, :]] = values[positions]
    return cache


class Checker:
    """Runs problems and counts what is wrong.

    Attributes:
        failures: number of failed problems.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.failures = 0
        self._gpu = gpu

    def check(self, shape: Call, widths: tuple[int, ...], start: int) -> None:
        """Check all tactics and widths, 8 first, at one position and print a line."""
        problem = make_problem(shape, start)
        wrong: list[str] = []
        worst = 0.0
        bits: dict[bool, Tensor] = {}  # by whether the kernel is the simple one
        for width in widths:
            for tactic in tactics(replace(shape, num_tokens=width)):
                is_simple = tactic.name == "simple"
                for offset in range(MAX_TOKENS) if width == 1 else {0, MAX_TOKENS - width}:
                    if offset + width > MAX_TOKENS:
                        continue
                    out = self._run(problem, tactic, width, offset, width)
                    rows = slice(offset, offset + width)
                    label = f"{tactic.name} T={width} at +{offset}"
                    error = relative_error(out, problem.reference[rows])
                    worst = max(worst, error) if error == error else float("inf")  # noqa: PLR0124
                    if not error < MAX_ERROR:
                        wrong.append(f"{label}: error {error:.1e}")
                    expected = bits.setdefault(is_simple, out)
                    if different := int((out != expected[rows]).sum()):
                        wrong.append(f"{label}: {different} values differ from T=8")
                if width == MAX_TOKENS:
                    wrong += self._check_repeats(problem, tactic, bits[is_simple])
        verdict = "; ".join(wrong[:6]) + f" ({len(wrong)} in all)" if wrong else "ok"
        self.failures += bool(wrong)
        show(f"{describe(shape)} start {start}: worst error {worst:.2e}: {verdict}")

    def _check_repeats(self, problem: Problem, tactic: Tactic, expected: Tensor) -> list[str]:
        """Same bits when run again, also with fewer valid rows."""
        wrong = []
        for count in (MAX_TOKENS, MAX_TOKENS, 1, 3, 5, 7):
            out = self._run(problem, tactic, MAX_TOKENS, 0, count)
            if int((out[:count] != expected[:count]).sum()):
                wrong.append(f"{tactic.name} with {count} valid rows: bits differ")
            if not bool(out.isfinite().all()):
                wrong.append(f"{tactic.name} with {count} valid rows: outputs are not finite")
        return wrong

    def _run(self, problem: Problem, tactic: Tactic, width: int, offset: int, count: int) -> Tensor:
        """Output [width, H, d] of a step of `width` rows whose row 0 is token `offset`."""

        def int32(value: int) -> Tensor:
            return torch.tensor([value], dtype=torch.int32, device="cuda")

        first = problem.start + offset
        arguments = {
            "q": problem.q[offset : offset + width].clone(),
            "sinks": problem.sinks,
            "k_cache": make_cache(problem, problem.k, first, count),
            "v_cache": make_cache(problem, problem.v, first, count),
            "page_table": problem.table,
            "slot": int32(SLOT),
            "position": int32(first),
            "num_tokens": int32(count),
        }
        arguments["q"][count:] = float("nan")
        out = torch.full_like(arguments["q"], float("nan"))
        torch.cuda.synchronize()
        self._gpu.launch(tactic, arguments, out)
        self._gpu.synchronize()
        return out


def show(line: str) -> None:
    """Write a line of the report."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||."""
    return float((out.double() - reference).norm() / reference.norm())


def describe(shape: Call) -> str:
    """Short text of a call's shapes."""
    kind = f"sliding {shape.window}" if shape.window else "full"
    return f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim} {kind}"


def main() -> int:
    """Parse arguments and run; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--compile", type=Path, metavar="DIR", help="fill DIR with cubins and end")
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="folder of --compile")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--only", default="", help="part of a shape's description, e.g. sliding")
    options = parser.parse_args()
    if options.compile:
        calls = [replace(shape, num_tokens=t) for shape, widths, _ in CHECKS for t in widths]
        kernels = [k for shape in calls for tactic in tactics(shape) for k in tactic.kernels]
        show(f"{compile_all(kernels, options.compile)} cubins in {options.compile}")
        return 0
    gpu = Gpu(options.cubins)
    failures = 0
    if options.check:
        checker = Checker(gpu)
        for shape, widths, starts in CHECKS:
            for start in starts if options.only in describe(shape) else ():
                checker.check(shape, widths, start)
        failures = checker.failures
        show(f"{failures} problems failed" if failures else "all problems passed")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
