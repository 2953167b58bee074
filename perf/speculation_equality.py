"""Proof that speculation changes no token: prompts answered plainly and by coupled rounds.

    ink-build CHECKPOINT -o ENGINE --max-batch-size 3
    python perf/speculation_equality.py ENGINE DATA/heldout.npz DATA/tasks.json --commit HASH \
        -o perf/results/FILE.json [--count 500] [--jobs 2]
    python perf/acceptance_compare.py perf/results/FILE.json perf/results/OTHER.json

Three fifths of the prompts are held-out texts, cut at the places where something ends in the engine
(rings, windows, pages, pieces of prefill) and between them, up to 2,000 tokens; the others are chat
tasks of every kind. Each is answered at temperature 0 and 1, without speculation and with it, in
one process with one thread, or by an engine on a GPU, which is opened once (`--jobs 1`). Drafts
come from the engine's drafter with all widths fixed, from the drafter with widths by confidence, or
from n-grams, in turns. Cuts of one text share the steps that read its whole pieces, by
`Session.fork`; what follows them is what a new session would do.

Tokens and the reason to end must be equal, and the acceptance length that is counted from the
tokens of each verify step must be the reported one. The first difference ends the run with status 1
and is told with both tokens and what the logits say there. What is done is kept beside the result
(.jsonl) until all is done, so that the command can be repeated after it was stopped.
"""

import argparse
import datetime
import json
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from acceptance_compare import ratio_with_error

from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_config
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.generation import Generation, check_request
from inkrt.runtime.output import CompletionOutput
from inkrt.runtime.sampling import draw
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig

MAX_LENGTH = 2000
TEXT_TOKENS, CHAT_TOKENS = 12, 32  # generated at most; chats mostly end before
# Ends of convolution rings (16), window and pages (64), of the window and a block, of attention
# rings (80), of relative distances (128), where attention begins to scale (512), and far pages.
EDGES = (
    1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 56, 57, 58, 62, 63, 64, 65, 66, 71, 72, 73, 79, 80,
    81, 127, 128, 129, 191, 192, 193, 511, 512, 513, 1023, 1024, 1025, 1983, 1984, 1985, 1999, 2000,
)  # fmt: skip
CUTS = 20  # of one text, half of them at edges
BUCKETS = (16, 64, 128, 256, 512, 1024, 2000)
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
    drafted: int
    accepted: int
    acceptance_length: float
    difference: str = ""


