"""Time `qkv_post` and `allreduce_conv_mix` of Inkling-2-Small's rank slices on a GPU.

    python perf/kernels/vector.py [--launches 768] [--compile DIR]

Prints a line for each shape and tactic: microseconds a launch in a CUDA graph of `--launches` with
programmatic edges. "warm": 16 layers over and over, whose weights stay in the L2; "cold": weights
and state of its own for every launch, which come from memory unless the launch before it leaves
time to request them. A chain of `residual_add` is the floor: one load, one store. --compile only
makes the cubins, which needs no GPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from w4a16_backend import Buffer
from w4a16_gpu import Gpu, cubin, time_graph

from inkrt.builder.tactics import find_tactics
from inkrt.plugins.tactic import (
    CallArg,
    CallArgs,
    Float32,
    Int32,
    Output,
    Param,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
)

HIDDEN, HEADS, KV_HEADS, HEAD, REL, TAPS, RING = 4608, 48, 8, 128, 16, 4, 16
WINDOW_RING, PAGES, POSITION = 1600, 32, 1000
BF16, FLOAT32, INT32 = torch.bfloat16, torch.float32, torch.int32
# Arguments that a layer has of its own.
OF_LAYER = ("weight", "scale", "norm", "queries", "state", "cache")


@dataclass(frozen=True, slots=True)
class Kind:
    """One line: an operator's call and what tells it from the others."""

    op: str
    text: str
    num_tokens: int
    args: CallArgs
    outputs: tuple[int, ...]  # bytes


def step() -> CallArgs:
    """The inputs of a step."""
    return {name: TensorArg((1,), INT32) for name in ("position", "num_tokens", "slot")}


def mix(num_tokens: int, former: int, queries: int) -> Kind:
    """`allreduce_conv_mix` in front of a layer: the residual is rounded."""
    rows = (num_tokens, HIDDEN)
    args: CallArgs = {
        "partial": TensorArg(rows, BF16), "conv_weight": TensorArg((HIDDEN, TAPS), FLOAT32),
        "conv_state": TensorArg((1, RING, HIDDEN), BF16), **step(),
        "residual": TensorArg(rows, FLOAT32), "sources": [TensorArg(rows, BF16)] * former,
        "queries": TensorArg((queries, HIDDEN), FLOAT32),
        "norm_weights": [TensorArg((HIDDEN,), BF16)] * queries, "mix_eps": 1e-6, "norm_eps": 1e-6,
        "residual_dtype": BF16, "dtype": BF16, "tp_size": 1,
    }  # fmt: skip
    size = 2 * num_tokens * HIDDEN
    text = f"sources={former + 1} queries={queries}"
    return Kind("allreduce_conv_mix", text, num_tokens, args, (size, queries * size))


def post(num_tokens: int, tp: int, *, full: bool) -> Kind:
    """`qkv_post` of a rank."""
    heads, kv_heads = HEADS // tp, KV_HEADS // tp
    channels = kv_heads * HEAD
    taps = TensorArg((TAPS, channels), BF16) if full else TensorArg((channels, TAPS), FLOAT32)
    own = TensorArg((num_tokens, kv_heads * TAPS), BF16) if full else None
    first = (PAGES, 64) if full else (1, WINDOW_RING)
    cache = TensorArg((*first, kv_heads, HEAD), BF16)
    state = TensorArg((1, RING, channels), BF16)
    widths = {"q": heads * HEAD, "k": channels, "v": channels, "rel": heads * REL}
    args: CallArgs = {
        **{name: TensorArg((num_tokens, width), BF16) for name, width in widths.items()},
        "q_scale": TensorArg((heads, HEAD), BF16), "rel_scale": TensorArg((heads, REL), BF16),
        "k_conv_weight": taps, "v_conv_weight": taps, "k_dynamic": own, "v_dynamic": own,
        "k_conv_state": state, "v_conv_state": state, "k_cache": cache, "v_cache": cache,
        "page_table": TensorArg((PAGES,), INT32) if full else None, **step(),
        "qk_threshold": 22.627417, "rel_threshold": 8.0, "log_n_floor": 128000 if full else 0,
        "log_alpha": 0.1, "eps": 1e-6,
    }  # fmt: skip
    outputs = tuple(2 * num_tokens * widths[name] for name in ("q", "k", "v", "rel"))
    return Kind("qkv_post", f"tp={tp} {'full' if full else 'sliding'}", num_tokens, args, outputs)


def floor(num_tokens: int) -> Kind:
    """A launch that does next to nothing."""
    rows = TensorArg((num_tokens, HIDDEN), BF16)
    args: CallArgs = {"residual": rows, "update": rows, "dtype": BF16}
    return Kind("residual_add", "", num_tokens, args, (2 * num_tokens * HIDDEN,))


def kinds() -> Iterator[Kind]:
    """All lines."""
    for num_tokens in (1, 8):
        yield floor(num_tokens)
        for former, queries in ((1, 1), (4, 1), (8, 1), (8, 3)):
            yield mix(num_tokens, former, queries)
        for tp in (2, 4, 8):
            for full in (False, True):
                yield post(num_tokens, tp, full=full)


