"""Rounds of the host for those of the device to be compared with: a session that knows no model, a
drafter that is told what to say, and policies that know what rounds cost."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from round_device import Proposed

from inkrt.errors import CapacityError
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.round_state import RoundStatus
from inkrt.runtime.spec.drafter import Proposal
from inkrt.runtime.spec.round import Round
from inkrt.runtime.spec.width import (
    ConfidenceThreshold,
    CostAware,
    FixedWidth,
    RoundCosts,
    WidthPolicy,
)

VOCAB = 500
THRESHOLD = 0.5625  # a float32 can be it
CONTEXTS = (100, 1000, 5000)
COSTS = [
    RoundCosts(1.0, [1.21, 1.3, 1.43, 1.61, 1.7, 1.93, 2.0, 2.2]),
    RoundCosts(1.1, [1.3, 1.9, 2.43, 2.61, 3.3, 3.93, 4.1, 4.7]),
    RoundCosts(1.3, [1.7, 1.75, 1.8, 1.83, 1.91, 1.93, 2.1, 2.15]),
]


def costs_at(context: int, most: int) -> RoundCosts:
    place = min(sum(known < context for known in CONTEXTS), len(CONTEXTS) - 1)
    return RoundCosts(COSTS[place].plain, COSTS[place].rounds[: most + 1])


def make_policy(name: str, most: int) -> WidthPolicy:
    if name == "fixed":
        return FixedWidth()
    if name == "threshold":
        return ConfidenceThreshold(THRESHOLD)
    return CostAware(lambda context: costs_at(context, most), explore_every=9, num_first=2)


class HostSession:
    """What `Speculator` needs of a session.

    Args:
        length: of the timeline.
        step: what a row step draws behind the tokens that it reads.
    """

    config = SimpleNamespace(model=SimpleNamespace(vocab_size=VOCAB))

    def __init__(self, length: int, end: int, step: Callable[[list[int]], Sequence[int]]) -> None:
        self.length, self.end, self._step = length, end, step
        self.num_read = 0

    def num_writable(self, num_tokens: int) -> int:
        return max(min(num_tokens, self.end - self.length), 0)

    def decode(self, token: int, sampling: Sampling, **options: int) -> int:  # noqa: ARG002
        return int(self.step([token], sampling).tokens[0])

    def step(self, tokens: Sequence[int], sampling: Sampling, **options: bool) -> Any:  # noqa: ARG002
        if self.length + len(tokens) > self.end:
            raise CapacityError("full")
        self.length += len(tokens)
        self.num_read = len(tokens)
        drawn = np.asarray(self._step(list(tokens)), np.int32)
        return SimpleNamespace(tokens=drawn, logits=np.zeros((len(tokens), 1), np.float32))

    def rollback(self, length: int) -> None:
        self.length = length


class Told:
    """A drafter that proposes what it is told."""

    def __init__(self, draft: Callable[[], Proposed]) -> None:
        self._draft = draft

    def draft(self, *arguments: Any, coupled: bool) -> Proposal:  # noqa: ARG002
        tokens, confidences = self._draft()
        if confidences is not None:  # a drafter gives float32
            confidences = np.asarray(confidences, np.float32).tolist()
        return Proposal(tokens, None, confidences)


class LongTimeline:
    """Stands for a timeline of which only the last token is read."""

    def __init__(self, length: int, last: int) -> None:
        self._length, self._last = length, last

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int | slice) -> Any:
        assert place in (-1, slice(-1, None, None))
        return self._last if place == -1 else [self._last]


def require_same(record: Any, expected: Round, start: int) -> None:
    assert record["status"] == RoundStatus.OK
    count = record["num_tokens"]
    assert record["tokens"][:count].tolist() == expected.tokens
    assert (record["tokens"][count:] == 0).all()
    assert (record["drafted"], record["proposed"]) == (expected.drafted, expected.proposed)
    assert record["accepted"] == len(expected.tokens) - 1
    assert record["position"] == start + len(expected.tokens)