def main() -> int:
    """Compare all prompts, print a table, write the figures; 1 at a difference."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("engine", type=Path, help="of any target, with three sessions")
    parser.add_argument("prompts", type=Path, nargs="+", help="heldout.npz, tasks.json")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=1, help="processes; each has whole prompts")
    options = parser.parse_args()
    groups = list(grouped(choose(options.prompts, options.count)))
    kept = options.out.with_suffix(".jsonl")
    rows = [Row(**json.loads(line)) for line in kept.open()] if kept.exists() else []
    done = {row.number for row in rows}
    started = time.monotonic()
    waiting = [group for group in groups if not done >= {prompt.number for prompt in group}]
    for new in compare_groups(options.engine, waiting, options.jobs):
        if different := [row.difference for row in new if row.difference]:
            say("\n".join(different))
            return 1
        rows += new
        with kept.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in new)
        say(f"{time.monotonic() - started:6.0f} s: {len(rows) // 2} of {options.count} prompts")
    rows.sort(key=lambda row: (row.number, row.temperature))
    assert len(rows) == 2 * options.count, f"{kept} is of another choice of prompts; remove it"
    write(options, rows)
    kept.unlink()
    return 0


def choose(paths: Sequence[Path], count: int) -> list[Prompt]:
    """The same prompts every time, those of one text next to each other."""
    chosen: list[tuple[str, list[int]]] = []
    for path in paths:
        if path.suffix == ".npz":
            chosen += text_cuts(path, count - count * 2 // 5)
        else:
            chosen += chat_tasks(path, count * 2 // 5)
    assert len(chosen) == count, f"{len(chosen)} prompts; give one .npz and one .json"
    return [Prompt(number, kind, tokens) for number, (kind, tokens) in enumerate(chosen)]


def text_cuts(path: Path, count: int) -> list[tuple[str, list[int]]]:
    """Beginnings of held-out texts, rising in length within each."""
    with np.load(path) as arrays:
        tokens, starts = arrays["tokens"], arrays["starts"]
        is_text = arrays["is_chat"] == 0
    texts = [
        tokens[begin : begin + MAX_LENGTH].tolist()
        for begin, end, wanted in zip(starts, [*starts[1:], len(tokens)], is_text, strict=True)
        if wanted and end - begin >= MAX_LENGTH
    ]
    generator, cuts = random.Random(20), []
    num_texts = -(-count // CUTS)
    for place in range(num_texts):
        text = texts[place * len(texts) // num_texts]
        half = CUTS // 2
        lengths = {EDGES[(place * half + i) % len(EDGES)] for i in range(half)}
        while len(lengths) < CUTS:
            lengths.add(generator.randint(1, MAX_LENGTH))
        cuts += [("text", text[:length]) for length in sorted(lengths)]
    return cuts[:count]


def chat_tasks(path: Path, count: int) -> list[tuple[str, list[int]]]:
    """As many tasks of each kind."""
    kinds: dict[str, list[list[int]]] = defaultdict(list)
    for task in json.loads(path.read_text(encoding="utf-8")):
        if len(task["prompt"]) <= MAX_LENGTH:
            kinds[task["kind"]].append(task["prompt"])
    chosen = []
    for place, (kind, prompts) in enumerate(kinds.items()):
        share = count * (place + 1) // len(kinds) - count * place // len(kinds)
        chosen += [(kind, prompts[i * len(prompts) // share]) for i in range(share)]
    return chosen


def grouped(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """CUTS prompts each; for texts those of one text."""
    for start in range(0, len(prompts), CUTS):
        yield list(prompts[start : start + CUTS])


def compare_groups(
    folder: Path, groups: Sequence[Sequence[Prompt]], jobs: int
) -> Iterator[list[Row]]:
    """Rows of every group: of one engine in turn, or of an engine for each of several processes."""
    if jobs > 1:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            futures = [pool.submit(compare_in_process, folder, group) for group in groups]
            try:
                yield from (future.result() for future in as_completed(futures))
            finally:
                pool.shutdown(cancel_futures=True)
        return
    if read_config(folder).target == "cpu":
        import torch

        torch.set_num_threads(1)
    with Engine.open(folder) as engine:
        for group in groups:
            yield compare_group(engine, group)


def compare_in_process(folder: Path, prompts: Sequence[Prompt]) -> list[Row]:
    """Rows of prompts by an engine of their own."""
    (rows,) = compare_groups(folder, [prompts], 1)
    return rows


def compare_group(engine: Engine, prompts: Sequence[Prompt]) -> list[Row]:
    """Rows of prompts; after a difference there are no more."""
    rows: list[Row] = []
    with engine.session() as base:
        for prompt in prompts:
            tokens = prompt.tokens
            if base.tokens != tokens[: base.length] or base.length >= len(tokens):
                base.rollback(0)
            piece = base.widest_step
            whole = (len(tokens) - 1) // piece * piece
            if whole > base.length:
                base.prefill(tokens[base.length : whole], Sampling(), wants_logits=False)
            for temperature in (0.0, 1.0):
                rows.append(compare(engine, base, prompt, temperature))
                if rows[-1].difference:
                    return rows
    return rows


class Counted:
    """A session that counts its verify steps."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rounds = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step(self, tokens: Sequence[int], *given: Any, **options: Any) -> Any:
        """See `Session.step`."""
        self.rounds += len(tokens) > 1
        return self._session.step(tokens, *given, **options)


