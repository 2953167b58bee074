"""Times a model's decode or verify step with other macros of its kernels, on an H200.

    python perf/kernels/step_variants.py FOLDER [--step decode] [--context 8192] [--runs 60]
        [--profile] [--variant KERNEL.MACRO=VALUE,...] ...

FOLDER has a config.json. An engine with dummy weights is built of it and opened once; each
`--variant` (repeatable) compiles the kernels that it names again. KERNEL is an entry or a tactic,
or `all` for every kernel that has the macro. `KERNEL.smem=BYTES` and `KERNEL.blocks=COUNT` change
the launch. Every line says how long the step takes, what that is less than as built, and of how
many steps the logits have the same bits. `--profile` prints what the step takes longer for each
kind of launch, for every variant.
"""

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

import inkrt.builder.build as builder
from inkrt.builder.compile import Compiler, compile_cubin
from inkrt.builder.options import MAX_VERIFY_TOKENS, BuildOptions
from inkrt.builder.timing_cache import source_files
from inkrt.plugins.tactic import KernelLaunch
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cuda_timing import Timer

TARGET = "sm_90a"
WIDTHS = {"decode": 1} | {f"verify{width}": width for width in range(2, MAX_VERIFY_TOKENS + 1)}
COMPARED = 24  # steps
LAUNCH = ("smem", "blocks")  # no macros
Settings = dict[str, dict[str, str]]


class Recorder(Compiler):
    """A compiler that knows what it has compiled.

    Attributes:
        kernels: by name of their code, of every build so far.
    """

    kernels: ClassVar[dict[str, KernelLaunch]] = {}

    def compile(self, kernel: KernelLaunch) -> str:
        """See `Compiler`."""
        name = super().compile(kernel)
        self.kernels[name] = kernel
        return name


def parse(variant: str) -> Settings:
    """Values by kernel and macro."""
    settings: Settings = defaultdict(dict)
    for part in filter(None, variant.split(",")):
        name, _, value = part.partition("=")
        entry, _, macro = name.partition(".")
        if not (entry and macro and value):
            raise SystemExit(f"{part!r} is no ENTRY.MACRO=VALUE")
        settings[entry][macro] = value
    return settings


class Variants:
    """A step of an open engine, with changed kernels."""

    def __init__(self, executor: Any, step: str, context: int, runs: int) -> None:
        self.executor, self.step, self.context, self.runs = executor, step, context, runs
        self.plan = executor.plan(step)
        self.times: dict[str, float] = {}
        self.logits: list[np.ndarray[Any, Any]] = []

    def use(self, settings: Settings) -> None:
        """Run the step with these settings from now on."""
        known = {"all"}
        for launch in self.plan.launches:
            known |= {launch.tactic, *(kernel.entry for kernel in launch.kernels)}
        if unknown := settings.keys() - known:
            raise SystemExit(f"no kernel {', '.join(sorted(unknown))}; there are {sorted(known)}")
        launches = [
            msgspec.structs.replace(
                launch,
                kernels=tuple(
                    self._changed(
                        kernel,
                        self._of_all(kernel, settings.get("all", {}))
                        | settings.get(launch.tactic, {})
                        | settings.get(kernel.entry, {}),
                    )
                    for kernel in launch.kernels
                ),
            )
            for launch in self.plan.launches
        ]
        plan = msgspec.structs.replace(self.plan, launches=tuple(launches))
        rank = self.executor.ranks[0]
        rank.plans[self.step] = plan
        rank.graphs[self.step] = rank.capture(plan)

    def _of_all(self, kernel: Any, macros: dict[str, str]) -> dict[str, str]:
        """Those that the sources of a kernel know."""
        texts = [path.read_text() for path in source_files(Recorder.kernels[kernel.cubin].source)]
        return {name: value for name, value in macros.items() if any(name in t for t in texts)}

    def _changed(self, kernel: Any, macros: dict[str, str]) -> Any:
        from cuda.core import ObjectCode

        if not macros:
            return kernel
        smem_bytes = int(macros.get("smem", kernel.smem_bytes))
        blocks = int(macros.get("blocks", kernel.grid[0]))
        changed = {name: value for name, value in macros.items() if name not in LAUNCH}
        if "blocks" in macros and "BLOCKS" in dict(Recorder.kernels[kernel.cubin].defines):
            changed["BLOCKS"] = str(blocks)
        name = f"{kernel.cubin} {sorted(changed.items())}"
        modules = self.executor.ranks[0].modules
        if name not in modules:
            source = Recorder.kernels[kernel.cubin]
            defines = tuple({**dict(source.defines), **changed}.items())
            code = compile_cubin(source.source, defines, TARGET)
            modules[name] = ObjectCode.from_cubin(code)
        grid = (blocks, *kernel.grid[1:])
        return msgspec.structs.replace(kernel, cubin=name, smem_bytes=smem_bytes, grid=grid)

    def step_logits(self) -> list[np.ndarray[Any, Any]]:
        """Of steps from the same, known caches on."""
        self.executor.fill_state(0x3C)
        return [self.executor.run(self.step, self._input(i)).logits for i in range(COMPARED)]

    def _input(self, index: int) -> StepInput:
        """Of the `index`-th step behind the context."""
        width = self.plan.num_tokens
        first = index * width
        tokens = [(37 * i + i * i) % 1000 for i in range(first, first + width)]
        position = self.context + first
        pages = list(range(-(-(position + width) // 64)))
        return StepInput(tokens, position, 0, pages, Sampling())

    def measure(self, name: str, *, profile: bool) -> None:
        """Print a line, and lines for kinds of launches."""
        logits = self.step_logits()
        self.logits = self.logits or logits
        equal = sum(np.array_equal(a, b) for a, b in zip(logits, self.logits, strict=True))
        step = self._input(0)
        timer = Timer(self.executor)
        timer.step(self.step, step, 10)
        times = timer.step(self.step, step, self.runs)
        median = statistics.median(times)
        self.times[name] = median
        gained = next(iter(self.times.values())) - median
        say(f"{median:8.1f} us {gained:+7.1f}  {equal}/{COMPARED} equal  {name}")
        if profile:
            self._profile(timer, step)

    def _profile(self, timer: Timer, step: StepInput) -> None:
        """Price of each kind of launch: the step cut behind it less the step cut before it."""
        prices: dict[str, list[float]] = defaultdict(list)
        before = 0.0
        for number, launch in enumerate(self.plan.launches, start=1):
            until = statistics.median(timer.step(self.step, step, 12, until=number))
            prices[f"{launch.op} {launch.tactic}"].append(until - before)
            before = until
        for kind, values in sorted(prices.items(), key=lambda item: -sum(item[1])):
            median = statistics.median(values)
            say(f"    {sum(values):7.1f} us = {len(values):3d} x {median:6.2f}  {kind}")


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Parse arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", choices=WIDTHS, default="decode")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--variant", action="append", default=[])
    options = parser.parse_args()
    builder.Compiler = Recorder  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "engine"
        width = WIDTHS[options.step]
        build = BuildOptions(target=TARGET, weights="dummy", max_verify_tokens=width)
        builder.build_engine(options.folder, folder, build, say)
        with Engine.open(folder) as engine:
            variants = Variants(engine.executor, options.step, options.context, options.runs)
            for variant in ["", *options.variant, ""]:
                variants.use(parse(variant))
                variants.measure(variant or "as built", profile=options.profile)


if __name__ == "__main__":
    main()
