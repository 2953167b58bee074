"""Rounds on GPUs without one: the graph, and several ranks."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_rounds import cost_aware, make_input

from inkrt.errors import DeviceError
from inkrt.runtime.engine_file import DRAFT_STEP
from inkrt.runtime.executor import cuda_rounds
from inkrt.runtime.executor.cuda import ROUND_RULES, CudaExecutor
from inkrt.runtime.executor.cuda_memory import ROUND_REGION
from inkrt.runtime.executor.cuda_rounds import (
    CudaRounds,
    RankRounds,
    encode_state,
    row_plans,
)
from inkrt.runtime.executor.decode_queue import DecodeQueue
from inkrt.runtime.executor.rank_threads import RankThreads
from inkrt.runtime.executor.round_queue import RoundQueue
from inkrt.runtime.executor.round_state import ROUND_STATE
from inkrt.runtime.plan import Plan, TensorSpec
from inkrt.runtime.spec.width import FixedWidth


class FakeBuilder:
    """Writes down what a graph is made of; bodies of conditional nodes in their own lists."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.is_building = False
        self.values: list[int] = []

    def begin_building(self) -> "FakeBuilder":
        self.is_building = True
        return self

    def end_building(self) -> "FakeBuilder":
        self.is_building = False
        return self

    def create_condition(self, default_value: int) -> Any:
        self.values.append(default_value)
        return SimpleNamespace(handle=100 + len(self.values), number=len(self.values))

    def if_then(self, condition: Any) -> "FakeBuilder":
        return self._conditional("if", condition, 1)[0]

    def switch(self, condition: Any, count: int) -> list["FakeBuilder"]:
        return self._conditional("switch", condition, count)

    def _conditional(self, kind: str, condition: Any, count: int) -> list["FakeBuilder"]:
        bodies: list[list[Any]] = [[] for _ in range(count)]
        self.log.append((kind, condition.handle, bodies))
        return [FakeBuilder(body) for body in bodies]

    def complete(self) -> Any:
        return SimpleNamespace(
            log=self.log,
            upload=lambda stream: self.log.append(("upload", stream)),
            launch=lambda stream: self.log.append(("launch", stream)),
        )


def make_plan(name: str, tokens: int, rows: int, confidences: bool = False) -> Plan:
    names = ["tokens", "logits", *(["confidences"] if confidences else [])]
    specs = tuple(
        TensorSpec(one, "int32", (rows,), (1,), "arena", "", 64 * place)
        for place, one in enumerate(names)
    )
    outputs = {one: place for place, one in enumerate(names)}
    return Plan(name, tokens, rows, specs, (), 0, {}, outputs)


PLANS = {
    plan.name: plan
    for plan in (
        make_plan("verify8", 8, 8),
        make_plan("decode", 1, 1),
        make_plan("prefill64", 64, 1),
        make_plan("verify2", 2, 2),
        make_plan(DRAFT_STEP, 1, 3, confidences=True),
    )
}


class FakeRank:
    """What rounds ask of a rank; memory begins at 10,000, inputs at 20,000."""

    def __init__(self, rank: int = 0, plans: dict[str, Plan] = PLANS) -> None:
        self.rank, self.plans, self.stream = rank, plans, "stream"
        self.ratio_tests = {
            name: make_plan(f"ratio_{name}", 1, 1) for name in ("verify2", "verify8")
        }
        self.calls: list[Any] = []
        self.memory = SimpleNamespace(
            base=10_000,
            inputs=20_000,
            error=7,
            input_offsets={"tokens": 0, "position": 32, "num_tokens": 48},
            region=lambda name: SimpleNamespace(offset=500, size=0) if name == ROUND_REGION else 0,
            host_bytes=lambda size: np.zeros(size, np.uint8),
            address=lambda step, spec: f"{step}.{spec.name}",
        )
        self.rounds = RankRounds(self, 400)  # type: ignore[arg-type]
        self.is_idle = False
        self.ring = np.zeros(1, np.uint64)

    def begin_graph(self) -> FakeBuilder:
        return FakeBuilder([]).begin_building()

    def add_plan(self, builder: FakeBuilder, plan: Plan, *, is_first: bool = True) -> None:
        assert builder.is_building
        assert is_first == (not builder.log)
        builder.log.append(("plan", plan.name))

    def add_control(
        self, builder: FakeBuilder, code: str, entry: str, params: Any, **options: Any
    ) -> None:
        assert builder.is_building
        values = [
            value.value if isinstance(value, ctypes._SimpleCData) else value for value in params
        ]
        assert (code, options.pop("threads")) == ("round", 32)
        builder.log.append((entry, *values, options))

    def send_inputs(self, block: Any) -> None:
        self.calls.append(("inputs", block))

    def extend_pages(self, first: int, pages: list[int]) -> None:
        self.calls.append(("pages", first, pages))

    def copy_to_device(self, address: int, staged: Any) -> None:
        self.calls.append(("copy", address, staged.copy()))
        self.staged = staged

    def encode_inputs(self, values: dict[str, Any]) -> Any:
        assert self.rank == 0, "once for all"
        return {name: list(value) for name, value in values.items()}

    def enter(self) -> None:
        pass

    def is_busy(self) -> bool:
        return not self.is_idle

    def require_sound(self) -> None:
        self.calls.append("sound")


