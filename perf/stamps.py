"""When every launch of a step starts, waits, releases the next one and ends, on a GPU.

    python perf/stamps.py ENGINE [--rank-slice 0/4] [--step decode] [--context 8192] [--no-stamps]
        [--variant NAME.MACRO=VALUE,...] ... [--launches FIRST:LAST] [-o FILE]

The step's kernels are compiled again with `stamps.cuh` in front of them and take the place of the
engine's own, whose code stays as it is. Each `--variant` (repeatable) changes macros of the kernels
that NAME, an operator or an entry, has, `smem` and `blocks` of their launch or the operator's
`tactic` (`A|B`: the first of them that a launch can take), and adds a table; the step is timed
without stamps, too. `same` says whether results have the bits of the engine as built.

FILE gets the stamps themselves: `names` and `blocks` of the launches, `stamps` [replay][block of
all launches in order][WORDS], as in stamps.cuh. Times are medians over replays, in us; of a kind of
launch behind a kind of launch, medians over the step. Columns, "before" being the launch before:

    early   from this launch's last start to the end of the one before; below 0: behind that
    spread  from the first block's end to the last one's
    wake    from the end of the one before to the last block's return from its wait
    work    from there to the end
    price   from end to end
    trigger from the end of the one before to the last trigger
    beside  blocks on whose multiprocessor one of the next launch started before their wait was over
"""

import argparse
import hashlib
import math
import statistics
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import numpy as np
from numpy.typing import NDArray
from stamped_source import compile_stamped

from inkrt.builder.compile import compile_cubin
from inkrt.builder.tactics import find_tactics
from inkrt.builder.tune import call_args_of
from inkrt.commands.bench_step import step_input_of
from inkrt.plugins.tactic import KernelLaunch, Param, Scratch
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import EngineConfig, StepSpec, read_config
from inkrt.runtime.executor.cuda_timing import Timer
from inkrt.runtime.plan import Kernel, KernelParam, Plan

EVENTS, WORDS = 4, 9  # as in stamps.cuh
START, WAITED, TRIGGERED, ENDED = range(EVENTS)
REPLAYS, RUNS = 9, 60
# Coarser ticks of %globaltimer than this (ns) are refined by the clocks of multiprocessors.
FINE_TICK = 64
Settings = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class OwnScratch:
    """Kernel parameter: scratch of a variant's launch that the engine has no memory for."""

    launch: int
    scratch: Scratch


def params_of(
    launch: int, source: KernelLaunch, known: dict[Param, Any], wanted: str
) -> tuple[Any, ...]:
    """A kernel's parameters: those of the engine's own tactic, or scratch, which becomes known.

    Raises:
        SystemExit: the engine does not have what the tactic `wanted` needs.
    """
    missing = [param for param in source.params if param not in known]
    if others := [str(param) for param in missing if not isinstance(param, Scratch)]:
        raise SystemExit(f"{wanted} needs {others}, which the engine's tactic does not have")
    known |= {param: OwnScratch(launch, param) for param in missing if isinstance(param, Scratch)}
    return tuple(known[param] for param in source.params)


@dataclass(frozen=True, slots=True)
class Named:
    """A kernel of the plan, and what it was compiled of."""

    op: str
    module: str
    kernel: Kernel
    source: KernelLaunch


def kernels_of(plan: Plan, target: str, settings: Settings) -> list[Named]:
    """All kernels of a step in order, of a variant's tactics.

    Raises:
        SystemExit: there is no such tactic, or it needs what the engine's own does not have.
    """
    found = []
    for number, launch in enumerate(plan.launches):
        tactics = {
            tactic.name: tactic
            for tactic in find_tactics(launch.op, target, call_args_of(plan, launch))
        }
        asked = settings.get(launch.op, {}).get("tactic", launch.tactic)
        # Launches of one operator differ in what they take: the last layer's has nothing behind it.
        wanted = next((name for name in asked.split("|") if name in tactics), None)
        if wanted is None:
            raise SystemExit(f"no tactic {asked} of {launch.op}; there are {', '.join(tactics)}")
        own = tactics[launch.tactic].kernels
        params: dict[Param, KernelParam | OwnScratch] = {}
        for kernel, source in zip(launch.kernels, own, strict=True):
            params |= zip(source.params, kernel.params, strict=True)
        for source in tactics[wanted].kernels:
            kernel = Kernel(
                cubin="", entry=source.entry, grid=source.grid, block=source.block,
                cluster=source.cluster, smem_bytes=source.smem_bytes, pdl=source.pdl,
                cooperative=source.cooperative,
                params=params_of(number, source, params, wanted),
            )  # fmt: skip
            found.append(changed(Named(launch.op, launch.module, kernel, source), settings))
    return found


