"""Check and time the kernels of `relative_attention` of Inkling-2 on a GPU.

    python perf/kernels/relative_attention.py --check      against float64, and bits across T
    python perf/kernels/relative_attention.py --time       a line for every figure that is wanted
    python perf/kernels/relative_attention.py --compile    cubins of both; no GPU

`--only sliding` takes the shapes with that text alone, `--only 'sliding 1024 T=1'` one row.

Times are of graphs of launches with programmatic edges, one behind another, on caches of many
layers, so that keys, values and banks come from memory. They share activations and scratch.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from attention_problem import make_problem, step_arguments
from torch import Tensor
from w4a16_backend import Buffer, bind
from w4a16_gpu import Gpu, cubin, time_graph

from inkrt.plugins.attention_sm90.bank import Relative
from inkrt.plugins.attention_sm90.tactics import (
    Call,
    fast_tactic,
    simple_tactic,
    splits,
    tile_tactic,
)
from inkrt.plugins.attention_sm90.window import fits_window_kernel, window_tactics
from inkrt.plugins.kv_layout import PAGE_TOKENS, tile_bytes
from inkrt.plugins.tactic import KernelLaunch, Tactic

MAX_TOKENS = 8
MAX_ERROR = 6e-3  # bf16 probabilities, and two roundings of the result
BANDWIDTH = 4.55e12  # bytes per second
ROTATION_BYTES = 400 << 20  # of caches that launches take turns on

FULL = Call(MAX_TOKENS, 2, 6, 128, 0, 0, 128**-0.5, Relative(16, 1024))
SLIDING = replace(FULL, window=1024, ring_rows=1536)
NANO = Call(MAX_TOKENS, 2, 2, 32, 0, 0, 32**-0.5, Relative(8, 128))
NANO_RING = replace(NANO, window=64, ring_rows=128, relative=Relative(8, 64))


def ranks(call: Call, tp_size: int) -> Call:
    """The call of one of `tp_size` ranks of Inkling-2."""
    return replace(call, num_kv_heads=8 // tp_size)


# Shapes and positions of row 0: page ends, the extent's end, changes of split length, ring wraps.
EDGES = (0, 1, 56, 60, 63, 64, 1015, 1016, 1020, 1023, 1024, 1087)
MANY, FEW = (8, 5, 3, 2, 1), (8, 4, 1)
CHECKS: tuple[tuple[Call, tuple[int, ...], tuple[int, ...]], ...] = (
    (ranks(FULL, 4), MANY, (*EDGES, 4222, 8184, 8444, 65_528, 99_992)),
    (ranks(FULL, 8), MANY, (*EDGES, 7164, 8184, 65_528, 99_992)),
    (ranks(FULL, 2), FEW, (5, 1020, 2108, 8184)),
    (ranks(FULL, 1), FEW, (5, 1020, 8184)),
    (ranks(SLIDING, 4), MANY, (*EDGES, 1528, 1532, 1536, 2050, 9001)),
    (ranks(SLIDING, 8), MANY, (5, 1020, 1532, 9001)),
    (ranks(SLIDING, 2), FEW, (5, 1020, 1532, 9001)),
    (ranks(SLIDING, 1), FEW, (5, 1020, 1532, 9001)),
    (NANO, FEW, (0, 60, 124, 700)),
    (NANO_RING, FEW, (0, 60, 124, 700)),
)
WIDE: tuple[tuple[Call, int, int], ...] = (  # with position and valid rows
    (replace(ranks(FULL, 4), num_tokens=512), 0, 512),
    (replace(ranks(FULL, 4), num_tokens=512), 3000, 333),
    (replace(ranks(SLIDING, 8), num_tokens=512), 1300, 512),
    (replace(NANO, num_tokens=100), 90, 77),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure that is wanted.

    Attributes:
        call: of a rank; the number of tokens is that of the row.
        context: positions that the last token sees, or that the ring has seen.
        goal: in us.
        must: in us.
    """

    call: Call
    context: int
    goal: float
    must: float


def _row(call: Call, tp_size: int, tokens: int, context: int, goal: float, must: float) -> Row:
    return Row(replace(ranks(call, tp_size), num_tokens=tokens), context, goal, must)


ROWS = (
    _row(FULL, 8, 1, 8192, 4.3, 5.0),
    _row(FULL, 8, 1, 65_536, 11.0, 13.0),
    _row(FULL, 4, 1, 8192, 5.5, 6.5),
    _row(FULL, 4, 1, 100_000, 27.0, 29.5),
    _row(SLIDING, 4, 1, 9000, 3.3, 3.9),
    _row(FULL, 8, 8, 8192, 7.0, 10.0),
    _row(FULL, 8, 8, 65_536, 16.0, 22.0),
    _row(FULL, 4, 8, 8192, 8.0, 11.0),
    _row(FULL, 4, 8, 100_000, 32.0, 41.0),
    _row(SLIDING, 4, 8, 9000, 6.0, 10.4),
)


