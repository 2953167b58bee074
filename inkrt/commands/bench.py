"""ink-bench: time an engine on its GPU, steps and operators, each beside its floor."""

import contextlib
import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inkrt.commands import console, spec_options
from inkrt.errors import ConfigError, EngineMismatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inkrt.runtime.engine_file import EngineConfig, StepSpec
    from inkrt.runtime.executor.cuda import CudaExecutor

STEP_RUNS = 60
_COUNTS = {2: "two", 3: "three"}
_Engine = Annotated[
    Path,
    typer.Argument(metavar="ENGINE", help="Engine folder for a GPU, or a model's config.json."),
]
_Steps = Annotated[
    str, typer.Option(help="Steps, also by kind (verify), with commas; default: all of the engine.")
]
_Runs = Annotated[int, typer.Option(min=1, help="Graph replays per figure.")]
_RankSlice = Annotated[
    str | None,
    typer.Option(
        "--rank-slice",
        metavar="R/N",
        help="Run rank R of N alone on one GPU, what it sends to others coming back to itself: "
        "times of what one rank does.",
    ),
]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write figures.")]


def engine(
    folder: _Engine,
    *,
    contexts: Annotated[
        str | None,
        typer.Option(help="Context lengths, with commas.  [default: 1024,8192; more with --costs]"),
    ] = None,
    steps: _Steps = "",
    runs: Annotated[
        int | None, typer.Option(min=1, help="Runs per figure.  [default: 60; 20 with --costs]")
    ] = None,
    rank_slice: _RankSlice = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also price each launch; prices add up to the step.")
    ] = False,
    profile_runs: Annotated[
        int | None, typer.Option(min=1, help="Replays of each cut of --profile; default: --runs.")
    ] = None,
    costs: Annotated[
        bool,
        typer.Option(
            "--costs",
            help="Measure what drafts cost here instead, for --width cost; kept in ENGINE.",
        ),
    ] = False,
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Measure how many drafts are accepted instead.")
    ] = False,
    rounds: Annotated[
        bool,
        typer.Option("--rounds", help="Time whole rounds that the GPU runs by itself instead."),
    ] = False,
    accept_profile: Annotated[
        str | None,
        typer.Option(
            metavar="P,P,...",
            help="Of --rounds: accept draft 1, 2, ... with these probabilities if those before it "
            "are, whatever is drawn.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of --acceptance, one a line; default: a few."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Of --acceptance, most tokens of an answer.")
    ] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="Of --acceptance.  [default: the model's]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of --acceptance.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of --acceptance, also draw it, as PNG.")
    ] = None,
    as_json: _Json = None,
    options: spec_options.SpecOptions,
) -> None:
    """Median GPU time of every step at every context, beside the bytes it must move.

    With --costs or --acceptance, figures of speculation instead, on any target; with --rounds,
    times of its rounds.
    """
    kinds = (("--costs", costs), ("--acceptance", acceptance), ("--rounds", rounds))
    chosen = [name for name, is_given in kinds if is_given]
    if len(chosen) > 1:
        raise UsageError(
            f"{' and '.join(chosen)} are {_COUNTS[len(chosen)]} measurements; run one after the "
            "other"
        )
    of_answers, of_drafts = {"--acceptance"}, {"--acceptance", "--rounds"}
    console.require_uses(
        *chosen,
        options=(
            ("--prompts", prompts is not None, of_answers),
            ("--plot", plot is not None, of_answers),
            ("--max-tokens", max_tokens != 256, of_answers),
            ("--temperature", temperature is not None, of_answers),
            ("--seed", seed != 0, of_answers),
            *((name, True, of_drafts) for name in options.typed()),
            ("--accept-profile", accept_profile is not None, {"--rounds"}),
            ("--steps", bool(steps), {""}),
            ("--profile", profile, {""}),
            ("--profile-runs", profile_runs is not None, {""}),
            ("--rank-slice", rank_slice is not None, {"", "--rounds"}),
            ("--contexts", contexts is not None, {"", "--costs", "--rounds"}),
            ("--runs", runs is not None, {"", "--costs", "--rounds"}),
        ),
    )
    _require_writable(as_json, plot)
    if costs:
        _keep_costs(folder, contexts, runs, as_json)
        return
    if acceptance:
        given: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed}
        if temperature is not None:
            given["temperature"] = temperature
        _measure_acceptance(folder, prompts, given, options, plot, as_json)
        return
    wanted = _numbers("1024,8192" if contexts is None else contexts)
    runs = runs or STEP_RUNS
    if profile_runs is not None and not profile:
        raise UsageError("--profile-runs is for --profile; add it or leave it out")
    cut_runs = (profile_runs or runs) if profile else 0
    if rounds:
        _time_rounds(folder, rank_slice, wanted, runs, options, accept_profile, as_json)
        return
    with _open(folder, rank_slice) as (executor, config):
        columns = ("context", "median us", "min us", "MB", "floor us", "experts")
        console.say(f"{'step':<10}" + "".join(f"{name:>11}" for name in columns))
        rows = [
            _measure(executor, config, step, context, runs, cut_runs)
            for step, context in _fitting(config, _chosen(config, steps), wanted)
        ]
        _write(as_json, executor, rows)