def changed(named: Named, settings: Settings) -> Named:
    """A kernel with a variant's macros and launch."""
    macros = settings.get(named.op, {}) | settings.get(named.source.entry, {})
    macros.pop("tactic", None)
    smem = int(macros.pop("smem", named.kernel.smem_bytes))
    blocks = int(macros.pop("blocks", named.kernel.grid[0]))
    grid = (blocks, *named.kernel.grid[1:])
    defines = tuple({**dict(named.source.defines), **macros}.items())
    return Named(
        named.op,
        named.module,
        msgspec.structs.replace(named.kernel, smem_bytes=smem, grid=grid),
        replace(named.source, defines=defines),
    )


def step_of(config: EngineConfig, name: str) -> StepSpec:
    """The step of that name, the draft step included.

    Raises:
        SystemExit: there is none.
    """
    steps = {step.name: step for step in config.all_steps}
    if name not in steps:
        raise SystemExit(f"the engine has no step {name!r}; it has {', '.join(steps)}")
    return steps[name]


class Stamper:
    """A step of an open engine."""

    def __init__(self, engine: Engine, step: StepSpec, context: int) -> None:
        self.executor: Any = engine.executor
        self.rank = self.executor.ranks[0]
        self.driver, self.check = self.rank.driver, self.rank.check
        self.plan: Plan = self.rank.plans[step.name]
        self.input = step_input_of(engine.config, step, context)
        self._target = engine.config.target
        self._codes: dict[Any, Any] = {}
        self._scratch: dict[OwnScratch, int] = {}

    def kernels(self, settings: Settings) -> list[Named]:
        """Those of a variant."""
        kernels = kernels_of(self.plan, self._target, settings)
        known = {name for named in kernels for name in (named.op, named.source.entry)}
        if unknown := settings.keys() - known:
            raise SystemExit(f"no {', '.join(sorted(unknown))}; there are {sorted(known)}")
        return kernels

    def compile(self, kernels: list[Named], *, has_stamps: bool) -> list[Any]:
        """Loaded code of each kernel; equal ones share it."""
        from cuda.core import ObjectCode

        def key(named: Named) -> Any:
            return named.source.source, named.source.entry, named.source.defines, has_stamps

        def code(named: Named) -> bytes:
            source = named.source
            if has_stamps:
                count = len(source.params)
                return compile_stamped(source.source, source.entry, source.defines, count)
            return compile_cubin(source.source, source.defines, "sm_90a")

        missing = {key(named): named for named in kernels if key(named) not in self._codes}
        with ThreadPoolExecutor() as pool:
            for each, cubin in zip(missing, pool.map(code, missing.values()), strict=True):
                self._codes[each] = ObjectCode.from_cubin(cubin)
        return [self._codes[key(named)] for named in kernels]

    def capture(self, kernels: list[Named], addresses: list[int] | None) -> Any:
        """A graph of the step; `addresses` of each kernel's stamps."""
        builder = self.rank.device.create_graph_builder()
        builder.begin_building()
        codes = self.compile(kernels, has_stamps=addresses is not None)
        for number, (named, code) in enumerate(zip(kernels, codes, strict=True)):
            name = f"stamps {id(code)}"
            self.rank.modules[name] = code
            kernel = msgspec.structs.replace(named.kernel, cubin=name)
            params = [self._param(param) for param in kernel.params]
            params += [addresses[number]] if addresses is not None else []
            self.rank.add_kernel(builder, kernel, params, pdl=kernel.pdl)
        graph = builder.end_building().complete()
        graph.upload(self.rank.stream)
        return graph

    def _param(self, param: KernelParam | OwnScratch) -> Any:
        if not isinstance(param, OwnScratch):
            return self.rank.param(self.plan, param)
        if param not in self._scratch:  # which lives as long as this process
            size, fill = param.scratch.num_bytes, param.scratch.fill
            self._scratch[param] = address = int(self.check(self.driver.cuMemAlloc(size)))
            self.check(self.driver.cuMemsetD8(address, 0xFF if fill is None else fill, size))
        return self._scratch[param]

    def time(self, graph: Any) -> tuple[float, str]:
        """Median time of a step, and a hash of its results from a known state on."""
        self.executor.fill_state(0x3C)
        self.executor.send_inputs(self.input)
        graph.launch(self.rank.stream)
        self.rank.require_sound()
        digest = hashlib.sha256()
        for index in self.plan.outputs.values():
            digest.update(self.rank.read(self.plan.name, index).tobytes())
        timer = Timer(self.executor)
        timer._replay(self.rank, graph, 5)
        return statistics.median(timer._replay(self.rank, graph, RUNS)), digest.hexdigest()[:12]

    def stamp(self, kernels: list[Named]) -> tuple[float, list[list[NDArray[np.int64]]]]:
        """Time of a stamped step, and for every replay each kernel's stamps [blocks, WORDS]."""
        blocks = [math.prod(named.kernel.grid) for named in kernels]
        size = 8 * WORDS * sum(blocks)
        base = int(self.check(self.driver.cuMemAlloc(size)))
        starts = np.cumsum([0, *blocks])
        graph = self.capture(kernels, [base + 8 * WORDS * int(at) for at in starts[:-1]])
        us, _ = self.time(graph)
        replays = []
        for _ in range(REPLAYS):
            for _ in range(2):  # the second begins as steps do that follow one another
                self.check(self.driver.cuMemsetD8Async(base, 0, size, self.rank.stream.handle))
                graph.launch(self.rank.stream)
            self.rank.require_sound()
            host = np.zeros((int(starts[-1]), WORDS), np.int64)
            self.check(self.driver.cuMemcpyDtoH(host.ctypes.data, base, size))
            replays.append([host[a:b] for a, b in pairwise(starts)])
        self.check(self.driver.cuMemFree(base))
        return us, replays


