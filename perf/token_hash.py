"""Proof that width does not matter: greedy tokens step by step, then the same in steps of eight.

    python perf/token_hash.py ENGINE [--tokens 2000] [--width 8]

The first pass decodes greedily from one token, in steps of one, and hashes every row of logits. The
second feeds the same tokens in verify steps. Every row must have the same bits, so the sha256 over
all rows, and over all drawn tokens, must be equal. For engines of any target, real or dummy, e.g.

    python -m inkrt.engines.tiny CHECKPOINT --model flint-wide
    ink-build CHECKPOINT -o ENGINE --target sm_90a
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling, StepOutput
from inkrt.runtime.session import Session

FIRST_TOKEN = 7


@dataclass(frozen=True, slots=True)
class Trace:
    """What one pass has given.

    Attributes:
        tokens: drawn after each position.
        rows: sha256 of each position's float32 logits.
        num_values: different values among the last row's logits, to show that they say something.
        seconds: of the pass.
    """

    tokens: list[int]
    rows: list[bytes]
    num_values: int
    seconds: float

    @property
    def digest(self) -> str:
        """One sha256 for all rows and tokens."""
        whole = hashlib.sha256(b"".join(self.rows))
        whole.update(" ".join(map(str, self.tokens)).encode())
        return whole.hexdigest()


def main() -> int:
    """Compare both passes; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=2000, help="positions")
    parser.add_argument("--width", type=int, default=8, help="tokens of a verify step")
    options = parser.parse_args()
    with Engine.open(options.engine) as engine:
        with engine.session() as session:
            single = trace(decoded(session, options.tokens))
        fed = [FIRST_TOKEN, *single.tokens[:-1]]
        with engine.session() as session:
            wide = trace(verified(session, fed, options.width))
    num_different = len(set(single.tokens))
    say(
        f"{len(single.tokens)} positions, {num_different} different tokens, "
        f"{single.num_values} different logits in the last row"
    )
    for name, result in (("T=1", single), (f"T={options.width}", wide)):
        say(f"{name:<4} {result.digest}  {result.seconds:.1f} s")
    different = first_difference(single, wide)
    if different is not None:
        say(f"UNEQUAL from position {different}")
        return 1
    say("equal: every row of logits and every token")
    return 0


def decoded(session: Session, num_tokens: int) -> Iterator[StepOutput]:
    """Greedy decode steps."""
    token = FIRST_TOKEN
    for _ in range(num_tokens):
        output = session.step([token], Sampling())
        token = int(output.tokens[0])
        yield output


def verified(session: Session, tokens: list[int], width: int) -> Iterator[StepOutput]:
    """Steps of `width` tokens; the last may be narrower."""
    for start in range(0, len(tokens), width):
        yield session.step(tokens[start : start + width], Sampling())


def trace(outputs: Iterator[StepOutput]) -> Trace:
    """Hash the rows while the next steps run."""
    tokens: list[int] = []
    hashes = []
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        for output in outputs:
            tokens += output.tokens.tolist()
            hashes += [
                pool.submit(lambda row: hashlib.sha256(row).digest(), row) for row in output.logits
            ]
            last = output.logits[-1]
        num_values = len(set(last.tolist()))
    rows = [each.result() for each in hashes]
    return Trace(tokens, rows, num_values, time.monotonic() - started)


def first_difference(a: Trace, b: Trace) -> int | None:
    """First position whose logits or token differ; None if none does."""
    pairs = zip(a.rows, b.rows, a.tokens, b.tokens, strict=True)
    for position, (row_a, row_b, token_a, token_b) in enumerate(pairs):
        if row_a != row_b or token_a != token_b:
            return position
    return None


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