def _time_rounds(
    folder: Path, rank_slice: str | None, contexts: list[int], runs: int,
    options: spec_options.SpecOptions, profile: str | None, as_json: Path | None,
) -> None:  # fmt: skip
    from inkrt.commands import bench_rounds

    with _open(folder, rank_slice) as (executor, config):
        # An engine made of a configuration has no times to go by, and what `auto` means then.
        own = folder if folder.is_dir() else folder.parent
        speculation = options.config().resolve(own, config)
        rows = bench_rounds.measure_rounds(executor, config, speculation, contexts, runs, profile)
        _write(as_json, executor, rows)


def _keep_costs(folder: Path, contexts: str | None, runs: int | None, as_json: Path | None) -> None:
    from inkrt.commands import bench_speculation

    wanted = None if contexts is None else sorted(set(_numbers(contexts)))
    written = bench_speculation.keep_costs(folder, wanted, runs or bench_speculation.COST_RUNS)
    console.say(f"written: {written}", is_result=False)
    if as_json is not None:
        as_json.write_bytes(written.read_bytes())


def _measure_acceptance(
    folder: Path, prompts: Path | None, given: dict[str, Any], options: spec_options.SpecOptions,
    plot: Path | None, as_json: Path | None,
) -> None:  # fmt: skip
    from inkrt.commands import bench_speculation

    if plot is not None:
        bench_speculation.require_matplotlib()
    texts = bench_speculation.read_prompts(prompts)
    report = bench_speculation.measure_acceptance(folder, texts, given, options.config())
    if as_json is not None:
        as_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        bench_speculation.plot(report, plot)


def _require_writable(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            console.require_writable(path)


def _measure(
    executor: "CudaExecutor",
    config: "EngineConfig",
    step: "StepSpec",
    context: int,
    runs: int,
    cut_runs: int,
) -> dict[str, Any]:
    """Time one step behind `context` tokens of one session, and print a line.

    Bytes and floor are of the experts that the step reads, which are counted: on average over its
    layers, beside as many as its tokens would choose independently. With `cut_runs`, also price its
    launches by that many replays of every cut.
    """
    from inkrt.commands import bench_routing, bench_step
    from inkrt.runtime.executor.cuda_timing import Timer

    timer, plan = Timer(executor), executor.plan(step.name)
    step_input = bench_step.step_input_of(config, step, context)
    timer.step(step.name, step_input, bench_step.WARM_UP_RUNS)
    times = timer.step(step.name, step_input, runs)
    routing = bench_routing.step_routing(timer, plan, step_input)
    of_launches = bench_step.launch_bytes(config, plan, context, routing)
    num_bytes = sum(of_launches)
    row: dict[str, Any] = {
        "step": step.name,
        "context": context,
        "median_us": median(times),
        "min_us": min(times),
        "bytes": num_bytes,
        "floor_us": bench_step.floor_us(num_bytes),
    }
    figures = (row["median_us"], row["min_us"], num_bytes / 1e6, row["floor_us"])
    text = f"{step.name:<10}{context:>11}" + "".join(f"{figure:>11.1f}" for figure in figures)
    if routing:
        row["experts"] = bench_routing.summary(routing)
        text += "{mean:>11.1f} of {independent:.1f} if independent".format(**row["experts"])
    console.say(text)
    if cut_runs:
        prices = bench_step.price_launches(
            timer, plan, step_input, cut_runs, row["median_us"], of_launches
        )
        row["launches"] = bench_step.price_rows(prices)
        for kind in row["launches"]:
            console.say(
                f"  {kind['op']:<19}{kind['us']:>11.1f} us, {kind['count']:>3} of "
                f"{kind['us'] / kind['count']:>7.2f}, floor {kind['floor_us']:>7.1f}, "
                f"{kind['tactic']}"
            )
    return row


def ops(
    folder: _Engine,
    *,
    steps: _Steps = "",
    context: Annotated[int, typer.Option(min=0, help="Positions in front of every step.")] = 8192,
    runs: _Runs = 60,
    rank_slice: _RankSlice = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time all tactics and add them to the timing cache.")
    ] = False,
    timing_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What --tune adds to; default: the package's own."),
    ] = None,
    commit: Annotated[str, typer.Option(help="Of the sources; the timing cache records it.")] = "",
    as_json: _Json = None,
) -> None:
    """Median GPU time of every kind of launch with weights cold in the L2, beside its floor.

    Of several ranks it is that of the slowest. Launches of a rank slice that exchange data lack the
    way to other GPUs: the timing cache keeps their times apart.
    """
    from inkrt.commands.bench_ops import Bench, CacheWriter

    writer = None
    if tune:
        if not commit:
            raise UsageError("the timing cache records the sources' commit; add: --commit HASH")
        writer = CacheWriter(timing_cache, commit)
    elif timing_cache is not None or commit:
        raise UsageError("--timing-cache and --commit are for --tune; add it or leave them out")
    if as_json is not None:
        console.require_writable(as_json)
    with _open(folder, rank_slice) as (executor, config):
        bench = Bench(executor, config, context, runs, writer)
        fitting = _fitting(config, _chosen(config, steps), [context])
        try:
            rows = [row for step, _ in fitting for row in bench.step(step)]
        finally:  # what is measured is true whatever ends the rest
            if writer is not None:
                console.say(writer.write(), is_result=False)
        _write(as_json, executor, rows)


