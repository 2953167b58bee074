"""Check and time the streams of row tiles (`w4a16/ring_linear.cu`, `ring_quant.cu`) on a GPU.

    PYTHONPATH=. python perf/kernels/linear_group.py --compile   (no GPU: fills the cubin folder)
    PYTHONPATH=. python perf/kernels/linear_group.py --check     every case of the operators
    PYTHONPATH=. python perf/kernels/linear_group.py             times
    PYTHONPATH=. python perf/kernels/linear_group.py --format mxfp8    of quantized projections

Times are of calls of Inkling-2-Small's sizes on one rank, in a CUDA graph with programmatic edges.
Weights of a call come from memory: those of all calls of a chain exceed the L2. Between two calls
stands a copy of T blocks, which reads the one's result and writes the other's input, as a layer has
small kernels between its products; its own price in a chain of copies is subtracted. "alone": calls
without it, so that a call's blocks find no room before those of the one before have ended.
"""

import argparse
import math
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor
from w4a16_backend import Buffer, bind, empty
from w4a16_gpu import Gpu, cubin, cubin_path, time_graph

from inkrt.builder.quantize import quantize
from inkrt.builder.tactics import find_tactics
from inkrt.errors import BuildError
from inkrt.plugins.registry import Arguments, Case, plugins
from inkrt.plugins.tactic import CallArgs, KernelLaunch, Pointer, Tactic, TensorArg
from inkrt.plugins.w4a16.launches import launch
from inkrt.plugins.w4a16.quant_tactics import Form, quantized_packing

TARGET, BANDWIDTH = "sm_90a", 4.55e6  # bytes a microsecond
OPERATORS = (
    "linear", "linear_group", "linear_mxfp8", "linear_nvfp4", "linear_group_quantized",
    "lm_head_sample",
)  # fmt: skip
CHAIN_BYTES = 200e6
Launches = list[Callable[[], None]]


