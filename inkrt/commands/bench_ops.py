"""`ink-bench ops`: times of every kind of launch of an engine's steps, and of its tactics.

Launches of one kind differ in addresses only. They are timed in chains (`runtime.executor.
cuda_timing`): each with the weights and state of its own layer, all on the activations of the first
one, which the step has computed up to there. So routing is that of the step. Of launches that
choose experts it is the middle one: rows of the first layers share what attention adds to all.

Launches that exchange data run on all ranks in lock-step. On a rank slice they hear themselves,
which their times in the cache say.
"""

import contextlib
import datetime
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from inkrt.commands import console
from inkrt.commands.bench_routing import Routing, StepReader, has_routing, launch_routing
from inkrt.commands.bench_step import floor_us, launch_bytes, step_input_of
from inkrt.errors import ConfigError
from inkrt.runtime.engine_file import CONFIG_NAME, FORMAT, EngineConfig, StepSpec
from inkrt.runtime.executor import StepInput
from inkrt.runtime.executor.cuda_timing import FLUSH_BYTES, Chain, Timer
from inkrt.runtime.plan import (
    Argument,
    FloatParam,
    IntParam,
    Kernel,
    KernelParam,
    Launch,
    Plan,
    Ref,
    Refs,
    TensorParam,
    slot_bytes,
)

if TYPE_CHECKING:
    from inkrt.builder.tune import Candidate, Tuner
    from inkrt.runtime.executor.cuda import CudaExecutor

# Layers of a chain: all of Flint's, since the more there are, the less has to be flushed.
MAX_LAYERS = 64
_GRAPH_US = 400  # that a graph should take at least, so that its own start does not count
_MOST_REPEATS = 64
_LAUNCH_US, _FLUSH_US = 3, 45  # rough


class ChainTimer(StepReader, Protocol):
    """See `Timer`."""

    def load(self, cubins: Mapping[str, bytes]) -> None:
        """Make code known."""
        ...

    def chains(
        self, step: str, step_input: StepInput, first: int, chains: Sequence[Chain], num_runs: int
    ) -> list[list[float]]:
        """GPU time in us of a launch of each chain, for every replay."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Launches of a plan that run the same kernels.

    Attributes:
        first: index of the one whose activations all have: the first, or one in the middle.
        count: how many there are in the step.
        launches: the first ones.
    """

    first: int
    count: int
    launches: tuple[Launch, ...]