def tactics(call: Call) -> list[Tactic]:
    """Candidates for a call, with the same bits."""
    if call.head_dim != FULL.head_dim:
        return [simple_tactic(call)]
    if call.num_tokens > MAX_TOKENS:
        return [tile_tactic(call)]
    if fits_window_kernel(call):
        return window_tactics(call)
    return [fast_tactic(call, split) for split in splits(call)]


def timed_tactics(call: Call) -> list[Tactic]:
    """Candidates, and what `window_tactics` took the place of, whose bits are others."""
    found = tactics(call)
    if fits_window_kernel(call):
        found += [fast_tactic(call, split) for split in splits(call)]
    return found


def check_call(gpu: Gpu, call: Call, widths: tuple[int, ...], start: int) -> list[str]:
    """What is wrong with any width, 8 first, place in a step and tactic at one position."""
    problem = make_problem(call, start, MAX_TOKENS, "cuda")
    wrong: list[str] = []
    expected: Tensor | None = None
    for width in widths:
        steps = [(offset, width) for offset in sorted({0, MAX_TOKENS - width})]
        steps += [(0, 3), (0, 8)] if width == MAX_TOKENS else []
        for tactic in tactics(replace(call, num_tokens=width)):
            for offset, count in steps:
                out = run(gpu, tactic, step_arguments(problem, offset, width, count))[:count]
                rows = slice(offset, offset + count)
                label = f"{tactic.name} T={width} at +{offset}, {count} valid"
                error = relative_error(out, problem.reference[rows])
                if not error < MAX_ERROR:
                    wrong.append(f"{label}: error {error:.1e}")
                expected = out if expected is None else expected
                if different := int((out != expected[rows]).sum()):
                    wrong.append(f"{label}: {different} values differ from T=8")
    if call.head_dim == FULL.head_dim and start < 3000:
        simple = run(gpu, simple_tactic(call), step_arguments(problem, 0, MAX_TOKENS, MAX_TOKENS))
        if not (error := relative_error(simple, problem.reference)) < MAX_ERROR:
            wrong.append(f"simple: error {error:.1e}")
    return wrong


def check_wide(gpu: Gpu, call: Call, start: int, count: int) -> list[str]:
    """What is wrong with a prefill step."""
    problem = make_problem(call, start, count, "cuda")
    (tactic,) = tactics(call)
    out = run(gpu, tactic, step_arguments(problem, 0, call.num_tokens, count))
    error = relative_error(out[:count], problem.reference)
    wrong = [] if error < MAX_ERROR else [f"{tactic.name}: error {error:.1e}"]
    return [*wrong, "rows behind the valid ones are not zero"] if out[count:].any() else wrong


def run(gpu: Gpu, tactic: Tactic, arguments: dict[str, Tensor]) -> Tensor:
    """Output [width, H, d] of a launch behind another one, which must leave its scratch in order.

    Raises:
        RuntimeError: a kernel gave up waiting, or left something in its scratch.
    """
    buffers = {name: gpu.buffer(value.contiguous()) for name, value in arguments.items()}
    scratch: dict[str, Buffer] = {}
    for _ in range(2):
        out = torch.full_like(arguments["q"], float("nan"))
        for bound in bind(gpu, tactic, buffers, [gpu.buffer(out)], scratch):
            gpu.launch(bound.kernel, bound.values)
    torch.cuda.synchronize()
    check_scratch(gpu, tactic, scratch)
    return out


def check_scratch(gpu: Gpu, tactic: Tactic, scratch: dict[str, Buffer]) -> None:
    """Raise RuntimeError where launches did not end as they should."""
    for name, buffer in scratch.items():
        left = 0 if name == "error" else 0xFF  # what was in it
        if (gpu.download(buffer) != left).any():
            raise RuntimeError(f"{tactic.name}: a launch left something in {name}")


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||."""
    return float((out.double() - reference).norm() / reference.norm())


def time_tactic(gpu: Gpu, row: Row, tactic: Tactic) -> float:
    """Median us of a launch."""
    call = row.call
    pages = -(-row.context // PAGE_TOKENS)
    per_layer = call.ring_rows // PAGE_TOKENS if call.ring_rows else pages
    layer_bytes = 2 * per_layer * call.num_kv_heads * tile_bytes(call.head_dim)
    layers = max(2, min(512, -(-ROTATION_BYTES // layer_bytes)))
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    def int32(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device="cuda")

    heads, tokens = call.num_heads, call.num_tokens
    assert call.relative is not None
    arguments = {
        "q": normal(tokens, heads, call.head_dim),
        "rel": normal(tokens, heads, call.relative.states),
        "sinks": normal(tokens, heads),
        "gate": normal(tokens, heads * call.head_dim),
        "position": int32(row.context - tokens),
        "num_tokens": int32(tokens),
        "slot": int32(0),
        "page_table": torch.randperm(pages, generator=generator, device="cuda").int(),
    }
    of_layers = {
        "k_cache": normal(layers, layer_bytes // 4),
        "v_cache": normal(layers, layer_bytes // 4),
        "bank": normal(layers, call.relative.states * call.relative.extent),
    }
    out = gpu.buffer(torch.empty_like(arguments["q"]))
    scratch: dict[str, Buffer] = {}
    launches = []
    for layer in range(layers):
        own = {name: values[layer] for name, values in of_layers.items()}
        buffers = {name: gpu.buffer(value) for name, value in {**arguments, **own}.items()}
        for bound in bind(gpu, tactic, buffers, [out], scratch):
            launches.append(gpu.prepare(bound.kernel, bound.values))
    turns = -(-64 // len(launches))

    def body() -> None:
        for _ in range(turns):
            for launch in launches:
                launch()

    us = time_graph(body, replays=20) / (turns * len(launches))
    check_scratch(gpu, tactic, scratch)
    return us


def show(line: str) -> None:
    """Write a line of the report."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def describe(call: Call) -> str:
    """Short text of a call's shapes."""
    kind = f"sliding {call.window}" if call.window else "full"
    return f"{call.num_heads}/{call.num_kv_heads}x{call.head_dim} {kind} T={call.num_tokens}"