def test_the_graph_of_a_round() -> None:
    """All kernels of bodies may start beside their predecessors."""
    rank, options = FakeRank(), dict[str, Any]()
    ring = rank.rounds.ring.ctypes.data
    state, tokens, position, num_tokens = 10_500, 20_000, 20_032, 20_048

    def case(step: str) -> list[Any]:
        commit = ("commit_round", state, f"{step}.tokens", tokens, position, ring, 7, options)
        return [("plan", step), commit]

    choose = (
        "choose_width", state, "draft.tokens", "draft.confidences", 3, tokens, num_tokens, 102,
        options,
    )  # fmt: skip
    assert rank.rounds.graph.log == [
        # Nothing stands in front of it that it could start beside.
        ("begin_round", state, num_tokens, position, ring, 7, 101, 102, {"pdl": False}),
        ("if", 101, [[("plan", DRAFT_STEP), choose]]),
        ("switch", 102, [case("decode"), case("verify2"), case("verify8")]),
        ("upload", "stream"),
    ]
    rank.rounds.launch()
    assert rank.rounds.graph.log[-1] == ("launch", "stream")


def test_the_ratio_test_stands_behind_steps_that_verify() -> None:
    """In a graph of its own, which is made when the first request wants it."""
    rank = FakeRank()
    coupled = rank.rounds.graph
    given = make_input(FixedWidth())
    for rule, is_tested in (
        ("coupled", False), ("probabilistic", True), ("forced", False), ("probabilistic", True)
    ):  # fmt: skip
        chosen = replace(given, settings=replace(given.settings, rule=rule))
        rank.rounds.prepare(has_test=is_tested)
        rank.rounds.begin("block", rank.rounds.encode(chosen))  # type: ignore[arg-type]
        assert (rank.rounds.graph is coupled) == (not is_tested)
        cases = [[entry[:2] for entry in case] for case in rank.rounds.graph.log[2][2]]
        steps = [[name for kind, name, *_ in case if kind == "plan"] for case in cases]
        tests = [["ratio_verify2"], ["ratio_verify8"]] if is_tested else [[], []]
        assert steps == [["decode"], ["verify2", *tests[0]], ["verify8", *tests[1]]]
        assert [case[-1][0] for case in cases] == ["commit_round"] * 3
    graphs = [rank.rounds._graphs[has_test] for has_test in (False, True)]
    assert [graph.log.count(("upload", "stream")) for graph in graphs] == [1, 1]


def test_a_drafter_without_confidences() -> None:
    rank = FakeRank(plans=PLANS | {DRAFT_STEP: make_plan(DRAFT_STEP, 1, 3)})
    ((_, choose),) = rank.rounds.graph.log[1][2]
    assert choose[2:4] == ("draft.tokens", 0)


def test_row_steps_are_those_with_a_row_for_each_token() -> None:
    one_draft = PLANS | {DRAFT_STEP: make_plan(DRAFT_STEP, 1, 1)}
    assert [plan.name for plan in row_plans(one_draft)] == ["decode", "verify2", "verify8"]


def test_bytes_on_their_way_do_not_change() -> None:
    """Each copy of the end has bytes of its own while as many are queued as ever are."""
    rank = FakeRank()
    offset = ROUND_STATE.fields["writable_end"][1]  # type: ignore[index]
    staged = []
    for end in range(40):
        rank.rounds.extend(end, [end] if end % 2 else [], 64 * end)
        assert rank.calls.pop()[:2] == ("copy", 10_500 + offset)
        staged.append(rank.staged)
        assert rank.calls == ([("pages", end, [end])] if end % 2 else [])
        rank.calls.clear()
    assert [int(one[0]) for one in staged] == [64 * end for end in range(40)]


@pytest.fixture(params=[1, 2, 4])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = object.__new__(CudaExecutor)
    made.rank_slice = None
    made.ranks = [FakeRank(rank) for rank in range(request.param)]  # type: ignore[misc]
    made._threads = RankThreads(request.param)
    made._queue = DecodeQueue(made)
    made.rounds = RoundQueue(CudaRounds(made), ROUND_RULES)
    yield made
    made._threads.close()


def leave(rank: FakeRank, number: int, token: int, position: int, status: int = 0) -> None:
    item = rank.rounds.ring[number % 64 : number % 64 + 1]
    item["num_tokens"], item["status"] = int(status == 0), status
    item["position"] = position
    item["tokens"][0, 0] = token
    item["policy_state"]["reached"] = number + 1
    item["sequence"] = number + 1