def kinds_of(plan: Plan) -> list[Kind]:
    """The kinds of launches of a plan, in order of first use."""
    indices: dict[object, list[int]] = {}
    for index, launch in enumerate(plan.launches):
        key = (launch.op, launch.tactic, tuple(map(_identity, launch.kernels)))
        indices.setdefault(key, []).append(index)
    kinds = []
    for members in indices.values():
        is_middle = has_routing(plan.launches[members[0]].op)
        chosen = members[len(members) // 2 if is_middle else 0]
        launches = [
            _moved(plan, plan.launches[index], plan.launches[chosen])
            for index in members[:MAX_LAYERS]
        ]
        kinds.append(Kind(chosen, len(members), tuple(launches)))
    return kinds


def _identity(kernel: Kernel) -> Kernel:
    """A kernel without its addresses."""
    params = tuple(
        param if isinstance(param, IntParam | FloatParam) else TensorParam(0)
        for param in kernel.params
    )
    return msgspec.structs.replace(kernel, params=params)


def _moved(plan: Plan, launch: Launch, first: Launch) -> Launch:
    """A launch with its own weights, state and scratch, and the activations of another."""

    def tensor(own: int, of_first: int) -> int:
        is_kept = plan.tensors[own].space in ("weight", "state", "scratch")
        return own if is_kept else of_first

    def argument(own: Argument, of_first: Argument) -> Argument:
        if isinstance(own, Ref) and isinstance(of_first, Ref):
            return Ref(tensor(own.tensor, of_first.tensor))
        if isinstance(own, Refs) and isinstance(of_first, Refs):
            return Refs(tuple(map(tensor, own.tensors, of_first.tensors)))
        return own

    def param(own: KernelParam, of_first: KernelParam) -> KernelParam:
        if isinstance(own, TensorParam) and isinstance(of_first, TensorParam):
            return TensorParam(tensor(own.tensor, of_first.tensor))
        return own  # tables hold weights and state only

    kernels = tuple(
        msgspec.structs.replace(own, params=tuple(map(param, own.params, of_first.params)))
        for own, of_first in zip(launch.kernels, first.kernels, strict=True)
    )
    args = {name: argument(own, first.args[name]) for name, own in launch.args.items()}
    return msgspec.structs.replace(launch, args=args, outputs=first.outputs, kernels=kernels)


def chain_of(plan: Plan, num_bytes: int) -> Chain:
    """How launches of `num_bytes` each are timed, so that weights are cold and the graph is long.

    Args:
        plan: of the launches alone.
        num_bytes: that one moves at least.
    """
    count = len(plan.launches)
    flush = count * num_bytes < FLUSH_BYTES
    us = count * (_LAUNCH_US + floor_us(num_bytes)) + _FLUSH_US * flush
    return Chain(plan, min(_MOST_REPEATS, max(1, math.ceil(_GRAPH_US / us))), flush)


class CacheWriter:
    """Collects the times of tactics, and adds them to a timing cache.

    Args:
        path: of the cache, which is made if it does not exist; None for the package's own.
        commit: of the sources.

    Raises:
        ConfigError: from the constructor, if the file is there but no timing cache, or cannot be
            written.
    """

    def __init__(self, path: Path | None, commit: str) -> None:
        from inkrt.builder.timing_cache import SHIPPED, TimingCache, read_timing_cache

        self._path = path or SHIPPED
        console.require_writable(self._path)
        self._commit = commit
        self._cache = read_timing_cache(self._path) if self._path.exists() else TimingCache()
        self._count = 0
        self._date = datetime.datetime.now(datetime.UTC).date().isoformat()

    def add(
        self, device: str, plan: Plan, launch: Launch, candidate: "Candidate", times: list[float],
        context: int,
    ) -> None:  # fmt: skip
        """Add the times in us of one tactic."""
        from inkrt.builder.timing_cache import Timing, describe_call
        from inkrt.builder.tune import call_args_of

        timing = Timing(
            candidate.tactic, candidate.kernels, round(median(times), 3), len(times), context,
            self._commit, self._date,
        )  # fmt: skip
        self._cache.add(device, launch.op, describe_call(call_args_of(plan, launch)), timing)
        self._count += 1

    def write(self) -> str:
        """Write the file; gives a line about it.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self._path.write_bytes(self._cache.encode())
        except OSError as error:
            raise ConfigError(
                f"cannot write timing cache {self._path} ({error.strerror}); "
                f"name another one with --timing-cache"
            ) from None
        return f"timing cache {self._path}: {self._count} times added"


class Bench:
    """Times the kinds of launches of an engine and prints a line for each.

    Args:
        executor: of the engine.
        config: of the engine.
        context: positions in front of every step.
        runs: replays per figure.
        writer: takes the times of all tactics; None times the engine's own only.
        timer: of the executor, None for the real one.
    """

    def __init__(
        self,
        executor: "CudaExecutor",
        config: EngineConfig,
        context: int,
        runs: int,
        writer: CacheWriter | None = None,
        timer: ChainTimer | None = None,
    ) -> None:
        self._executor = executor
        self._config = config
        self._context = context
        self._runs = runs
        self._writer = writer
        self._timer = timer or Timer(executor)
        self._tuner = None if writer is None else _make_tuner(config.target)
        columns = ("count", "median us", "MB", "floor us", "part", "cold by")
        console.say(f"{'step':<10}{'operator':<20}" + "".join(f"{x:>10}" for x in columns))

    def step(self, step: StepSpec) -> Iterator[dict[str, Any]]:
        """A row for every kind of launch, and with a writer for every tactic of each."""
        assert self._context + step.num_tokens <= self._config.max_seq_len, "the step does not fit"
        plan = self._executor.plan(step.name)
        step_input = step_input_of(self._config, step, self._context)
        num_bytes = launch_bytes(self._config, plan, self._context)
        kinds = kinds_of(plan)
        if self._tuner is not None:
            started = time.monotonic()
            self._tuner.compile(plan, [kind.launches[0] for kind in kinds])
            seconds = time.monotonic() - started
            console.say(f"{step.name}: tactics of {len(kinds)} calls compiled in {seconds:.1f} s")
        saved = whole = 0.0
        for kind in kinds:
            own = msgspec.structs.replace(plan, launches=kind.launches, scratch_bytes=0, fills=())
            candidates = self._candidates(plan, kind)
            plans = [candidate.plan for candidate in candidates] or [own]
            routing = self._routing(plan, kind, step_input)
            moved = num_bytes[kind.first]
            if routing:
                pairs = zip(routing, kind.launches, strict=True)
                moved = round(mean(one.bytes_of(launch) for one, launch in pairs))
            chains = [chain_of(item, moved) for item in plans]
            times = self._timer.chains(step.name, step_input, kind.first, chains, self._runs)
            fastest = min(median(of_chain) for of_chain in times)
            for number, (chain, of_chain) in enumerate(zip(chains, times, strict=True)):
                launch = chain.plan.launches[0]
                device = self._device(chain.plan)
                if self._writer is not None:
                    self._writer.add(
                        device, plan, kind.launches[0], candidates[number], of_chain, self._context
                    )
                row = self._row(kind, chain, of_chain, moved)
                row |= {"is_chosen": launch.tactic == kind.launches[0].tactic}
                row |= {"is_fastest": row["median_us"] == fastest, "device": device}
                if row["is_chosen"]:
                    saved += kind.count * (row["median_us"] - fastest)
                    whole += kind.count * row["median_us"]
                if routing:
                    row["experts"] = mean(one.distinct for one in routing)
                    row["experts_if_independent"] = routing[0].independent
                _say(step.name, row)
                yield {"step": step.name, **row}
        if self._tuner is not None:
            console.say(
                f"{step.name}: {whole:.1f} us in chains by the engine's tactics, "
                f"{whole - saved:.1f} by the fastest"
            )

    def _device(self, plan: Plan) -> str:
        """Whose the times of launches are."""
        from inkrt.builder.timing_cache import looped_back

        executor = self._executor
        has_exchange = executor.rank_slice is not None and slot_bytes([plan]) > 0
        return looped_back(executor.gpu_name) if has_exchange else executor.gpu_name

    def _routing(self, plan: Plan, kind: Kind, step_input: StepInput) -> list[Routing]:
        """What each launch of a chain chooses; nothing if it has no experts."""
        found = (
            launch_routing(self._timer, plan, launch, step_input, kind.first)
            for launch in kind.launches
        )
        return [routing for routing in found if routing is not None]

    def _candidates(self, plan: Plan, kind: Kind) -> "list[Candidate]":
        if self._tuner is None:
            return []
        found = self._tuner.candidates(plan, kind.launches)
        self._timer.load(self._tuner.cubins)
        if not found:
            raise ConfigError(
                f"this version has no tactic of {kind.launches[0].op} for {self._config.target} "
                f"that fits the engine; rebuild it with: {self._config.rebuild_command}"
            )
        return found

    def _row(self, kind: Kind, chain: Chain, times: list[float], num_bytes: int) -> dict[str, Any]:
        launch, us = chain.plan.launches[0], median(times)
        return {
            "op": launch.op,
            "module": launch.module,
            "tactic": launch.tactic,
            "count": kind.count,
            "context": self._context,
            "median_us": us,
            "min_us": min(times),
            "n": len(times),
            "bytes": num_bytes,
            "floor_us": floor_us(num_bytes),
            "part_of_bandwidth": floor_us(num_bytes) / us,
            "cold_by": "flush" if chain.flush else "rotation",
        }


def _make_tuner(target: str) -> "Tuner":
    from inkrt.builder.tune import Tuner

    return Tuner(target)


def _say(step: str, row: dict[str, Any]) -> None:
    figures = (
        f"{row['count']:>10}{row['median_us']:>10.2f}{row['bytes'] / 1e6:>10.2f}"
        f"{row['floor_us']:>10.2f}{row['part_of_bandwidth']:>10.2f}{row['cold_by']:>10}"
    )
    marks = ("*" if row["is_chosen"] else " ") + ("<" if row["is_fastest"] else " ")
    experts = ""
    if "experts" in row:
        independent = row["experts_if_independent"]
        experts = f", {row['experts']:.1f} experts, {independent:.1f} if independent"
    console.say(f"{step:<10}{row['op']:<20}{figures} {marks} {row['tactic']}{experts}")


@contextlib.contextmanager
def engine_folder(path: Path, num_ranks: int = 1) -> Iterator[Path]:
    """`path` if it is an engine; of a model's config.json, an engine without weights for a while.

    Args:
        path: engine folder, config.json or its folder.
        num_ranks: of the engine that is made; one that is there has its own.
    """
    config = path / CONFIG_NAME if path.is_dir() else path
    try:
        values = msgspec.json.decode(config.read_bytes())
    except (OSError, msgspec.DecodeError):
        values = {}  # opening it says what is wrong
    if not isinstance(values, dict) or "model_type" not in values or values.get("format") == FORMAT:
        yield path
        return
    from inkrt.builder.build import build_engine
    from inkrt.builder.options import BuildOptions
    from inkrt.plugins.tactic import HOPPER

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        (Path(folder) / "model" / CONFIG_NAME).write_bytes(config.read_bytes())
        engine = Path(folder) / "engine"
        options = BuildOptions(target=HOPPER, weights="dummy", tp_size=num_ranks)
        build_engine(
            Path(folder) / "model", engine, options, lambda x: console.say(x, is_result=False)
        )
        yield engine
