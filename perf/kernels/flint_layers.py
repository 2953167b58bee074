"""Times and traces the launch of a run of Flint's layers on an H200.

    ink-build FOLDER -o ENGINE --target sm_90a --weights dummy
    python perf/kernels/flint_layers.py ENGINE FOLDER/config.json [--context 1024] [--trace]
        [--schedules ROUNDS] [--check] [--variant MACRO=VALUE,...]

The median time of the launch alone, back to back. `--schedules` searches for the points at which
the next layer's weights are best requested, a piece at a time. `--trace` compiles the kernel with
time stamps and prints when the events of a layer happen in a block, over layers and blocks.
`--check` compares bits with steps of single launches and times whole steps.
`--variant` (repeatable) does either with macros of an experiment.
"""

import argparse
import ctypes
import json
import random
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from inkrt.builder.compile import compile_cubin
from inkrt.engines.flint.config import parse_config
from inkrt.plugins.flint_layers import tactics
from inkrt.plugins.tactic import KernelLaunch
from inkrt.plugins.w4a16.shapes import Dims
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cuda_timing import Timer
from inkrt.runtime.plan import IntParam

# Number of an event in layers.cu and attend.cuh, in order of time.
EVENTS = {
    "qkv: weights ready": 0,
    "qkv: stream here": 1,
    "qkv: heads out": 2,
    "attention: query made": 20,
    "attention: keys here": 23,
    "attention: scores done": 22,
    "attention: values done": 21,
    "attention: partial out": 3,
    "attention: merged": 18,
    "o: weights ready": 15,
    "o: attended here": 4,
    "o: stream out": 5,
    "router: weights ready": 16,
    "router: stream here": 6,
    "router: logits out": 19,
    "router: shared out": 7,
    "top-k: logits here": 8,
    "top-k: requested": 9,
    "gate_up: first tile here": 10,
    "gate_up: last tile here": 11,
    "gate_up: hidden out": 12,
    "down: weights ready": 17,
    "down: hidden here": 13,
    "down: stream out": 14,
}
TRACED = 24
OWNERS = 128