def tactics(kind: Kind) -> list[Tactic]:
    """Those of a call."""
    return find_tactics(kind.op, "sm_90a", kind.args)


class Memory:
    """Arguments on the GPU: activations once, weights and state for every layer."""

    def __init__(self, gpu: Gpu, kind: Kind, num_layers: int) -> None:
        self._gpu, self._kind = gpu, kind
        self._layers: dict[tuple[str, int], torch.Tensor] = {
            (name, index): self._tensor(name, TensorArg((num_layers, *arg.shape), arg.dtype))
            for name, value in kind.args.items()
            if self._is_of_layer(name)
            for index, arg in enumerate(_tensors(value))
        }
        self._shared = {
            (name, index): gpu.buffer(self._tensor(name, arg))
            for name, value in kind.args.items()
            if not self._is_of_layer(name)
            for index, arg in enumerate(_tensors(value))
        }
        self._outputs = [
            gpu.buffer(torch.zeros(size, dtype=torch.uint8, device="cuda")) for size in kind.outputs
        ]
        self.errors: list[Buffer] = []

    def bind(self, layer: int, params: tuple[Param, ...]) -> list[Buffer | int | float]:
        """Values of a layer's launch, with scratch of its own."""
        values: list[Buffer | int | float] = []
        for param in params:
            if isinstance(param, Int32 | Float32):
                values.append(param.value)
            elif isinstance(param, Output):
                values.append(self._outputs[param.index])
            elif isinstance(param, Pointer):
                key = (param.argument, param.index)
                own = self._layers.get(key)
                values.append(self._shared[key] if own is None else self._gpu.buffer(own[layer]))
            else:
                assert isinstance(param, Scratch)
                fill = torch.full((param.num_bytes,), param.fill or 0, dtype=torch.uint8)
                buffer = self._gpu.buffer(fill.cuda())
                values.append(buffer)
                if param.name == "error":
                    self.errors.append(buffer)
        return values

    @staticmethod
    def _is_of_layer(name: str) -> bool:
        return any(part in name for part in OF_LAYER)

    def _tensor(self, name: str, arg: TensorArg) -> torch.Tensor:
        if arg.dtype == INT32:
            steps = {"position": POSITION, "num_tokens": self._kind.num_tokens, "slot": 0}
            if name in steps:
                return torch.tensor([steps[name]], dtype=INT32, device="cuda")
            return torch.arange(arg.shape[0], dtype=INT32, device="cuda")
        if "cache" in name:  # written only
            return torch.zeros(arg.shape, dtype=arg.dtype, device="cuda")
        return torch.randn(arg.shape, dtype=arg.dtype, device="cuda")


def _tensors(value: CallArg) -> list[TensorArg]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, TensorArg)]


def time_kind(gpu: Gpu, kind: Kind, num_launches: int) -> Iterator[str]:
    """A line for each tactic."""
    memory = Memory(gpu, kind, num_launches)
    for tactic in tactics(kind):
        # Kernels keep words of the last launch, so each layer has its own.
        layers = [
            [gpu.prepare(kernel, memory.bind(layer, kernel.params)) for kernel in tactic.kernels]
            for layer in range(num_launches)
        ]
        warm, cold = (time_layers(layers, distinct) for distinct in (16, num_launches))
        errors = torch.cat([_bytes(buffer) for buffer in memory.errors] or [torch.zeros(1)])
        blocks = tactic.kernels[0].grid[0]
        yield (
            f"{kind.op:20s}T={kind.num_tokens} {kind.text:22s}{tactic.name:15s}"
            f"{blocks:4d} blocks  warm {warm:6.2f}  cold {cold:6.2f} us"
            + ("  A KERNEL GAVE UP WAITING" if errors.any() else "")
        )


def time_layers(layers: list[list[Callable[[], None]]], distinct: int) -> float:
    """Microseconds of a layer's launches in a chain of as many as there are layers."""

    def body() -> None:
        for number in range(len(layers)):
            for launch in layers[number % distinct]:
                launch()

    return time_graph(body, replays=20) / len(layers)


def _bytes(buffer: Buffer) -> torch.Tensor:
    assert isinstance(buffer.owner, torch.Tensor)
    return buffer.owner


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Parse arguments and time all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=768, help="of a graph")
    parser.add_argument("--cubins", type=Path, default=Path("build/cubins"), help="folder")
    parser.add_argument("--compile", type=Path, metavar="DIR", help="only compile, into DIR")
    options = parser.parse_args()
    if options.compile:
        for kind in kinds():
            for tactic in tactics(kind):
                for kernel in tactic.kernels:
                    cubin(options.compile, kernel)
        return
    gpu = Gpu(options.cubins)
    say(f"{torch.cuda.get_device_name()}, {options.launches} launches a graph")
    for kind in kinds():
        for line in time_kind(gpu, kind, options.launches):
            say(line)


if __name__ == "__main__":
    main()