def compare(engine: Engine, base: Session, prompt: Prompt, temperature: float) -> Row:
    """Answer a prompt, whose first pieces `base` holds, plainly and with speculation."""
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
    session: Any = Counted(base.fork())
    generation = Generation(session, tokens, params, None, speculation.speculator())
    deltas, emitted = [], 0
    while generation.state != "finished":
        before = session.rounds
        deltas.append(generation.advance())
        emitted += len(deltas[-1].token_ids) * (session.rounds - before)
    output, stats = CompletionOutput.join(deltas), generation.stats
    difference = ""
    counted = emitted / session.rounds if session.rounds else 0.0
    if output != plain:
        sampling = Sampling(temperature=temperature, seed=prompt.number)
        difference = explain(base, prompt, sampling, plain, output)
    elif (counted, session.rounds) != (stats.acceptance_length, stats.rounds):
        difference = (
            f"prompt {prompt.number}: {counted} tokens in each of {session.rounds} verify steps, "
            f"but {stats} is reported"
        )
    return Row(
        prompt.number, prompt.kind, len(tokens), prompt.way, temperature,
        len(plain.token_ids) - 1, stats.rounds, stats.plain_steps, stats.drafted, stats.accepted,
        counted, difference,
    )  # fmt: skip


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
    name = f"prompt {prompt.number} ({prompt.kind}, {prompt.way}, T={sampling.temperature:g})"
    if place is None:
        return f"{name}: {plain} and {output}"
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
        f"{name}: position {position} has token {ours} by plain decoding, {theirs} with "
        f"speculation; the first one's logit is higher by {gap:.6g}; steps of 1 and of 8 draw "
        f"{drawn} and differ in logits by up to {change:.3g}"
    )


def write(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """The table, on the terminal and in the result."""
    table = []
    names = ("tokens", "rounds", "drafted", "accepted", "plain_steps")
    say(f"{'prompt tokens':<16}{'prompts':>12}" + "".join(f"{name:>12}" for name in names))
    lows = [1, *(high + 1 for high in BUCKETS[:-1])]
    for low, high in zip(lows, BUCKETS, strict=True):
        inside = [row for row in rows if low <= row.length <= high]
        sums = {name: sum(getattr(row, name) for row in inside) for name in names}
        table.append({"from": low, "to": high, "prompts": len(inside) // 2, **sums})
        counts = [len(inside) // 2, *sums.values()]
        say(f"{f'{low}..{high}':<16}" + "".join(f"{count:>12}" for count in counts))
    ways = {
        f"{way}, {'text' if is_text else 'chat'}, T={temperature:g}": [
            row
            for row in rows
            if (row.way, row.kind == "text", row.temperature) == (way, is_text, temperature)
        ]
        for way in WAYS
        for is_text in (True, False)
        for temperature in (0.0, 1.0)
    }
    lengths = {name: mean_length(chosen) for name, chosen in ways.items()}
    for name, (length, error) in lengths.items():
        say(f"{name}: {length:.2f} tokens a round, standard error {error:.3f}")
    say(f"equal: {sum(row.tokens for row in rows)} tokens behind {options.count} prompts")
    result = {
        "workload": f"{options.count} prompts of up to {MAX_LENGTH} tokens, coupled and plain",
        "value": sum(1 for row in rows if row.difference),
        "unit": "differences",
        "tokens": sum(row.tokens for row in rows),
        "by_length": table,
        "acceptance_length": {name: round(length, 3) for name, (length, _) in lengths.items()},
        "acceptance_error": {name: round(error, 4) for name, (_, error) in lengths.items()},
        "drafted": {name: sum(row.drafted for row in chosen) for name, chosen in ways.items()},
        "accepted": {name: sum(row.accepted for row in chosen) for name, chosen in ways.items()},
        "command": "python perf/speculation_equality.py ENGINE DATA/heldout.npz DATA/tasks.json "
        f"--count {options.count} --jobs {options.jobs}",
        "commit": options.commit,
        "checkpoint": read_config(options.engine).checkpoint_fingerprint,
        "device": device_name(options.engine),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    options.out.write_text(json.dumps([result], indent=1) + "\n", encoding="utf-8")


def mean_length(rows: Sequence[Row]) -> tuple[float, float]:
    """Tokens of a round, over all rounds, and the standard error, prompts being independent."""
    return ratio_with_error([(row.rounds * row.acceptance_length, row.rounds) for row in rows])


def device_name(folder: Path) -> str:
    """What the engine runs on."""
    if read_config(folder).target == "cpu":
        return cpu_name()
    with Engine.open(folder) as engine:
        assert isinstance(engine.executor, CudaExecutor)
        return engine.executor.device_name


def cpu_name() -> str:
    """What the machine calls its processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
