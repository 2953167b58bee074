"""A soak: random requests for minutes, whose output must never change, with no leak and no hang.

    ink-build engines/nano/checkpoint -o ENGINE --target sm_90a --tp-size 2 --max-seq-len 2048 \
        --max-batch-size 3
    python perf/inkling2_soak.py ENGINE --commit HASH -o perf/results/soak-h200.json [--seconds 480]

A few hundred requests with random prompts, lengths, samplings, stops and seeds are asked again and
again, each time in a random manner: alone, two sessions in turns, in forks of one session, given up
in the middle, or fed back in steps of random widths with rollbacks; plainly or with whatever drafts
the engine can make. What a request gave first it must give every time. If an action takes longer
than --limit seconds, tracebacks of all threads are printed and the process ends with status 1.
Free memory of every GPU and the process's resident memory are taken once every request has been
asked, and at the end. Status 1 at a difference or a leak. For engines of any target and number of
ranks, with three sessions.
"""

import argparse
import datetime
import faulthandler
import gc
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.generation import Generation, check_request
from inkrt.runtime.output import CompletionOutput
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.round import Speculator

MIB = 2**20
# What may be missing at the end: a GPU's allocator works in steps of 2 MiB, and a heap of Python's
# never gives all back.
MOST_GPU_BYTES, MOST_HOST_BYTES = 16 * MIB, 96 * MIB
MOST_BACK = 5  # positions that are rolled back, of the 13 that engines keep state for
EDGES = (1, 2, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, again and again."""

    number: int
    tokens: list[int]
    params: SamplingParams

    @property
    def is_plain(self) -> bool:
        """Whether steps draw its tokens as they are: they can be fed back in any width."""
        return not self.params.stop and self.params.repetition_penalty == 1.0


@dataclass(slots=True)
class Memory:
    """Bytes: resident in the host's memory, and free on every GPU."""

    resident: int
    free: list[int]


class Difference(Exception):  # noqa: N818 (what is found, not what went wrong)
    """A request gave something else than before."""


@dataclass(slots=True)
class Soak:
    """Asks requests of an engine, and remembers what they gave.

    Attributes:
        engine: with at least three sessions.
        requests: to choose from.
        generator: chooses.
        given: output of the requests that have been asked to their end.
        actions: how often each was done.
        num_tokens: that were given and compared.
    """

    engine: Engine
    requests: list[Request]
    generator: random.Random
    given: dict[int, CompletionOutput] = field(default_factory=dict)
    actions: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0

    def act(self) -> None:
        """One action of a random kind.

        Raises:
            Difference: a request gave something else than before.
        """
        kinds = (self.alone, self.in_turns, self.in_forks, self.given_up, self.in_widths)
        kind = self.generator.choice(kinds)
        self.actions[kind.__name__] += 1
        kind()

    def alone(self) -> None:
        """One request from beginning to end."""
        request = self._choose()
        self._finish([(request, self._start(request))])

    def in_turns(self) -> None:
        """Two or three, a step of each in turn."""
        chosen = [self._choose() for _ in range(self.generator.choice((2, 2, 3)))]
        self._finish([(request, self._start(request)) for request in chosen])

    def in_forks(self) -> None:
        """Twice in forks of a session that has read the whole pieces of the prompt."""
        request = self._choose()
        with self.engine.session() as base:
            piece = base.widest_step
            whole = (len(request.tokens) - 1) // piece * piece
            if whole:
                base.prefill(request.tokens[:whole], Sampling(), wants_logits=False)
            self._finish([(request, self._start(request, base.fork())) for _ in range(2)])

    def given_up(self) -> None:
        """Closed after a few steps, whose output is the beginning of the request's."""
        request = self._choose()
        generation = self._start(request)
        tokens: list[int] = []
        for _ in range(self.generator.randint(0, 8)):
            if generation.state == "finished":
                break
            tokens += generation.advance().token_ids
        generation.close()
        if request.number in self.given:
            expected = self.given[request.number].token_ids[: len(tokens)]
            self._require(request, "given up", tuple(tokens), expected)

    def in_widths(self) -> None:
        """Its tokens fed back in steps of random widths, some of which are taken back."""
        request = self._choose()
        if not request.is_plain or request.number not in self.given:
            self.actions["in_widths"] -= 1
            return self.alone()
        params, tokens = request.params, self.given[request.number].token_ids
        sampling = Sampling(
            params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0
        )
        with self.engine.session() as session:
            drawn = [int(session.prefill(request.tokens, sampling).tokens[-1])]
            begin = session.length
            while (done := session.length - begin) < len(tokens) - 1:
                width = min(self.generator.randint(1, 8), len(tokens) - 1 - done)
                output = session.step(tokens[done : done + width], sampling, wants_logits=False)
                drawn[done + 1 :] = output.tokens.tolist()
                if self.generator.random() < 0.2:
                    back = min(self.generator.randint(1, MOST_BACK), width)
                    session.rollback(session.length - back)
        self._require(request, "in widths", tuple(drawn), tokens)
        return None

    def memory(self) -> Memory:
        """What is in use now."""
        gc.collect()
        status = Path("/proc/self/status").read_text(encoding="ascii")
        (resident,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        executor, free = self.engine.executor, []
        if isinstance(executor, CudaExecutor):
            free = executor.on_ranks(lambda one: int(one.check(one.driver.cuMemGetInfo())[0]))
        return Memory(1024 * int(resident.split()[1]), free)

    def _choose(self) -> Request:
        """Any request; those that have not been asked yet come first."""
        if len(self.given) < len(self.requests):
            return next(x for x in self.requests if x.number not in self.given)
        return self.generator.choice(self.requests)

    def _start(self, request: Request, session: Session | None = None) -> Generation:
        tokenizer = self.engine.tokenizer if request.params.stop else None
        check_request(
            request.tokens, request.params, self.engine.config, has_tokenizer=bool(tokenizer)
        )
        return Generation(
            session or self.engine.session(), request.tokens, request.params, tokenizer,
            self._speculator(),
        )  # fmt: skip

    def _speculator(self) -> Speculator | None:
        """None, or of one of the engine's drafters."""
        ways = [SpeculativeConfig("none"), SpeculativeConfig("ngram", width="fixed")]
        if (draft := self.engine.config.draft) is not None:
            ways.append(SpeculativeConfig(draft.method, width="fixed"))
            if draft.has_confidence:
                ways.append(SpeculativeConfig(draft.method, width="confidence"))
        way = self.generator.choice(ways)
        speculation = way.resolve(self.engine.folder, self.engine.config)
        self.actions[f"by {way.method}"] += 1
        return None if speculation is None else speculation.speculator()

    def _finish(self, running: list[tuple[Request, Generation]]) -> None:
        deltas: list[list[Any]] = [[] for _ in running]
        try:
            while any(generation.state != "finished" for _, generation in running):
                for own, (_, generation) in zip(deltas, running, strict=True):
                    if generation.state != "finished":
                        own.append(generation.advance())
        finally:
            for _, generation in running:
                generation.close()
        for own, (request, _) in zip(deltas, running, strict=True):
            output = CompletionOutput.join(own)
            self._require(request, "done", output, self.given.setdefault(request.number, output))
            self.num_tokens += len(output.token_ids)

    def _require(self, request: Request, manner: str, got: object, expected: object) -> None:
        if got != expected:
            raise Difference(
                f"request {request.number} ({len(request.tokens)} tokens, {request.params}), "
                f"{manner}: {got}, but {expected} before"
            )


def make_requests(engine: Engine, count: int, longest: int, most: int, seed: int) -> list[Request]:
    """Random requests: `count` of them, of up to `longest` tokens, for up to `most` more."""
    config, generator = engine.config, random.Random(seed)
    vocabulary = config.model.vocab_size
    longest = min(longest, config.max_seq_len - most - 8)
    edges = [edge for edge in EDGES if edge <= longest]
    requests = []
    for number in range(count):
        length = generator.choice(edges) if number % 2 else generator.randint(1, longest)
        tokens = [generator.randrange(vocabulary) for _ in range(length)]
        if number % 3 == 0:  # something for n-grams to find again
            tokens = [tokens[place % 11 % length] for place in range(length)]
        params: dict[str, Any] = {
            "temperature": generator.choice((0.0, 0.0, 0.7, 1.0)),
            "top_k": generator.choice((0, 0, 5, 40)),
            "top_p": generator.choice((1.0, 1.0, 0.9)),
            "min_p": generator.choice((0.0, 0.0, 0.02)),
            "seed": generator.randrange(2**40),
            "max_tokens": generator.randint(1, most),
            "ignore_eos": generator.random() < 0.7,
        }
        if generator.random() < 0.3:
            params["stop_token_ids"] = generator.sample(range(vocabulary), 40)
        if number % 7 == 3:
            params["repetition_penalty"] = 1.3
        if number % 5 == 2 and engine.tokenizer is not None:
            params["stop"] = ["\n", "the", " a"]
        requests.append(Request(number, tokens, SamplingParams(**params)))
    return requests


def run(soak: Soak, seconds: float, limit: float) -> tuple[Memory, Memory, float]:
    """Act for `seconds`, at least until every request has been asked twice over.

    Returns:
        Memory once all have been asked, and at the end; seconds that it took.

    Raises:
        Difference: see `Soak.act`.
    """
    started = told = time.monotonic()
    before: Memory | None = None
    num_acts = 0
    try:
        while before is None or time.monotonic() - started < seconds:
            faulthandler.dump_traceback_later(limit, exit=True)
            soak.act()
            num_acts += 1
            if before is None and len(soak.given) == len(soak.requests):
                if num_acts < 2 * len(soak.requests):
                    continue
                before = soak.memory()
            if time.monotonic() - told > 30:
                told = time.monotonic()
                say(f"{told - started:5.0f} s: {num_acts} actions, {soak.num_tokens} tokens equal")
    finally:
        faulthandler.cancel_dump_traceback_later()
    return before, soak.memory(), time.monotonic() - started


def leaks(before: Memory, after: Memory) -> list[str]:
    """What is missing at the end, in words."""
    grown = after.resident - before.resident
    found = [f"resident memory grew by {grown / MIB:.0f} MiB"] if grown > MOST_HOST_BYTES else []
    for rank, (first, last) in enumerate(zip(before.free, after.free, strict=True)):
        if first - last > MOST_GPU_BYTES:
            found.append(f"the GPU of rank {rank} has {(first - last) / MIB:.0f} MiB less free")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run, tell and write the result; 1 at a difference or a leak."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("engine", type=Path, help="with at least three sessions")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--limit", type=float, default=60, help="most seconds of one action")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1200, help="tokens of a prompt")
    parser.add_argument("--most-tokens", type=int, default=48, help="generated by a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args(arguments)
    with Engine.open(options.engine) as engine:
        requests = make_requests(
            engine, options.requests, options.longest, options.most_tokens, options.seed
        )
        soak = Soak(engine, requests, random.Random(options.seed + 1))
        difference, found = "", []
        before = after = Memory(0, [])
        seconds = 0.0
        try:
            before, after, seconds = run(soak, options.seconds, options.limit)
            found = leaks(before, after)
        except Difference as error:
            difference = str(error)
        say("\n".join(filter(None, [difference, *found])) or "no difference, no leak, no hang")
        result = {
            "workload": f"soak of {options.requests} requests, {engine.config.tp_size} ranks",
            "value": int(bool(difference)) + len(found),
            "unit": "differences and leaks",
            "seconds": round(seconds, 1),
            "tokens": soak.num_tokens,
            "actions": dict(sorted(soak.actions.items())),
            "resident_bytes": [before.resident, after.resident],
            "free_gpu_bytes": [before.free, after.free],
            "command": f"python perf/inkling2_soak.py ENGINE --seconds {options.seconds:g}",
            "commit": options.commit,
            "checkpoint": engine.config.checkpoint_fingerprint,
            "device": getattr(engine.executor, "device_name", "CPU"),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
    say(json.dumps(result["actions"]))
    if options.out is not None:
        options.out.write_text(json.dumps([result], indent=1) + "\n", encoding="utf-8")
    return int(result["value"] > 0)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
