"""Kernels of a round on the CPU, thread by thread: what the host does, double for double."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from round_checks import (  # noqa: E402
    CONTEXTS,
    VOCAB,
    HostSession,
    Proposed,
    Told,
    costs_at,
    make_policy,
    random_rounds,
    require_same,
)
from round_device import NOTHING, EmulatedRounds  # noqa: E402

from inkrt.errors import CapacityError  # noqa: E402
from inkrt.runtime.executor import Sampling  # noqa: E402
from inkrt.runtime.executor.round_state import MAX_DRAFTS, RING_RECORDS, RoundStatus  # noqa: E402
from inkrt.runtime.spec.round import Round, Speculator  # noqa: E402
from inkrt.runtime.spec.width import CostAware, FixedWidth, WidthPolicy  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("rule", ["coupled", "probabilistic", "forced"])
@pytest.mark.parametrize("policy", ["fixed", "threshold", "cost"])
def test_rounds_are_those_of_the_host(folder: Path, policy: str, rule: str) -> None:
    device = EmulatedRounds(Emulator(folder))
    widths = random_rounds(device, make_policy(policy, MAX_DRAFTS), rule, 300)
    assert min(widths) > 0, widths


# The others take a second each; what they share with the ones above is the code of one kernel.
@pytest.mark.parametrize(
    ("policy", "most", "has_confidences", "reverse"),
    [
        ("cost", 3, True, True),
        ("cost", MAX_DRAFTS, False, False),
        ("cost", 1, True, False),
        ("fixed", 2, False, True),
    ],
)
def test_narrower_blocks_and_drafters_without_confidences(
    folder: Path,
    policy: str,
    most: int,
    has_confidences: bool,
    reverse: bool,
) -> None:
    device = EmulatedRounds(Emulator(folder, reverse=reverse))
    widths = random_rounds(
        device, make_policy(policy, most), "coupled", 200,
        has_confidences=has_confidences, most=most,
    )  # fmt: skip
    assert min(widths) > 0, widths


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.0, 0.04, 0.3])
@pytest.mark.parametrize("most", [4, 7])
def test_costs_decide_as_on_the_host_for_long(folder: Path, most: int, margin: float) -> None:
    policy = make_policy("cost", most)
    assert isinstance(policy, CostAware)
    policy.margin, policy.explore_every = margin, 32
    device = EmulatedRounds(Emulator(folder))
    widths = random_rounds(device, policy, "coupled", 5000, most=most)
    assert min(widths) > 0, widths


# ---- chains of rounds: whole generations, and how they end ----

PROMPT = [3, 1, 4, 1, 5]


def follower(tokens: Sequence[int]) -> int:
    """What the model of these tests says behind `tokens`: its ends are hard to foresee."""
    return (7 * tokens[-1] + 3 * tokens[-2] + len(tokens) % 5) % 97


def propose(tokens: Sequence[int]) -> Proposed:
    """Its drafter, which is wrong now and then, and knows it at times."""
    text, sure = list(tokens), []
    for _ in range(MAX_DRAFTS):
        mood = (31 * len(text) + text[-1]) % 16
        text.append(follower(text) if mood else 98)
        sure.append((mood + 1) / 18)
    return text[len(tokens) :], sure


class Chain:
    """Rounds behind each other on the device, of one request.

    Attributes:
        timeline: prompt and output, with what stands behind the end in the last round.
        records: of all rounds.
    """

    def __init__(
        self, device: EmulatedRounds, policy: WidthPolicy, *, max_tokens: int = 1000,
        end: int = 10_000, stop_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.device = device
        device.set_policy(policy, CONTEXTS, [costs_at(context, MAX_DRAFTS) for context in CONTEXTS])
        state = device.state[0]
        state["most"], state["vocab_size"] = MAX_DRAFTS, VOCAB
        state["num_left"], state["writable_end"] = max_tokens, end
        state["num_stop_ids"] = len(stop_ids)
        state["stop_ids"][: len(stop_ids)] = stop_ids
        device.position[0], device.tokens[0] = len(PROMPT) - 1, PROMPT[-1]
        self.timeline, self.records = list(PROMPT), list[Any]()

    def run(self, *, error: int = 0) -> Any:
        def step(tokens: list[int]) -> list[int]:
            assert tokens[0] == self.timeline[-1]
            before = self.timeline[:-1]
            return [follower([*before, *tokens[: row + 1]]) for row in range(len(tokens))]

        record = self.device.round(lambda: propose(self.timeline), step, error=error)
        if record is not None:
            record = record.copy()
            self.timeline += record["tokens"][: record["num_tokens"]].tolist()
        self.records.append(record)
        return record


def host_rounds(
    policy: WidthPolicy, *, max_tokens: int = 1000, end: int = 10_000, stop_ids: Sequence[int] = ()
) -> tuple[list[Round], list[int]]:
    """Rounds of the host, and what a request makes of them: its output."""
    timeline, rounds = list(PROMPT), list[Round]()
    session: Any = HostSession(
        len(PROMPT) - 1, end,
        lambda tokens: [
            follower([*timeline[:-1], *tokens[: row + 1]]) for row in range(len(tokens))
        ],
    )  # fmt: skip
    drafter: Any = Told(lambda: propose(timeline))
    speculator = Speculator(drafter, policy, MAX_DRAFTS)
    while True:
        left = max_tokens - (len(timeline) - len(PROMPT))
        try:
            done = speculator.run(session, timeline, Sampling(), left)
        except CapacityError:
            return rounds, timeline[len(PROMPT) :]
        rounds.append(done)
        for token in done.tokens:
            timeline.append(token)
            if token in stop_ids or len(timeline) - len(PROMPT) == max_tokens:
                return rounds, timeline[len(PROMPT) :]


@pytest.mark.parametrize("policy", ["fixed", "threshold", "cost"])
@pytest.mark.parametrize("limits", [{"max_tokens": 250}, {"end": 255}], ids=["tokens", "room"])
def test_a_generation_is_that_of_the_host(
    folder: Path, policy: str, limits: dict[str, int]
) -> None:
    rounds, output = host_rounds(make_policy(policy, MAX_DRAFTS), **limits)
    text = list(PROMPT)
    while len(text) < len(PROMPT) + len(output):
        text.append(follower(text))
    assert output == text[len(PROMPT) :], "speculation changes nothing"
    chain = Chain(EmulatedRounds(Emulator(folder)), make_policy(policy, MAX_DRAFTS), **limits)
    start = len(PROMPT) - 1
    for expected in rounds:
        require_same(chain.run(), expected, start)
        start += len(expected.tokens)
    assert chain.timeline == text
    assert len(rounds) > RING_RECORDS / 2
    status = RoundStatus.FULL if "end" in limits else RoundStatus.FINISHED
    require_nothing(chain, status)
    require_nothing(chain, status)


def require_nothing(chain: Chain, status: RoundStatus) -> None:
    """A round that does nothing but to say so."""
    device = chain.device
    before, tokens, position = device.state.copy(), device.tokens.copy(), device.position.copy()
    record = chain.run()
    assert device.handles.tolist() == [0, NOTHING]
    assert (record["status"], record["num_tokens"], record["position"]) == (status, 0, position)
    assert [record[name] for name in ("drafted", "proposed", "accepted")] == [0, 0, 0]
    assert record["policy_state"].tobytes() == before[0]["policy_state"].tobytes()
    before["round"] += 1
    assert device.state.tobytes() == before.tobytes()
    assert (device.tokens.tolist(), device.position) == (tokens.tolist(), position)


def test_a_chain_ends_where_a_stop_id_stands_inside_of_a_block(folder: Path) -> None:
    found = 0
    for stop in range(97):
        # The last id of 64, in the upper half of what a lane holds; those behind do not count.
        stop_ids = [*range(200, 263), stop]
        rounds, output = host_rounds(FixedWidth(), stop_ids=stop_ids, max_tokens=60)
        if output[-1] != stop or rounds[-1].tokens[-1] == stop:
            continue
        found += 1
        chain = Chain(EmulatedRounds(Emulator(folder)), FixedWidth(), stop_ids=stop_ids)
        start = len(PROMPT) - 1
        for expected in rounds:
            assert chain.device.state[0]["finished"] == 0
            require_same(chain.run(), expected, start)
            start += len(expected.tokens)
        assert chain.timeline[len(PROMPT) :][: len(output)] == output
        assert len(chain.timeline) > len(PROMPT) + len(output), "the host cuts"
        require_nothing(chain, RoundStatus.FINISHED)
        if found == 3:
            return
    pytest.fail("no such stop id")


def test_a_chain_goes_on_when_there_is_room_again(folder: Path) -> None:
    chain = Chain(EmulatedRounds(Emulator(folder)), FixedWidth(), end=len(PROMPT) - 1 + 2)
    assert chain.run()["drafted"] == 1
    while chain.run()["status"] == RoundStatus.OK:
        pass
    assert chain.records[-1]["status"] == RoundStatus.FULL
    chain.device.state["writable_end"] = 100
    assert chain.run()["drafted"] == MAX_DRAFTS
    while len(chain.timeline) < 60:
        chain.run()
    text = list(PROMPT)
    while len(text) < len(chain.timeline):
        text.append(follower(text))
    assert chain.timeline == text


def test_records_go_round_in_the_ring(folder: Path) -> None:
    device = EmulatedRounds(Emulator(folder))
    chain = Chain(device, make_policy("cost", MAX_DRAFTS))
    for number in range(2 * RING_RECORDS + 3):
        chain.run()
        if number == 3:
            assert (device.ring[4:].view(np.uint8) == 0xEE).all()
    wanted = [*range(2 * RING_RECORDS + 1, 2 * RING_RECORDS + 4)]
    wanted += range(RING_RECORDS + 4, 2 * RING_RECORDS + 1)
    assert device.ring["sequence"].tolist() == wanted
    assert [record.tobytes() for record in device.ring[:3]] == [
        record.tobytes() for record in chain.records[-3:]
    ]


def test_other_ranks_decide_the_same_and_show_nothing(folder: Path) -> None:
    first = Chain(EmulatedRounds(Emulator(folder)), make_policy("cost", MAX_DRAFTS), max_tokens=50)
    other = Chain(
        EmulatedRounds(Emulator(folder), has_ring=False),
        make_policy("cost", MAX_DRAFTS),
        max_tokens=50,
    )
    while not first.device.state[0]["finished"]:
        other.timeline = list(first.timeline)
        other.run()
        first.run()
        assert first.device.state.tobytes() == other.device.state.tobytes()
        assert first.device.tokens.tolist() == other.device.tokens.tolist()
        assert first.device.position == other.device.position
    first.run()
    assert other.run() is None
    assert (other.device.ring.view(np.uint8) == 0xEE).all()


def test_a_kernel_that_gives_up_ends_the_chain(folder: Path) -> None:
    device = EmulatedRounds(Emulator(folder))
    chain = Chain(device, make_policy("cost", MAX_DRAFTS))
    chain.run()
    position, learned = device.position.copy(), device.state[0]["policy_state"].copy()
    record = chain.run(error=5)
    assert record["status"] == RoundStatus.ERROR
    assert (record["num_tokens"], record["drafted"]) == (0, MAX_DRAFTS)
    assert record["position"] == device.position == position
    assert record["policy_state"]["reached"].tolist() == learned["reached"].tolist()
    assert device.state[0]["finished"] == 1
    require_nothing(chain, RoundStatus.ERROR)
    # Found by the first kernel: of another session, say.
    other = Chain(EmulatedRounds(Emulator(folder)), FixedWidth())
    other.device.error[0] = 1
    assert other.run()["status"] == RoundStatus.ERROR
    assert other.device.state[0]["finished"] == 1
    require_nothing(other, RoundStatus.ERROR)
