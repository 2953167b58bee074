"""What `ink-bench engine` measures about speculation: costs of widths, and acceptance of drafts.

Both use an engine as generation does, through sessions and the LLM, on any target.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from inkrt.commands import console
from inkrt.commands.spec_options import nobody_drafts
from inkrt.errors import ConfigError, UsageError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.executor.round_queue import RoundSettings
from inkrt.runtime.llm import LLM
from inkrt.runtime.output import RequestOutput
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import MAX_AHEAD, Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.costs import CostTable, engine_hash, most_drafted
from inkrt.runtime.spec.stats import SpeculationStats
from inkrt.runtime.spec.width import CostAware, CostsByContext, RoundCosts

CONTEXTS = (256, 2048, 16384, 65536, 262144)
WARM_UP_RUNS = 3
COST_RUNS = 20
# Prose, code, tables, arithmetic, repetition: drafts are right to very different degrees.
PROMPTS = (
    "Why is the sea blue?",
    "Write a Python function that merges two sorted lists, with a docstring and three tests.",
    "A train leaves at 9:40 and arrives at 13:05 after 287 km. What was its mean speed? Explain.",
    "List the planets of the solar system in a table with their diameters and distances.",
    "Repeat this sentence five times, each time with another adjective: The old house was quiet.",
    "Write a short letter to a neighbor who plays the trumpet at night.",
    "Translate into French: The bakery opens at seven, but the bread is sold out by eight.",
    "Explain to a child how a refrigerator works.",
)


def measure_costs(engine: Engine, contexts: Sequence[int] | None, runs: int) -> CostTable:
    """Time plain steps, verify steps of every width and the draft step, as the host sees them.

    Where the device runs rounds by itself, they are timed too: whole, one behind the other.

    The tokens that steps read are those that the model itself says there, since what experts they
    choose decides what a step costs.

    Args:
        engine: with a free session.
        contexts: tokens in front of the steps, rising; None takes those of `CONTEXTS` that fit.
        runs: of each step; the median counts.

    Raises:
        ConfigError: no context fits into the engine.
    """
    config = engine.config
    widest = config.widest_verify
    num_plain = WARM_UP_RUNS + runs
    most = most_drafted(config) if engine.executor.rounds is not None else 0
    num_behind = num_plain + 1 + MAX_AHEAD
    if most:  # one position a round, and what the last of each kind may write beyond
        num_behind += (most + 2) * num_plain + 2 * (1 + most)
    fitting = _fitting(config, contexts, max(num_behind, widest))
    rows, of_rounds = [], []
    header = ["context", *(["draft ms"] if config.draft else []), "plain ms"]
    header += [f"{count} ms" for count in range(1, widest + 1)]
    console.say("".join(f"{name:>10}" for name in header))
    with engine.session() as session:
        sampling = Sampling(temperature=1.0)
        for context in fitting:
            if session.length >= context:  # contexts so near that the last one's steps went by
                session.rollback(0)
            missing = max(context - session.length, 1)
            start = session.length
            text = [(17 + 31 * (start + i)) % config.model.vocab_size for i in range(missing)]
            output = session.prefill(text, sampling, wants_logits=False)
            tokens = [int(output.tokens[-1])]
            start = session.length
            while len(tokens) < widest:
                tokens.append(session.decode(tokens[-1], sampling))
            if session.length > start:
                session.rollback(start)

            def verify(count: int, tokens: list[int] = tokens, start: int = start) -> float:
                began = time.perf_counter()
                session.step(tokens[:count], sampling, wants_logits=False)
                seconds = time.perf_counter() - began
                session.rollback(start)
                return seconds

            def draft(token: int = tokens[0]) -> float:
                began = time.perf_counter()
                session.draft(token, sampling, coupled=True, wants_logits=False)
                return time.perf_counter() - began

            draft_s = _medians([draft], runs)[0] if config.draft else None
            widths = range(1, widest + 1)
            verify_s = _medians([lambda n=n: verify(n) for n in widths], runs)  # type: ignore[misc]
            plain = []
            for left in reversed(range(num_plain)):
                began = time.perf_counter()
                tokens[0] = session.decode(tokens[0], sampling, num_more=left)
                plain.append(time.perf_counter() - began)
            rows.append((context, median(plain[WARM_UP_RUNS:]), verify_s, draft_s))
            times = [*([] if draft_s is None else [draft_s]), rows[-1][1], *verify_s]
            console.say(f"{context:>10}" + "".join(f"{1e3 * seconds:>10.3f}" for seconds in times))
            if most:
                of_rounds.append(_round_seconds(session, tokens[0], most, num_plain))
    if most:
        _say_rounds(fitting, of_rounds)
    return CostTable(
        engine_hash(config),
        device_name(engine),
        tuple(context for context, *_ in rows),
        tuple(plain_s for _, plain_s, _, _ in rows),
        tuple(tuple(verify_s) for _, _, verify_s, _ in rows),
        tuple(s for *_, s in rows if s is not None) if config.draft else None,
        tuple(of_rounds) if most else None,
    )


def _fitting(
    config: EngineConfig, contexts: Sequence[int] | None, num_behind: int
) -> Sequence[int]:
    """The contexts that leave room for so many positions behind them; None as `measure_costs`."""
    limit = config.max_seq_len - num_behind
    fitting = [context for context in contexts or CONTEXTS if context <= limit]
    if not fitting and contexts is None and limit >= 2:
        fitting = [limit // 2]
    if not fitting:
        raise ConfigError(
            f"no context fits: {num_behind} positions behind it are measured in, of the engine's "
            f"{config.max_seq_len}; give shorter --contexts or fewer --runs"
        )
    return fitting


def _say_rounds(contexts: Sequence[int], of_rounds: Sequence[Sequence[float]]) -> None:
    console.say("rounds that the device runs: one that drafts nothing, then by drafts verified")
    header = ["context", "plain ms", *(f"{count} ms" for count in range(len(of_rounds[0]) - 1))]
    console.say("".join(f"{name:>10}" for name in header))
    for context, seconds in zip(contexts, of_rounds, strict=True):
        console.say(f"{context:>10}" + "".join(f"{1e3 * one:>10.3f}" for one in seconds))


def _round_seconds(session: Session, token: int, most: int, num_runs: int) -> tuple[float, ...]:
    """Median seconds of a plain round, and of rounds that verify 0, 1, ... drafts.

    The device runs them one behind the other. No draft is accepted, so the tokens that come are
    those of the model, one a round.
    """
    medians = []
    for width in (None, *range(most + 1)):
        settings = RoundSettings("forced", steady_width(width, most), most, forced=(0.0,) * most)
        times = []
        for left in reversed(range(num_runs)):
            began = time.perf_counter()
            record = session.round(token, Sampling(temperature=1.0), settings, 2 + most + left)
            times.append(time.perf_counter() - began)
            assert record.drafted == (width or 0), (record, width)
            assert (record.proposed == 0) == (width is None), (record, width)
            token = record.tokens[-1]
        medians.append(median(times[WARM_UP_RUNS:]))
    return tuple(medians)


def steady_width(width: int | None, most: int) -> CostAware:
    """A policy that goes by made-up costs, so that it verifies so many drafts; None drafts none."""
    plain = 1e-6 if width is None else 1e6
    costs = RoundCosts(plain, [1e-6 if count == width else 1.0 for count in range(most + 1)])
    table = CostsByContext((0,), (costs,))
    return CostAware(table, explore_every=10**9, num_first=0, on_device=table)


def keep_costs(folder: Path, contexts: Sequence[int] | None = None, runs: int = COST_RUNS) -> Path:
    """Measure an engine's costs and write them into its folder; arguments as `measure_costs`."""
    with Engine.open(folder) as engine:
        return measure_costs(engine, contexts, runs).write(folder)