def show(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def arg(*shape: int) -> TensorArg:
    """A bfloat16 tensor argument."""
    return TensorArg(shape, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Call:
    """A timed call: its operator and arguments; inputs are [T, width].

    Attributes:
        plain: rows of the bf16 matrices.
        quantized: rows of the others, whose results come behind.
        form: of those.
    """

    name: str
    op: str
    args: CallArgs
    num_tokens: int
    width: int
    plain: tuple[int, ...]
    quantized: tuple[int, ...] = ()
    form: Form = "mxfp8"

    @property
    def rows(self) -> tuple[int, ...]:
        """Of all results, in order."""
        return self.plain + self.quantized

    def tactics(self) -> list[Tactic]:
        """All candidates."""
        return find_tactics(self.op, TARGET, self.args)


def projections(tp: int, num_tokens: int) -> Call:
    """The input projections of a sliding layer."""
    rows = (6144 // tp, 768 // tp, 1024 // tp, 1024 // tp, 48 // tp, 6144 // tp)
    weights = [arg(n, 4608) for n in rows]
    args: CallArgs = {"xs": [arg(num_tokens, 4608)], "weights": weights, "input_of": [0] * 6}
    return Call(f"linear_group tp={tp}", "linear_group", args, num_tokens, 4608, rows)


def output(tp: int, num_tokens: int) -> Call:
    """The output projection."""
    width = 6144 // tp
    args: CallArgs = {
        "x": arg(num_tokens, width), "weight": arg(4608, width), "partial": tp > 1,
    }  # fmt: skip
    return Call(f"linear (wo) tp={tp}", "linear", args, num_tokens, width, (4608,))


def head(num_tokens: int) -> Call:
    """The head with its softcap and greedy tokens."""
    args: CallArgs = {
        "x": arg(num_tokens, 4608), "weight": arg(200058, 4608), "scales": None,
        "vocab_size": 200058, "cap": 30.0, "logits_dtype": torch.bfloat16, "tp_size": 1,
        "last_row": False,
    }  # fmt: skip
    return Call("lm_head_sample tp=1", "lm_head_sample", args, num_tokens, 4608, (200058,))


def coded(form: Form, rows: int, width: int) -> tuple[TensorArg, TensorArg]:
    """Codes and scales."""
    per_byte, block = (1, 32) if form == "mxfp8" else (2, 16)
    codes = TensorArg((rows, width // per_byte), torch.uint8)
    return codes, TensorArg((rows, width // block), torch.uint8)


GLOBAL_SCALE = TensorArg((1,), torch.float32)


def quantized_projections(tp: int, num_tokens: int, form: Form) -> Call:
    """The input projections of a sliding layer, all but those to sinks quantized."""
    plain = (48 // tp,)
    rows = (6144 // tp, 768 // tp, 1024 // tp, 1024 // tp, 6144 // tp)
    parts = [coded(form, n, 4608) for n in rows]
    args: CallArgs = {
        "xs": [arg(num_tokens, 4608)], "weights": [arg(n, 4608) for n in plain],
        "codes": [codes for codes, _ in parts], "scales": [scales for _, scales in parts],
        "global_scales": [GLOBAL_SCALE] * len(rows) if form == "nvfp4" else [],
        "input_of": [0] * 6,
    }  # fmt: skip
    name = f"linear_group {form} tp={tp}"
    return Call(name, "linear_group_quantized", args, num_tokens, 4608, plain, rows, form)


def quantized_output(tp: int, num_tokens: int, form: Form) -> Call:
    """The output projection, quantized."""
    width = 6144 // tp
    codes, scales = coded(form, 4608, width)
    args: CallArgs = {"x": arg(num_tokens, width), "codes": codes, "partial": tp > 1}
    args |= {"exponents": scales}
    if form == "nvfp4":
        args |= {"scales": scales, "global_scale": GLOBAL_SCALE}
    name = f"linear (wo) {form} tp={tp}"
    return Call(name, f"linear_{form}", args, num_tokens, width, (), (4608,), form)


def timed_calls(form: str) -> list[Call]:
    """What is timed, in order."""
    widths = (1, 8)
    if form in ("mxfp8", "nvfp4"):
        return [
            *(quantized_projections(tp, t, form) for tp in (2, 4, 8) for t in widths),
            *(quantized_output(tp, t, form) for tp in (1, 2, 4, 8) for t in widths),
        ]
    return [
        *(projections(tp, t) for tp in (2, 4, 8) for t in widths),
        *(output(tp, t) for tp in (1, 2, 4, 8) for t in widths),
        *(head(t) for t in widths),
    ]


def copy_kernel(num_tokens: int, width: int) -> KernelLaunch:
    """From the result to the next input."""
    return launch(
        "pad_rows",
        [("WIDTH", width), ("PADDED", width)],
        blocks=num_tokens,
        threads=128,
        smem=0,
        params=(Pointer("y"), Pointer("x")),
    )


def seed_of(op: str, case: Case) -> int:
    """As the tests of the references."""
    return zlib.crc32(f"{op}/{case.name}".encode())


def cases() -> list[tuple[str, Case, Arguments, list[Tactic]]]:
    """Cases of the operators that have kernels, in bfloat16."""
    found = []
    for op in OPERATORS:
        for case in plugins()[op].cases():
            generator = torch.Generator().manual_seed(seed_of(op, case))
            values = case.arguments(torch.bfloat16, generator)
            try:
                tactics = find_tactics(op, TARGET, call_args(values))
            except BuildError:
                continue  # a size that no kernel takes, such as an odd width
            if tactics:
                found.append((op, case, values, tactics))
    return found


def call_args(values: Arguments) -> CallArgs:
    """Arguments as tactics see them."""

    def convert(value: object) -> object:
        if isinstance(value, Tensor):
            return TensorArg(tuple(value.shape), value.dtype)
        return [convert(item) for item in value] if isinstance(value, list) else value

    return {name: convert(value) for name, value in values.items()}  # type: ignore[misc]


def upload(gpu: Gpu, values: Arguments, tactic: Tactic) -> dict[str, Buffer]:
    """Arguments as `bind` wants them, packed where the tactic packs."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    for packing in tactic.packings:
        parts = zip(*(lists[name] for name in packing.arguments), strict=True)
        lists[packing.arguments[0]] = [packing.pack(*part) for part in parts]
    buffers = {}
    for name, items in lists.items():
        for number, item in enumerate(item for item in items if isinstance(item, Tensor)):
            buffers[f"{name}.{number}" if number else name] = gpu.buffer(item.cuda())
    if "num_tokens" not in buffers:
        rows = values["xs"][0] if "xs" in values else values["x"]
        buffers["num_tokens"] = gpu.upload(np.array([len(rows)], np.int32))
    return buffers


def check(gpu: Gpu) -> int:
    """Every tactic of every case against the reference, and against the first tactic's bits."""
    failed = total = 0
    for op, case, values, tactics in cases():
        packings = [packing for tactic in tactics for packing in tactic.packings]
        if op == "lm_head_sample" and any(len(packing.arguments) > 1 for packing in packings):
            continue  # NVFP4, which `w4a16.py` checks
        result = plugins()[op].reference(**values)
        expected = [result] if isinstance(result, Tensor) else list(result)
        first: list[np.ndarray] = []
        for tactic in tactics:
            outputs = [empty(gpu, tensor.nbytes) for tensor in expected]
            scratch: dict[str, Buffer] = {}
            for bound in bind(gpu, tactic, upload(gpu, values, tactic), outputs, scratch):
                gpu.launch(bound.kernel, bound.values)
            raw = [gpu.download(out) for out in outputs]
            gave_up = "error" in scratch and gpu.download(scratch["error"]).any()
            first = first or raw
            same = all(np.array_equal(a, b) for a, b in zip(first, raw, strict=True))
            errors = [
                relative_error(torch.from_numpy(data).view(like.dtype).view(like.shape), like)
                for data, like in zip(raw, expected, strict=True)
            ]
            ok = same and not gave_up and max(errors) <= case.rtol[torch.bfloat16]
            total += 1
            failed += not ok
            if not ok:
                line = f"FAILED {op} / {case.name} / {tactic.name}: errors {errors}"
                show(f"{line}, bits of the first: {same}, gave up: {gave_up}")
    show(f"{total} checks, {failed} failed")
    return failed


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Of numbers; tokens must be equal."""
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    difference = torch.linalg.vector_norm(got.double() - expected.double())
    error = float(difference / torch.linalg.vector_norm(expected.double()))
    return float("inf") if math.isnan(error) else error


class Timing:
    """Chains of one call, whose weights are shared by all tactics."""

    def __init__(self, gpu: Gpu, call: Call) -> None:
        self._gpu, self._call = gpu, call
        self.num_bytes = call.tactics()[0].bytes
        self._length = max(2, min(24, round(CHAIN_BYTES / self.num_bytes)))
        self._weights = [self._matrices() for _ in range(self._length)]
        self._x = gpu.buffer(torch.randn(8 * call.width, device="cuda").bfloat16())
        # Results are read as inputs, which may be wider.
        self._outputs = [
            empty(gpu, 8 * max(4 * n, 2 * call.width), 0) for n in (*call.rows, *call.rows)
        ]
        numbers = {
            "temperature": np.zeros(1, np.float32), "top_k": np.zeros(1, np.int32),
            "top_p": np.ones(1, np.float32), "min_p": np.zeros(1, np.float32),
            "seed": np.zeros(1, np.int64), "position": np.zeros(1, np.int32),
            "num_tokens": np.full(1, call.num_tokens, np.int32),
        }  # fmt: skip
        self._numbers = {name: gpu.upload(value) for name, value in numbers.items()}

    def _matrices(self) -> dict[str, Buffer]:
        """Packed weights of one call, and global scales, by argument."""
        call, made = self._call, {}
        for number, rows in enumerate(call.plain):
            count = -(-rows // 16) * 16 * call.width
            values = torch.randn(count, device="cuda").bfloat16() * call.width**-0.5
            for name in ("weight", "weights"):
                made[f"{name}.{number}" if number else name] = self._gpu.buffer(values)
        if call.quantized:
            tile = quantize(torch.randn(16, call.width) * call.width**-0.5, call.form)
            packed = quantized_packing(call.form, "w", "s").pack(tile.codes, tile.scales).cuda()
        for number, rows in enumerate(call.quantized):
            suffix = f".{number}" if number else ""
            made[f"codes{suffix}"] = self._gpu.buffer(packed.repeat(-(-rows // 16)))
            for name in ("global_scale", "global_scales"):
                made[f"{name}{suffix}"] = self._gpu.buffer(torch.ones(1, device="cuda"))
        return made

    def chain(self, tactic: Tactic | None, *, has_copies: bool) -> float:
        """Microseconds for a call, for a copy, or for both."""
        launches: Launches = []
        scratch: dict[str, Buffer] = {}
        y, x = self._outputs[0], self._x
        copy = self._gpu.prepare(copy_kernel(self._call.num_tokens, self._call.width), [y, x])
        for weights in self._weights:
            if tactic is not None:
                names = {"x": x, "xs": x, **self._numbers, **weights}
                for bound in bind(self._gpu, tactic, names, self._outputs, scratch):
                    launches.append(self._gpu.prepare(bound.kernel, bound.values))
            if has_copies:
                launches.append(copy)

        def body() -> None:
            for run in launches:
                run()

        return time_graph(body, replays=30) / self._length


def measure(gpu: Gpu, only: str, form: str) -> None:
    """A line for each call."""
    for call in timed_calls(form):
        if only not in call.name:
            continue
        timing = Timing(gpu, call)
        copy = timing.chain(None, has_copies=True)
        floor = timing.num_bytes / BANDWIDTH
        parts = []
        for tactic in call.tactics():
            us = timing.chain(tactic, has_copies=True) - copy
            alone = timing.chain(tactic, has_copies=False)
            parts.append(f"{tactic.name} {us:.2f} us ({floor / us:.0%}; alone {alone:.2f})")
        line = f"{call.name} T={call.num_tokens}: floor {floor:.2f} us, copy {copy:.2f}"
        show(f"{line} | {' | '.join(parts)}")
        del timing
        torch.cuda.empty_cache()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="bf16 streams of row tiles")
    parser.add_argument("--compile", action="store_true", help="fill the cubin folder only")
    parser.add_argument("--check", action="store_true", help="against the references")
    parser.add_argument("--only", default="", help="time calls whose name has this in it")
    parser.add_argument(
        "--format", choices=["bf16", "mxfp8", "nvfp4"], default="bf16", help="of timed projections"
    )
    parser.add_argument("--cubins", type=Path, default=Path("build/ring_cubins"))
    options = parser.parse_args()
    if options.check:
        kernels = [kernel for *_, tactics in cases() for t in tactics for kernel in t.kernels]
    else:
        calls = timed_calls(options.format)
        kernels = [kernel for call in calls for t in call.tactics() for kernel in t.kernels]
        kernels += [copy_kernel(call.num_tokens, call.width) for call in calls]
    import cuda.core  # noqa: F401 - not by several threads at once

    once = {cubin_path(options.cubins, kernel): kernel for kernel in kernels}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda kernel: cubin(options.cubins, kernel), once.values()))
    if options.compile:
        show(f"{len(set(options.cubins.iterdir()))} cubins in {options.cubins}")
        return 0
    gpu = Gpu(options.cubins)
    if options.check:
        return 1 if check(gpu) else 0
    measure(gpu, options.only, options.format)
    return 0


if __name__ == "__main__":
    sys.exit(main())