def times_of(replay: list[NDArray[np.int64]]) -> list[NDArray[np.float64]]:
    """Events of every kernel's blocks in us from the first start on; NaN where there was none."""
    rows = np.concatenate(replay)
    stamps, cycles, sm = rows[:, :EVENTS], rows[:, EVENTS : 2 * EVENTS], rows[:, 2 * EVENTS]
    first = stamps[stamps > 0].min()
    ns = np.where(stamps > 0, stamps - first, np.nan).astype(np.float64)
    seen = np.unique(stamps[stamps > 0])
    tick = int(np.gcd.reduce(np.diff(seen))) if len(seen) > 1 else 1
    if tick > FINE_TICK:
        for number in np.unique(sm):
            of_sm = sm == number
            known = stamps[of_sm] > 0
            at, clock = ns[of_sm], cycles[of_sm]
            slope, offset = np.polyfit((clock - clock[known].min())[known], at[known], 1)
            ns[of_sm] = np.where(known, offset + slope * (clock - clock[known].min()), np.nan)
    ends = np.cumsum([len(each) for each in replay])[:-1]
    return np.split((ns - np.nanmin(ns)) / 1e3, ends)


COLUMNS = ("early", "spread", "wake", "work", "price", "trigger", "beside")


def figures_of(replay: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """[kernel][first and last start, last wait, last trigger, first and last end, COLUMNS]."""
    events = times_of(replay)
    sms = [each[:, 2 * EVENTS] for each in replay]
    result = np.full((len(events), 6 + len(COLUMNS)), np.nan)
    before = float("nan")
    for number, of_kernel in enumerate(events):
        start, waited, _, ended = of_kernel.T
        last = [np.nanmax(each) if np.isfinite(each).any() else np.nan for each in of_kernel.T]
        beside = 0
        if number + 1 < len(events):
            starts: dict[int, float] = {}
            for sm, at in zip(sms[number + 1], events[number + 1][:, START], strict=True):
                starts[sm] = min(at, starts.get(sm, np.inf))
            beside = sum(
                starts.get(sm, np.inf) < at for sm, at in zip(sms[number], waited, strict=True)
            )
        result[number] = (
            start.min(), last[START], last[WAITED], last[TRIGGERED], ended.min(), last[ENDED],
            before - last[START], last[ENDED] - ended.min(), last[WAITED] - before,
            last[ENDED] - last[WAITED], last[ENDED] - before, last[TRIGGERED] - before, beside,
        )  # fmt: skip
        before = last[ENDED]
    return result


def show(kernels: list[Named], figures: NDArray[np.float64], launches: slice | None) -> None:
    """A line for each kind of launch behind a kind of launch; and for each of `launches`."""
    if launches is not None:
        say(f"{'':4} {'':30} {'start':>8} {'last':>8} {'waited':>8} {'trigger':>8} "
            f"{'end':>8} {'last':>8}")  # fmt: skip
        for number in range(len(kernels))[launches]:
            times = " ".join(f"{value:8.2f}" for value in figures[number, :6])
            rest = " ".join(
                f"{n} {v:.2f}" for n, v in zip(COLUMNS, figures[number, 6:], strict=True)
            )
            say(f"{number:4} {kernels[number].source.entry:30} {times}  {rest}")
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, named in enumerate(kernels):
        entry = kernels[number - 1].source.entry if number else ""
        kinds[named.source.entry, entry].append(number)
    say(f"{'count':>5} {'kernel':20} {'behind':20} " + " ".join(f"{n:>7}" for n in COLUMNS))
    for (entry, before), members in sorted(kinds.items(), key=lambda item: min(item[1])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nothing is before the first launch
            values = np.nanmedian(figures[members, 6:], axis=0)
        texts = " ".join(f"{value:7.2f}" for value in values)
        say(f"{len(members):5} {entry:20} {before:20} {texts}")


def parse(variant: str) -> Settings:
    """Values by kernel and macro."""
    settings: Settings = defaultdict(dict)
    for part in filter(None, variant.split(",")):
        name, _, value = part.partition("=")
        entry, _, macro = name.partition(".")
        if not (entry and macro and value):
            raise SystemExit(f"{part!r} is no NAME.MACRO=VALUE")
        settings[entry][macro] = value
    return settings


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Parse arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rank-slice", metavar="R/N")
    parser.add_argument("--step", default="decode")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--variant", action="append", default=[])
    parser.add_argument("--no-stamps", action="store_true", help="time variants only")
    parser.add_argument("--launches", metavar="FIRST:LAST", help="also a line for each of these")
    parser.add_argument("-o", "--out", type=Path, help="stamps behind the last table, as .npz")
    options = parser.parse_args()
    part = None
    if options.launches:
        part = slice(*(int(number) for number in options.launches.split(":")))
    step = step_of(read_config(options.engine), options.step)
    with Engine.open(options.engine, rank_slice=options.rank_slice) as engine:
        stamper = Stamper(engine, step, options.context)
        first = ""
        for variant in ["", *options.variant]:
            kernels = stamper.kernels(parse(variant))
            us, digest = stamper.time(stamper.capture(kernels, None))
            first = first or digest
            say(f"{us:8.1f} us, same: {digest == first}  {variant or 'as built'}")
            if options.no_stamps:
                continue
            us, replays = stamper.stamp(kernels)
            figures = np.median([figures_of(replay) for replay in replays], axis=0)
            say(f"{us:8.1f} us with stamps")
            show(kernels, figures, part)
            if options.out is not None:
                names = [f"{named.module} {named.source.entry}" for named in kernels]
                blocks = [math.prod(named.kernel.grid) for named in kernels]
                stamps = np.stack([np.concatenate(replay) for replay in replays])
                np.savez_compressed(options.out, names=names, blocks=blocks, stamps=stamps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