def device_name(engine: Engine) -> str:
    """What an engine runs on, for people."""
    if isinstance(engine.executor, CudaExecutor):
        return engine.executor.device_name
    return f"cpu ({platform.processor() or platform.machine()})"


def _medians(timed: Sequence[Callable[[], float]], runs: int) -> list[float]:
    """Median seconds of each; they take turns, so that drift meets all of them."""
    times: list[list[float]] = [[] for _ in timed]
    for run in range(WARM_UP_RUNS + runs):
        for place, function in enumerate(timed):
            seconds = function()
            if run >= WARM_UP_RUNS:
                times[place].append(seconds)
    return [median(of_one) for of_one in times]


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a text file, one a line; without a file, a few of different kinds.

    Raises:
        ConfigError: the file cannot be read or has no prompt.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({error}); give a text file in UTF-8") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompts; write one into each line")
    return prompts


def measure_acceptance(
    folder: Path, prompts: Sequence[str], given: dict[str, Any], speculative: SpeculativeConfig
) -> dict[str, Any]:
    """Answer prompts and tell how many drafts were accepted, of each prompt and of all.

    Args:
        folder: an engine with a tokenizer; its chat template is used if there is one.
        prompts: texts.
        given: sampling parameters that replace the model's.
        speculative: who drafts.

    Raises:
        UsageError: nobody drafts.
        ConfigError: the engine has no tokenizer.
        InkError: the engine cannot speculate like this.
    """
    rows = []
    with LLM(folder, speculative=speculative) as llm:
        if llm.method == "none":
            if speculative.method == "none":
                raise UsageError("nobody drafts with --spec none; leave it out or name a drafter")
            raise UsageError(f"nobody drafts: {nobody_drafts(llm)}")
        if llm.engine.tokenizer is None:
            raise ConfigError(
                f"acceptance is measured on texts, but engine {folder} has no tokenizer.json; "
                "rebuild it from a checkpoint with one"
            )
        params = replace(llm.default_params, **given)
        console.say(f"{'prompt':<44}{'tokens':>8}{'rounds':>8}{'plain':>7}{'length':>8}  by place")
        for prompt, output in _answers(llm, prompts, params):
            stats = output.speculation
            rows.append({"prompt": prompt, **figures(stats)})
            console.say(_line(prompt, stats))
        console.say(_line("all", llm.speculation))
        return {
            "engine": str(folder),
            "device": device_name(llm.engine),
            "method": llm.method,
            "accept": speculative.accept,
            "width": speculative.width,
            "temperature": params.temperature,
            "all": figures(llm.speculation),
            "prompts": rows,
        }


