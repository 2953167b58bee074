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
from n-grams, in turns. Where the device runs rounds by itself, those are run a third time, by the
host, step by step. Cuts of one text share the steps that read its whole pieces, by `Session.fork`;
what follows them is what a new session would do.

Tokens and the reason to end must be equal. What is counted from the steps that the session is asked
for and the tokens that come of each must be what is reported, the acceptance length above all; of a
round of the device, how many drafts it read is known from its record only, so that all it reports
must be what the host's rounds do. The first difference ends the run with status 1 and is told, of
tokens with both and what the logits say there. What is done is kept beside the result (.jsonl)
until all is done, so that the command can be repeated after it was stopped.
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
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from acceptance_compare import ratio_with_error
from speculation_answers import WAYS, Prompt, Row, compare

from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_config
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.cuda import CudaExecutor

MAX_LENGTH = 2000
# Ends of convolution rings (16), window and pages (64), of the window and a block, of attention
# rings (80), of relative distances (128), where attention begins to scale (512), and far pages.
EDGES = (
    1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 56, 57, 58, 62, 63, 64, 65, 66, 71, 72, 73, 79, 80,
    81, 127, 128, 129, 191, 192, 193, 511, 512, 513, 1023, 1024, 1025, 1983, 1984, 1985, 1999, 2000,
)  # fmt: skip
CUTS = 20  # of one text, half of them at edges
BUCKETS = (16, 64, 128, 256, 512, 1024, 2000)


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


def write(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """The table, on the terminal and in the result."""
    table = []
    names = ("tokens", "rounds", "plain_steps", "on_device", "drafted", "accepted")
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
    by_device = sum(row.on_device for row in rows)
    steps = sum(row.rounds + row.plain_steps for row in rows)
    again = "; the host ran their rounds again, which were the same" if by_device else ""
    say(f"{by_device} of {steps} steps by the device alone{again}")
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
