"""One prompt of `speculation_equality.py`: answered in all ways, and whether they are equal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.round_queue import RoundRecord, RoundSettings
from inkrt.runtime.generation import Generation, check_request
from inkrt.runtime.output import CompletionOutput, Delta
from inkrt.runtime.sampling import draw
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.stats import SpeculationStats

TEXT_TOKENS, CHAT_TOKENS = 12, 32  # generated at most; chats mostly end before
WAYS = {
    "fixed": SpeculativeConfig("dspark", width="fixed"),
    "confidence": SpeculativeConfig("dspark", width="confidence"),
    "ngram": SpeculativeConfig("ngram", width="fixed"),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of the prompts; its number gives the seed and who drafts."""

    number: int
    kind: str
    tokens: list[int]

    @property
    def way(self) -> str:
        """A key of WAYS."""
        return list(WAYS)[self.number % len(WAYS)]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one prompt at one temperature.

    Attributes:
        tokens: that were generated and compared, but for the first, which the prompt's step gives.
        on_device: rounds and plain steps that the device ran by itself.
        drafted: tokens that rounds read as drafts, of which `accepted` became output.
        difference: what differed, in words; "" if nothing did.
    """

    number: int
    kind: str
    length: int
    way: str
    temperature: float
    tokens: int
    rounds: int
    plain_steps: int
    on_device: int
    drafted: int
    accepted: int
    acceptance_length: float
    difference: str = ""


class Counted:
    """A session that notes the steps it is asked for behind the prompt.

    Args:
        session: runs them.
        on_device: whether the device may run rounds by itself; else the host steps them.

    Attributes:
        drafted: drafts that every step read; 0 of a plain one.
        on_device: steps that the device chose and judged.
    """

    def __init__(self, session: Session, *, on_device: bool) -> None:
        self._session, self._may_run_rounds = session, on_device
        self.drafted: list[int] = []
        self.on_device = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step(self, tokens: Sequence[int], *given: Any, **options: Any) -> Any:
        """See `Session.step`."""
        self.drafted.append(len(tokens) - 1)
        return self._session.step(tokens, *given, **options)

    def decode(self, *given: Any, **options: Any) -> int:
        """See `Session.decode`."""
        self.drafted.append(0)
        return self._session.decode(*given, **options)

    def takes_rounds(self, settings: RoundSettings) -> bool:
        """See `Session.takes_rounds`."""
        return self._may_run_rounds and self._session.takes_rounds(settings)

    def round(self, *given: Any, **options: Any) -> RoundRecord:
        """See `Session.round`."""
        record = self._session.round(*given, **options)
        self.drafted.append(record.drafted)
        self.on_device += 1
        return record


@dataclass(frozen=True, slots=True)
class Answer:
    """What speculation made of a prompt.

    Attributes:
        acceptance_length: as counted.
        difference: what was counted otherwise than `stats` has it, in words; "" if nothing was.
    """

    output: CompletionOutput
    stats: SpeculationStats
    acceptance_length: float
    difference: str

    @property
    def rounds_of(self) -> str:
        """Who ran the rounds."""
        return "device" if self.stats.on_device else "host"


def answer(
    session: Session,
    tokens: Sequence[int],
    params: SamplingParams,
    speculator: Speculator,
    *,
    on_device: bool,
) -> Answer:
    """Answer a prompt with speculation; closes the session, which has the prompt's beginning."""
    counted: Any = Counted(session, on_device=on_device)
    generation = Generation(counted, tokens, params, None, speculator)
    deltas: list[Delta] = []
    emitted: list[int] = []  # tokens of every step
    while generation.state != "finished":
        before = len(counted.drafted)
        deltas.append(generation.advance())
        emitted += [len(deltas[-1].token_ids)] * (len(counted.drafted) - before)
    of_rounds = [count for count, read in zip(emitted, counted.drafted, strict=True) if read]
    length = sum(of_rounds) / len(of_rounds) if of_rounds else 0.0
    figures = {
        "acceptance_length": length,
        "rounds": len(of_rounds),
        "plain_steps": len(emitted) - len(of_rounds),
        "drafted": sum(counted.drafted),
        "emitted": sum(emitted),
        "on_device": counted.on_device,
    }
    stats = generation.stats
    differences = [
        f"{name} {count} is counted, {getattr(stats, name)} reported"
        for name, count in figures.items()
        if count != getattr(stats, name)
    ]
    return Answer(CompletionOutput.join(deltas), stats, length, ", ".join(differences))