def figures(stats: SpeculationStats) -> dict[str, Any]:
    """Counts and shares of speculation, for JSON."""
    return {
        "emitted": stats.emitted,
        "rounds": stats.rounds,
        "on_device": stats.on_device,
        "plain_steps": stats.plain_steps,
        "proposed": stats.proposed,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "cut": stats.cut,
        "acceptance_length": stats.acceptance_length,
        "tokens_per_step": stats.tokens_per_step,
        "acceptance_rate": stats.acceptance_rate,
        "drafted_at": stats.drafted_at,
        "reached_at": stats.reached_at,
        "accepted_at": stats.accepted_at,
        "acceptance_at": stats.acceptance_at,
        "conditional_acceptance_at": stats.conditional_acceptance_at,
        "rounds_of_length": stats.rounds_of_length,
    }


def require_matplotlib() -> None:
    """Check that plots can be drawn, before what takes long.

    Raises:
        ConfigError: they cannot.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "a plot needs matplotlib, which is not installed; install it with: "
            "pip install 'inkrt[plot]', or leave --plot out"
        ) from None


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw acceptance by place and rounds by their number of accepted drafts into a PNG file."""
    from matplotlib.figure import Figure

    whole = report["all"]
    places = range(1, len(whole["acceptance_at"]) + 1)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_place, by_length = figure.subplots(1, 2)
    for key, label, marker in (
        ("acceptance_at", "of all rounds", "o"),
        ("conditional_acceptance_at", "of those that came to it", "s"),
    ):
        by_place.plot(list(places), whole[key], marker=marker, label=label)
    by_place.set(xlabel="place in the block", ylabel="share accepted", ylim=(0, 1))
    by_place.set_xticks(list(places))
    by_place.legend()
    lengths = range(len(whole["rounds_of_length"]))
    shares = [count / max(whole["rounds"], 1) for count in whole["rounds_of_length"]]
    by_length.bar(list(lengths), shares)
    by_length.set(xlabel="drafts accepted", ylabel="share of rounds")
    by_length.set_xticks(list(lengths))
    figure.suptitle(
        f"{report['method']}, {report['accept']}, width {report['width']}, temperature "
        f"{report['temperature']:g}: {whole['acceptance_length']:.2f} tokens a round"
    )
    figure.savefig(path, format="png", dpi=150)


def _answers(
    llm: LLM, prompts: Sequence[str], params: SamplingParams
) -> Iterator[tuple[str, RequestOutput]]:
    for prompt in prompts:
        if llm.engine.chat_template is None:
            yield prompt, llm.generate(prompt, params)[0]
        else:
            yield prompt, llm.chat([{"role": "user", "content": prompt}], params)


def _line(name: str, stats: SpeculationStats) -> str:
    shown = name if len(name) <= 42 else f"{name[:39]}..."
    shares = " ".join(f"{share:4.0%}" for share in stats.acceptance_at)
    return (
        f"{shown:<44}{stats.emitted:>8}{stats.rounds:>8}{stats.plain_steps:>7}"
        f"{stats.acceptance_length:>8.2f}  {shares}"
    )