def run_checks(gpu: Gpu, only: str) -> int:
    """Print a line for every shape whose text has `only`; gives the number of those that failed."""
    failures = 0
    for call, widths, starts in CHECKS:
        if only not in describe(call):
            continue
        wrong = [
            f"start {start}: {line}"
            for start in starts
            for line in check_call(gpu, call, widths, start)
        ]
        failures += report(f"{describe(call)}, {len(starts)} positions", wrong)
    for call, start, count in WIDE:
        if only not in describe(call):
            continue
        wrong = check_wide(gpu, call, start, count)
        failures += report(f"{describe(call)} start {start}, {count} rows", wrong)
    show(f"{failures} checks failed" if failures else "all checks passed")
    return failures


def report(text: str, wrong: list[str]) -> bool:
    """Print a line; gives whether anything is wrong."""
    show(f"{text}: " + ("; ".join(wrong[:4]) + f" ({len(wrong)} in all)" if wrong else "ok"))
    return bool(wrong)


def checked_kernels(only: str) -> list[KernelLaunch]:
    """All of --check."""
    checks = [(call, widths) for call, widths, _ in CHECKS if only in describe(call)]
    found = [t for c, widths in checks for n in widths for t in tactics(replace(c, num_tokens=n))]
    found += [simple_tactic(call) for call, _ in checks]
    found += [t for call, _, _ in WIDE if only in describe(call) for t in tactics(call)]
    return [kernel for tactic in found for kernel in tactic.kernels]


def timed_kernels(only: str) -> list[KernelLaunch]:
    """All of --time."""
    calls = [row.call for row in ROWS if only in describe(row.call)]
    return [k for call in calls for tactic in timed_tactics(call) for k in tactic.kernels]


def compile_all(folder: Path, kernels: Iterable[KernelLaunch]) -> None:
    """Fill a folder with cubins, side by side."""
    distinct = list({(kernel.source, kernel.defines): kernel for kernel in kernels}.values())
    cubin(folder, distinct[0])  # imports the compiler, which threads must not do at once
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        count = len(list(pool.map(lambda kernel: cubin(folder, kernel), distinct)))
    show(f"{count} cubins in {folder}")


def run_times(gpu: Gpu, only: str) -> None:
    """Print a line for every row whose text has `only`, with all tactics."""
    for row in ROWS:
        call = row.call
        if only not in describe(call):
            continue
        times = {tactic.name: time_tactic(gpu, row, tactic) for tactic in timed_tactics(call)}
        keys = min(row.context, call.window + call.num_tokens - 1) if call.window else row.context
        floor = 1e6 * 4 * keys * call.num_kv_heads * call.head_dim / BANDWIDTH
        best = min(times[tactic.name] for tactic in tactics(call))
        verdict = "goal" if best <= row.goal else "must" if best <= row.must else "MISSED"
        every = ", ".join(f"{name} {us:.2f}" for name, us in times.items())
        show(
            f"{describe(call)} context {row.context}: {best:.2f} us, floor {floor:.2f}, goal "
            f"{row.goal}, must {row.must}: {verdict} ({every})"
        )


def main() -> int:
    """Parse arguments and run; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cubins", type=Path, default=Path("build/cubins"), help="folder of code")
    parser.add_argument("--compile", action="store_true", help="compile all")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--only", default="", help="text of the shapes to take")
    parser.add_argument("--time", action="store_true", help="time the wanted rows")
    options = parser.parse_args()
    if options.check or options.compile:
        compile_all(options.cubins, checked_kernels(options.only))
    if options.time or options.compile:
        compile_all(options.cubins, timed_kernels(options.only))
    if options.compile:
        return 0
    gpu = Gpu(options.cubins)
    failures = run_checks(gpu, options.only) if options.check else 0
    if options.time:
        run_times(gpu, options.only)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