def test_all_ranks_get_the_same_and_launch_and_the_first_is_read(executor: Any) -> None:
    first = executor.ranks[0]
    policy = cost_aware()
    given = make_input(policy)
    number = 0

    def launch(_stream: object) -> None:
        nonlocal number
        leave(first, number, 50 + number, 31 + number)
        number += 1

    first.rounds.graph.launch = launch
    for place in range(3):
        step = replace(given.step, position=30 + place, tokens=[50 + place - 1 if place else 5])
        pages = [8, 9, 10] if place == 2 else [8, 9]
        step = replace(step, pages=pages)
        call = replace(given, step=step, num_left=44 - place, writable_end=64 * len(pages))
        record = executor.rounds.run(call, 1)
        assert record.tokens == [50 + place]
        assert record.learned is not None
        assert record.learned.reached == (place + 1,) * 7
        pages.clear()  # the session's own list may change while other ranks are late
    executor._threads.join()
    assert first.calls[0][1]["page_table"] == [8, 9]
    (state,) = encode_state(given, 400, [1, 2, 8])
    sent = first.calls[1]
    assert sent[:2] == ("copy", 10_500)
    assert sent[2].view(ROUND_STATE)[0]["num_left"] == state["num_left"]
    assert first.calls[2][:3] == ("pages", 2, [10])
    for rank in executor.ranks[1:]:
        assert [call[:2] for call in rank.calls] == [call[:2] for call in first.calls]
        assert rank.rounds.graph.log.count(("launch", "stream")) == number
    with pytest.raises(AssertionError):
        executor.rounds.run(replace(given, writable_end=30), 1)


def test_anything_else_ends_the_chain(executor: Any) -> None:
    first = executor.ranks[0]
    given = make_input(FixedWidth())
    first.rounds.graph.launch = lambda _: leave(first, 0, 50, 31)
    executor.rounds.run(given, 0)
    follows = replace(given, step=replace(given.step, tokens=[50], position=31), num_left=43)
    assert executor.rounds._chain.continues(follows)
    executor.begin(given.step)
    assert executor.rounds._chain is None


def test_rounds_that_are_timed_end_the_chain(executor: Any) -> None:
    """`Timer.rounds` begins them past the queue."""
    given = make_input(FixedWidth())
    executor.ranks[0].rounds.graph.launch = lambda _: leave(executor.ranks[0], 0, 50, 31)
    executor.rounds.run(given, 0)
    executor.begin_rounds(given)
    assert executor.rounds._chain is None


def test_all_ranks_have_the_graph_before_any_begins(executor: Any) -> None:
    """Capturing takes a while, and kernels wait for other ranks for some seconds only."""
    seen = []
    for rank in executor.ranks:
        rank.send_inputs = lambda _block: seen.append(
            [one.rounds.is_prepared(has_test=True) for one in executor.ranks]
        )
    given = make_input(FixedWidth(), rule="probabilistic")
    for _ in range(2):
        executor.begin_rounds(given)
    executor._threads.join()
    assert seen == [[True] * len(executor.ranks)] * (2 * len(executor.ranks))
    graphs = [len(rank.rounds._builders) for rank in executor.ranks]
    assert graphs == [2] * len(executor.ranks)


def test_a_gpu_that_stands_still_is_noticed(executor: Any) -> None:
    first = executor.ranks[0]
    first.rounds.graph.launch = lambda _: None
    first.is_idle = True
    with pytest.raises(DeviceError, match="is idle but has not run round 0"):
        executor.rounds.run(make_input(FixedWidth()), 0)


def test_a_gpu_that_never_ends_is_noticed(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rounds, "ROUND_S", 0.0)
    executor.ranks[0].rounds.graph.launch = lambda _: None
    with pytest.raises(DeviceError, match="has worked on round 0 for 0 s: it has stalled"):
        executor.rounds.run(make_input(FixedWidth()), 0)


@pytest.mark.parametrize("rule", ["coupled", "probabilistic", "forced"])
def test_the_ratio_test_wants_the_logits_of_all_ranks(executor: Any, rule: Any) -> None:
    first = executor.ranks[0]
    given = make_input(FixedWidth())
    given = replace(given, settings=replace(given.settings, rule=rule))
    executor.begin_rounds(given)
    assert first.calls[0][1]["wants_logits"] == [int(rule == "probabilistic")]


def test_a_kernel_that_gave_up_says_why(executor: Any) -> None:
    first = executor.ranks[0]

    def fail() -> None:
        raise DeviceError("a kernel of rank 1 gave up")

    first.require_sound = fail
    first.rounds.graph.launch = lambda _: leave(first, 0, 0, 30, status=2)
    with pytest.raises(DeviceError, match="of rank 1 gave up"):
        executor.rounds.run(make_input(FixedWidth()), 0)
    assert executor.rounds._chain is None