def compare(engine: Engine, base: Session, prompt: Prompt, temperature: float) -> Row:
    """Answer a prompt, whose first pieces `base` holds, in all ways that there are."""
    params = SamplingParams(
        temperature=temperature,
        seed=prompt.number,
        max_tokens=TEXT_TOKENS if prompt.kind == "text" else CHAT_TOKENS,
        ignore_eos=prompt.kind == "text",
    )
    tokens = check_request(prompt.tokens, params, engine.config, has_tokenizer=False)
    plain = CompletionOutput.join(list(Generation(base.fork(), tokens, params, None)))
    speculation = WAYS[prompt.way].resolve(engine.folder, engine.config)
    assert speculation is not None
    speculator = speculation.speculator
    answers = [answer(base.fork(), tokens, params, speculator(), on_device=True)]
    stats = answers[0].stats
    if stats.on_device:
        answers.append(answer(base.fork(), tokens, params, speculator(), on_device=False))
    return Row(
        prompt.number, prompt.kind, len(tokens), prompt.way, temperature,
        len(plain.token_ids) - 1, stats.rounds, stats.plain_steps, stats.on_device, stats.drafted,
        stats.accepted, answers[0].acceptance_length,
        difference_of(base, prompt, temperature, plain, answers),
    )  # fmt: skip


def difference_of(
    base: Session,
    prompt: Prompt,
    temperature: float,
    plain: CompletionOutput,
    answers: Sequence[Answer],
) -> str:
    """The first thing that differs, in words; "" if nothing does."""
    name = f"prompt {prompt.number} ({prompt.kind}, {prompt.way}, T={temperature:g}"
    for one in answers:
        name_of_one = f"{name}, rounds of the {one.rounds_of})"
        if one.output != plain:
            sampling = Sampling(temperature=temperature, seed=prompt.number)
            return f"{name_of_one}: {explain(base, prompt, sampling, plain, one.output)}"
        if one.difference:
            return f"{name_of_one}: {one.difference}"
    stats, *others = (replace(one.stats, on_device=0) for one in answers)
    for other in others:
        if other != stats:
            return f"{name}): rounds of the device are {stats}, those of the host {other}"
    return ""


def explain(
    base: Session,
    prompt: Prompt,
    sampling: Sampling,
    plain: CompletionOutput,
    output: CompletionOutput,
) -> str:
    """Where outputs part, and whether a row of logits depends on the width of its step there."""
    pairs = zip(plain.token_ids, output.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return f"{plain} and {output}"
    position = len(prompt.tokens) + place
    ours, theirs = plain.token_ids[place], output.token_ids[place]
    rows = []
    for width in (1, 8):
        with base.fork() as session:
            logits = session.prefill(prompt.tokens[session.length :], sampling).logits[-1]
            fed = plain.token_ids[:place]
            for start in range(0, place, width):
                logits = session.step(fed[start : start + width], sampling).logits[-1]
        rows.append(logits)
    drawn = draw(np.stack(rows), sampling, [position] * len(rows)).tolist()
    gap = float(rows[0][ours] - rows[0][theirs])
    change = float(np.abs(rows[0] - rows[1]).max())
    return (
        f"position {position} has token {ours} by plain decoding, {theirs} with "
        f"speculation; the first one's logit is higher by {gap:.6g}; steps of 1 and of 8 draw "
        f"{drawn} and differ in logits by up to {change:.3g}"
    )
