"""Times of whole rounds that the device runs by itself: what of them is not verifying?

Rounds run one behind the other, by graph replay, on a state that is no text. With an acceptance
profile coins decide which drafts are accepted, as on a model whose drafts are that often right, so
times of an engine with dummy weights, or of one rank of several, are those of a real one.
"""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from inkrt.commands import console
from inkrt.errors import EngineMismatchError, UsageError
from inkrt.runtime.engine_file import DRAFT_STEP, EngineConfig
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cuda import ROUND_RULES, CudaExecutor
from inkrt.runtime.executor.cuda_timing import Timer
from inkrt.runtime.executor.round_queue import (
    DeviceRule,
    RoundInput,
    RoundRecord,
    RoundSettings,
    is_for_device,
)
from inkrt.runtime.spec.config import Speculation

WARM_UP_ROUNDS = 8


def read_profile(text: str, most: int) -> tuple[float, ...]:
    """Probabilities that draft 1, 2, ... is accepted if those before it are; the last one repeats.

    Raises:
        UsageError: not numbers from 0 to 1 with commas, or more than `most`.
    """
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        raise UsageError(f"--accept-profile takes numbers from 0 to 1 with commas, got {text!r}")
    if len(values) > most:
        raise UsageError(
            f"--accept-profile has {len(values)} numbers for {most} drafts; leave out the last"
        )
    return (*values, *[values[-1]] * (most - len(values)))


def measure_rounds(
    executor: CudaExecutor,
    config: EngineConfig,
    speculation: Speculation | None,
    contexts: Sequence[int],
    num_runs: int,
    profile: str | None,
) -> list[dict[str, Any]]:
    """Time rounds behind every context, and print them beside the steps that they are made of.

    Args:
        executor: of an engine with a drafter; a slice will do.
        config: of the engine.
        speculation: how it speculates.
        contexts: tokens in front of the first round.
        num_runs: rounds that count, behind `WARM_UP_ROUNDS` others.
        profile: see `read_profile`; None compares drafts with what is drawn.

    Returns:
        A row for every context, for JSON.

    Raises:
        EngineMismatchError: the engine has no drafter, or no rounds for the device.
        UsageError: the profile is none.
        DeviceError: a kernel gave up.
    """
    if speculation is None or speculation.method == "ngram" or executor.ranks[0].rounds is None:
        raise EngineMismatchError(
            "rounds of the device need the engine's own drafter, and there is none here; build it "
            f"from a checkpoint with one: {config.rebuild_command}"
        )
    most = speculation.num_draft_tokens
    rule: DeviceRule = speculation.accept if profile is None else "forced"
    forced = () if profile is None else read_profile(profile, most)
    settings = RoundSettings(rule, speculation.make_policy(), most, forced=forced)
    if not is_for_device(settings, ROUND_RULES):
        raise UsageError("the device cannot run such rounds; see docs/speculative.md for those")
    rows = []
    for context in contexts:
        num_positions = (WARM_UP_ROUNDS + num_runs) * (1 + most)
        if context + num_positions > config.max_seq_len:
            console.say(
                f"rounds at {context:,} left out: they need {num_positions:,} positions behind it, "
                f"the engine has {config.max_seq_len:,}",
                is_result=False,
            )
            continue
        # Each with a policy that has learned nothing.
        fresh = RoundSettings(rule, speculation.make_policy(), most, forced=forced)
        rows.append(_measure(Timer(executor), config, fresh, context, num_runs))
    return rows


def _measure(
    timer: Timer, config: EngineConfig, settings: RoundSettings, context: int, num_runs: int
) -> dict[str, Any]:
    pages = list(range(-(-config.max_seq_len // config.state.page_tokens)))
    sampling = Sampling(temperature=1.0, seed=1)
    step = StepInput([17], context, 0, pages, sampling, settings.rule != "probabilistic")
    given = RoundInput(step, settings, 2**30, config.max_seq_len)
    all_times, all_records = timer.rounds(given, WARM_UP_ROUNDS + num_runs)
    times, records = all_times[WARM_UP_ROUNDS:], all_records[WARM_UP_ROUNDS:]
    num_tokens = sum(len(record.tokens) for record in records)
    draft_us = median(timer.step(DRAFT_STEP, step, num_runs))
    row: dict[str, Any] = {
        "context": context,
        "rule": settings.rule,
        "policy": type(settings.policy).__name__,
        "accept_profile": list(settings.forced),
        "rounds": num_runs,
        "median_us": median(times),
        "mean_us": mean(times),
        "tokens_per_round": num_tokens / num_runs,
        "tokens_per_s": 1e6 * num_tokens / sum(times),
        "draft_us": draft_us,
        "widths": _by_width(timer, config, step, times, records, num_runs),
    }
    console.say(
        f"context {context:,}: {row['tokens_per_s']:.1f} tokens/s, {row['tokens_per_round']:.2f} "
        f"a round of {row['mean_us']:.1f} us; the draft step alone takes {draft_us:.1f} us"
    )
    columns = ("drafts", "rounds", "accepted", "median us", "verify us", "outside us")
    console.say("".join(f"{name:>12}" for name in columns))
    for kind in row["widths"]:
        name = "none drafted" if kind["is_plain"] else str(kind["drafts"])
        figures = (kind["median_us"], kind["verify_us"], kind["outside_us"])
        console.say(
            f"{name:>12}{kind['rounds']:>12}{kind['accepted']:>12.2f}"
            + "".join(f"{figure:>12.1f}" for figure in figures)
        )
    return row


def _by_width(
    timer: Timer,
    config: EngineConfig,
    step: StepInput,
    times: Sequence[float],
    records: Sequence[RoundRecord],
    num_runs: int,
) -> list[dict[str, Any]]:
    """Rounds of one width together, beside the step that verifies so many drafts."""
    rows = []
    for is_plain, drafts in sorted({_kind(record) for record in records}, reverse=True):
        pairs = zip(times, records, strict=True)
        own = [(us, record) for us, record in pairs if _kind(record) == (is_plain, drafts)]
        verify = min(
            (one for one in config.steps if one.num_rows == one.num_tokens > drafts),
            key=lambda one: one.num_tokens,
        )
        tokens = [(17 + 31 * row) % config.model.vocab_size for row in range(1 + drafts)]
        given = StepInput(tokens, step.position, step.slot, step.pages, step.sampling)
        verify_us = median(timer.step(verify.name, given, num_runs))
        round_us = median(us for us, _ in own)
        rows.append(
            {
                "is_plain": is_plain,
                "drafts": drafts,
                "rounds": len(own),
                "accepted": mean(len(record.tokens) - 1 for _, record in own),
                "median_us": round_us,
                "verify_us": verify_us,
                "outside_us": round_us - verify_us,
            }
        )
    return rows


def _kind(record: RoundRecord) -> tuple[bool, int]:
    """Whether nothing was drafted, and how many drafts were verified."""
    return record.proposed == 0, record.drafted