@contextlib.contextmanager
def _open(folder: Path, rank_slice: str | None) -> "Iterator[tuple[CudaExecutor, EngineConfig]]":
    """An engine's executor and configuration; a model's configuration becomes an engine first."""
    from inkrt.commands.bench_ops import engine_folder
    from inkrt.runtime.engine import Engine
    from inkrt.runtime.executor.cuda import CudaExecutor
    from inkrt.runtime.executor.peers import RankSlice

    part = None if rank_slice is None else RankSlice.parse(rank_slice)
    num_ranks = 1 if part is None else part.num_ranks
    with (
        engine_folder(folder, num_ranks) as found,
        Engine.open(found, rank_slice=rank_slice) as opened,
    ):
        executor, config = opened.executor, opened.config
        if not isinstance(executor, CudaExecutor):
            raise EngineMismatchError(f"engine {folder} is for {config.target}, not a GPU")
        if part is not None:
            console.say(f"{part}: times of one of {num_ranks} ranks, its tokens mean nothing")
        executor.fill_state(0x3C)  # small finite keys and values; zeros can be special
        yield executor, config


def _chosen(config: "EngineConfig", names: str) -> "list[StepSpec]":
    """The steps with the names or of the kinds that are wanted, in the engine's order.

    The draft step, if there is one, comes last.
    """
    steps = config.all_steps
    spelled = {step.name: {step.name, step.name.rstrip("0123456789")} for step in steps}
    wanted = set(names.split(",")) if names else set(spelled)
    if unknown := wanted - set().union(*spelled.values()):
        raise ConfigError(f"the engine has no step {min(unknown)!r}; it has {', '.join(spelled)}")
    return [step for step in steps if spelled[step.name] & wanted]


def _fitting(
    config: "EngineConfig", steps: "list[StepSpec]", contexts: list[int]
) -> "Iterator[tuple[StepSpec, int]]":
    """Every step behind every context, but for those that do not fit, which it tells."""
    for step in steps:
        for context in contexts:
            if context + step.num_tokens <= config.max_seq_len:
                yield step, context
            else:
                limit = f"the engine has {config.max_seq_len:,} positions"
                console.say(f"{step.name} at {context:,} left out: {limit}", is_result=False)


def _write(path: Path | None, executor: "CudaExecutor", rows: list[dict[str, Any]]) -> None:
    if path is not None:
        text = json.dumps({"device": executor.device_name, "rows": rows}, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")


def _numbers(text: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 0:
        raise ConfigError(f"--contexts takes numbers from 0 with commas, got {text!r}")
    return values


def make_app() -> typer.Typer:
    """The application."""
    app = console.make_app("ink-bench", "Time an engine.")
    console.add_command(
        app,
        engine,
        name="engine",
        options=spec_options.SpecOptions,
        api_names=spec_options.API_NAMES,
    )
    console.add_command(app, ops, name="ops")
    return app


def main() -> None:
    """Entry point."""
    console.run(make_app())


if __name__ == "__main__":
    main()