class Launch:
    """The launch in an open engine, with other schedules or other code.

    Args:
        engine: built for the GPU.
        context: position of the token.
    """

    def __init__(self, engine: Engine, context: int) -> None:
        from cuda.core import ObjectCode

        self.executor: Any = engine.executor
        plan = self.executor.plan("decode")
        (launch,) = (item for item in plan.launches if item.op == "flint_layers")
        (self.kernel,) = launch.kernels
        self.params = [self.executor.ranks[0].param(plan, param) for param in self.kernel.params]
        (self.schedule_at,) = (
            i for i, param in enumerate(self.kernel.params) if isinstance(param, IntParam)
        )
        self.code = self.executor.ranks[0].modules[self.kernel.cubin]
        self._load = ObjectCode.from_cubin
        pages = list(range(-(-(context + 1) // 64)))
        self.executor.run("decode", StepInput([1], context, 0, pages, Sampling()))

    def use(self, cubin: bytes) -> None:
        """Run other code from now on."""
        self.code = self._load(cubin)

    def run(
        self, count: int, *, schedule: int | None = None, extra: tuple[Any, ...] = ()
    ) -> list[float]:
        """Microseconds of `count` launches, by events."""
        from cuda.core import LaunchConfig, launch

        rank = self.executor.ranks[0]
        driver, check, stream = rank.driver, rank.check, rank.stream
        function = self.code.get_kernel("layers")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        smem_bytes = self.kernel.smem_bytes
        check(driver.cuKernelSetAttribute(attribute, smem_bytes, function.handle, 0))
        params = list(self.params)
        if schedule is not None:
            params[self.schedule_at] = ctypes.c_int(schedule)
        config = LaunchConfig(grid=self.kernel.grid, block=self.kernel.block, shmem_size=smem_bytes)
        events = [check(driver.cuEventCreate(0)) for _ in range(count + 1)]
        check(driver.cuEventRecord(events[0], stream.handle))
        for event in events[1:]:
            launch(stream, config, function, *params, *extra)
            check(driver.cuEventRecord(event, stream.handle))
        rank.require_sound()
        return [1e3 * float(check(driver.cuEventElapsedTime(a, b))) for a, b in pairwise(events)]


def search(launch: Launch, rounds: int) -> None:
    """Coordinate descent over the schedule's pieces."""
    rng = random.Random(1)

    def time(points: list[int]) -> float:
        schedule = sum(point << 4 * piece for piece, point in enumerate(points))
        return statistics.median(launch.run(15, schedule=schedule))

    best = list(tactics.SCHEDULE)
    value = time(best)
    say(f"schedule {best}: {value:.1f} us")
    for _ in range(rounds):
        pieces = list(range(len(tactics.EARLIEST)))
        rng.shuffle(pieces)
        for piece in pieces:
            for point in range(tactics.EARLIEST[piece], tactics.POINTS):
                tried = [*best[:piece], point, *best[piece + 1 :]]
                if tried != best and (found := time(tried)) < value:
                    best, value = tried, found
        say(f"schedule {best}: {value:.1f} us")
    for points in (best, list(tactics.SCHEDULE), best):
        say(f"once more {points}: {time(points):.1f} us")


def trace(launch: Launch, kernel: KernelLaunch, layers: int, macros: list[tuple[str, str]]) -> None:
    """Print when the events of a layer happen, since the block's last one of the layer before."""
    blocks = kernel.grid[0]
    defines = (*kernel.defines, ("TRACE", TRACED), *macros)
    launch.use(compile_cubin(kernel.source, defines, "sm_90a"))
    stamps = np.zeros((layers, blocks, TRACED), np.int64)
    rank = launch.executor.ranks[0]
    driver, check = rank.driver, rank.check
    memory = check(driver.cuMemAlloc(stamps.nbytes))
    stream = rank.stream.handle  # of the launches: it does not wait for the default one
    check(driver.cuMemsetD8Async(memory, 0, stamps.nbytes, stream))
    total = statistics.median(launch.run(5, extra=(int(memory),)))
    check(driver.cuMemcpyDtoH(stamps.ctypes.data, memory, stamps.nbytes))
    # Clocks of multiprocessors differ by a constant, so only differences within a block count.
    last = stamps[:, :OWNERS, EVENTS["down: stream out"]].astype(float)
    cycle = total / layers / (np.median(last[-1] - last[0]) / (layers - 1))
    say(f"traced: {total:.1f} us, {1e-3 / cycle:.2f} GHz; us after the layer before, percentiles")
    for name, event in EVENTS.items():
        stamp = stamps[1:, :OWNERS, event].astype(float)
        since = ((stamp - last[:-1]) * cycle)[stamp > last[:-1]]
        low, middle, high = np.percentile(since, [10, 50, 90]) if since.size else [np.nan] * 3
        say(f"  {name:26s} 10: {low:6.2f}  50: {middle:6.2f}  90: {high:6.2f}")


def check_bits(engine: Engine, launch: Launch, context: int) -> None:
    """Compare logits of decode steps, with the code in use, to those of two-token steps; time both.

    The caches begin with small numbers: launches alone, on whatever their inputs hold, may have
    left NaN there, which equals nothing.
    """
    executor = launch.executor
    executor.fill_state(0x3C)
    rank = executor.ranks[0]
    rank.modules[launch.kernel.cubin] = launch.code
    rank.graphs["decode"] = rank.capture(executor.plan("decode"))
    pages = list(range(-(-(context + 64) // 64)))
    tokens = [(37 * i + i * i) % 1000 for i in range(40)]

    def step(name: str, index: int, count: int) -> Any:
        inputs = StepInput(tokens[index : index + count], context + index, 0, pages, Sampling())
        return executor.run(name, inputs).logits

    wide = [row for index in range(0, len(tokens), 2) for row in step("verify2", index, 2)]
    rows = [step("decode", index, 1)[0] for index in range(len(tokens))]
    again = [step("decode", index, 1)[0] for index in range(len(tokens))]
    equal = sum(
        np.array_equal(a, b) and np.array_equal(a, c)
        for a, b, c in zip(rows, wide, again, strict=True)
    )
    say(f"  equal to two-token steps: {equal} of {len(tokens)} rows")
    for position in (1024, 8192, 100_000, 262_000):
        if position < engine.config.max_seq_len:
            many = list(range(-(-(position + 1) // 64)))
            step_input = StepInput([1], position, 0, many, Sampling())
            times = Timer(executor).step("decode", step_input, 40)
            say(f"  step at {position}: {statistics.median(times):.1f} us")


def kernel_of(values: dict[str, Any], engine: Engine) -> tuple[KernelLaunch, int]:
    """The launch's description and its number of layers, for a model's configuration."""
    config = parse_config(values)
    sliding = [
        is_sliding
        for is_sliding, is_dense in zip(config.is_sliding, config.is_dense, strict=True)
        if not is_dense
    ]
    found = tactics.tactic(
        Dims(experts=config.num_experts),
        windows=[config.sliding_window if is_sliding else 0 for is_sliding in sliding],
        rope_thetas=[config.rope_theta if is_sliding else 0.0 for is_sliding in sliding],
        ring_rows=next(b.shape[1] for b in engine.config.state.buffers if b.kind == "ring"),
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
    )
    return found.kernels[0], len(sliding)


def say(line: str) -> None:
    """Print at once: a run that hangs has told how far it came."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Parse arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--schedules", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--variant", action="append", default=[])
    options = parser.parse_args()
    with Engine.open(options.engine) as engine:
        launch = Launch(engine, options.context)
        kernel, layers = kernel_of(json.loads(options.config.read_text()), engine)
        for variant in options.variant or [""]:
            macros = [
                (name, value)
                for name, _, value in (d.partition("=") for d in variant.split(",") if d)
            ]
            if variant:
                launch.use(compile_cubin(kernel.source, (*kernel.defines, *macros), "sm_90a"))
            times = launch.run(40)
            say(f"{variant or 'launch'}: {statistics.median(times):.1f} us, least {min(times):.1f}")
            if options.schedules:
                search(launch, options.schedules)
            if options.check:
                check_bits(engine, launch, options.context)
            if options.trace:
                trace(launch, kernel, layers, macros)


if __name__ == "__main__":
    main()
