"""Timing on a made-up GPU: what graphs hold, which memory they use, what becomes of times."""
# ruff: noqa: N802 (the driver's own names)

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from inkrt.errors import DeviceError, EngineMismatchError
from inkrt.runtime.executor import Sampling, StepInput, cuda_timing
from inkrt.runtime.executor.cuda_timing import FLUSH_BYTES, Chain, Timer
from inkrt.runtime.executor.round_queue import RoundRecord
from inkrt.runtime.executor.round_state import RoundStatus
from inkrt.runtime.plan import (
    LOOSE,
    Fill,
    IntParam,
    Kernel,
    Launch,
    PeersParam,
    Plan,
    TableParam,
    TensorParam,
    TensorSpec,
)

BASE, FLUSH_US, GAP_US = 1 << 30, 40.0, 2.0
COSTS = {"first": 7.0, "second": 3.0, "other": 20.0}
INPUT = StepInput([1], 5, 0, [0], Sampling())


class Graph:
    """Work in order: ("flush", address, bytes) or (entry, params, pdl)."""

    def __init__(self, gpu: "Gpu", work: list[Any]) -> None:
        self.gpu, self.work = gpu, work

    def upload(self, stream: object) -> None:
        assert stream is self.gpu.stream

    def launch(self, stream: object) -> None:
        assert stream is self.gpu.stream
        self.gpu.ran.append(self)
        self.gpu.now += GAP_US
        for name, *_ in self.work:
            self.gpu.now += FLUSH_US if name == "flush" else COSTS[name]


class Builder:
    def __init__(self, gpu: "Gpu") -> None:
        self.gpu, self.work = gpu, []
        self.stream = self.handle = self

    def begin_building(self) -> None:
        assert self.work == []

    def end_building(self) -> "Builder":
        return self

    def complete(self) -> Graph:
        return Graph(self.gpu, self.work)


class Gpu:
    """An executor and its driver; calls of the latter return their values."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[Graph] = []
        self.filled: list[tuple[int, int, int]] = []
        self.allocated: dict[int, int] = {}
        self.inputs: list[StepInput] = []
        self.num_events = 0
        self.failure: Any = lambda: None
        self.driver = self.device = self.stream = self
        self.ranks = [self]
        self.memory = SimpleNamespace(slot_bytes=256)
        self.handle = self
        self.modules: dict[str, object] = {}
        self.round_graph: Any = None
        self.begun: list[object] = []
        self.full_at = -1
        self.graphs = {"decode": self.capture(make_plan())}

    def check(self, value: Any) -> Any:
        return value

    def create_graph_builder(self) -> Builder:
        return Builder(self)

    def on_ranks(self, function: Any) -> list[Any]:
        return [function(self)]

    @property
    def plans(self) -> dict[str, Plan]:
        return {"decode": make_plan()}

    def plan(self, step: str) -> Plan:
        assert step == "decode"
        return make_plan()

    def capture(self, plan: Plan, *, until: int | None = None) -> Graph:
        kernels = [k for launch in plan.launches[:until] for k in launch.kernels]
        return Graph(self, [(kernel.entry, None, True) for kernel in kernels])

    def add_kernel(self, builder: Builder, kernel: Kernel, params: list[Any], *, pdl: bool) -> None:
        builder.work.append((kernel.entry, params, pdl))

    def param(self, _plan: Plan, param: Any) -> Any:
        return ("own", param)

    def send_inputs(self, step_input: StepInput) -> None:
        self.inputs.append(step_input)

    def require_sound(self) -> None:
        self.failure()

    def cuMemAlloc(self, size: int) -> int:
        self.allocated[BASE] = size
        return BASE

    def cuMemFree(self, address: int) -> None:
        del self.allocated[address]

    def cuMemsetD8Async(self, start: int, value: int, size: int, stream: object) -> None:
        assert stream is self.stream  # that of the graphs: there is no other order
        assert start >= BASE + FLUSH_BYTES
        assert start + size <= BASE + self.allocated[BASE]
        self.filled.append((start, value, size))

    def cuMemsetD32Async(self, start: int, _value: int, count: int, stream: Builder) -> None:
        assert start >= BASE
        stream.work.append(("flush", start, 4 * count))

    def cuEventCreate(self, _flags: int) -> list[float]:
        self.num_events += 1
        return []

    def cuEventRecord(self, event: list[float], _stream: object) -> None:
        event.append(self.now)

    def cuEventElapsedTime(self, first: list[float], last: list[float]) -> float:
        return (last[0] - first[0]) / 1e3

    def cuEventDestroy(self, _event: list[float]) -> None:
        self.num_events -= 1


def kernel(entry: str, *params: Any, pdl: bool = True) -> Kernel:
    return Kernel("c", entry, (1, 1, 1), (32, 1, 1), 1, 0, pdl, False, params)


def make_plan(*, scratch: int = 0) -> Plan:
    """Two launches of two kernels, and one of one."""
    tensors = [
        TensorSpec("w", "uint8", (4,), (1,), "weight", "w", 0),
        TensorSpec("exchange.1", "uint8", (64,), (1,), "scratch", LOOSE, 0),
        TensorSpec("error.2", "uint8", (4,), (1,), "scratch", LOOSE, 256),
        TensorSpec("kept.3", "uint8", (64,), (1,), "scratch", "", 0),
    ]
    one = Launch("op", "t", {}, (), "", 0, (
        kernel("first", *(TensorParam(i) for i in range(4)), IntParam(3)),
        kernel("second", TableParam((0,)), pdl=False),
    ))  # fmt: skip
    fills = (Fill(0, 64, 255), Fill(256, 4, 0)) if scratch else ()
    other = Launch("last", "t", {}, (), "", 0, (kernel("other"),))
    return Plan("decode", 1, 1, tuple(tensors), (one, one, other), 0, {}, {}, scratch, fills)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def timer(gpu: Gpu) -> Timer:
    return Timer(gpu)  # type: ignore[arg-type]


def test_steps_and_their_beginnings(gpu: Gpu) -> None:
    assert timer(gpu).step("decode", INPUT, 7) == pytest.approx([GAP_US + 40] * 7)
    for until, us in ((1, 10), (2, 20), (3, 40)):
        times = timer(gpu).step("decode", INPUT, 3, until=until)
        assert times == pytest.approx([GAP_US + us] * 3)
    assert gpu.inputs == [INPUT] * 4
    assert gpu.num_events == 0


def test_time_of_a_launch_is_without_flushes(gpu: Gpu) -> None:
    plan = make_plan(scratch=260)
    chains = [Chain(plan, 5, flush=True), Chain(plan, 4, flush=False), Chain(plan, 2, flush=True)]
    times = timer(gpu).chains("decode", INPUT, 2, chains, 10)
    assert [len(of_chain) for of_chain in times] == [12, 12, 12]  # rounds of whole replays
    gap = GAP_US / (4 * 3)  # where nothing is flushed, the graph's own start is in it
    for of_chain, expected in zip(times, (40 / 3, 40 / 3 + gap, 40 / 3), strict=True):
        assert of_chain == pytest.approx([expected] * 12)
    assert gpu.allocated == {}
    assert gpu.num_events == 0
    assert gpu.inputs == [INPUT]
    first, *rest = gpu.ran
    assert [entry for entry, *_ in first.work] == ["first", "second"] * 2
    # Warm-up, then the graphs in turn: flushes of 5 and 2 rounds, and three chains.
    sizes = [len(graph.work) for graph in rest]
    assert sizes[:9] == [5 * 6] * 3 + [4 * 5] * 3 + [2 * 6] * 3
    turn = sorted([5] * 4 + [2] * 4) + [30] * 4 + [20] * 4 + [12] * 4
    for number in range(3):
        part = sizes[9 + 20 * number : 29 + 20 * number]
        assert sorted(part[:8]) + part[8:] == turn


def test_what_a_graph_holds(gpu: Gpu) -> None:
    plan = make_plan(scratch=260)
    timer(gpu).chains("decode", INPUT, 0, [Chain(plan, 2, flush=True)] * 2, 3)
    graphs = {id(graph): graph for graph in gpu.ran}.values()
    one, two = (graph.work for graph in graphs if any(entry != "flush" for entry, *_ in graph.work))
    assert [entry for entry, *_ in one] == ["flush", *["first", "second"] * 2, "other"] * 2
    assert {(start, size) for entry, start, size in one if entry == "flush"} == {
        (BASE, FLUSH_BYTES)
    }
    # Behind a flush no programmatic edge, elsewhere as the kernel has it.
    edges = [pdl for entry, _, pdl in one if entry != "flush"]
    assert edges == [False, False, True, False, True] * 2
    for work, scratch in ((one, BASE + FLUSH_BYTES), (two, BASE + FLUSH_BYTES + 512)):
        (_, params, _) = work[1]
        assert params == [
            ("own", TensorParam(0)),
            scratch,
            ("own", TensorParam(2)),  # the engine's error word
            ("own", TensorParam(3)),
            ("own", IntParam(3)),
        ]
    assert gpu.filled == [
        (BASE + FLUSH_BYTES + offset, value, size)
        for offset, value, size in ((0, 255, 64), (256, 0, 4), (512, 255, 64), (768, 0, 4))
    ]


def test_ranks_run_the_same_chains_and_the_slowest_counts(gpu: Gpu) -> None:
    """The other rank has memory of its own, and takes 6 us longer for each graph."""
    other, launch_fast = Gpu(), Graph.launch
    gpu.ranks = [gpu, other]
    gpu.on_ranks = lambda function: [function(rank) for rank in gpu.ranks]  # type: ignore[method-assign]

    def launch(self: Graph, stream: object) -> None:
        launch_fast(self, stream)
        self.gpu.now += 6.0 if self.gpu is other else 0.0

    plan = make_plan(scratch=260)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "launch", launch)
        ((*times,),) = timer(gpu).chains("decode", INPUT, 1, [Chain(plan, 2, flush=False)], 9)
    assert times == pytest.approx([(2 * 40 + GAP_US + 6) / 6] * 9)
    assert gpu.allocated == other.allocated == {}
    assert gpu.filled == other.filled != []
    assert [len(graph.work) for graph in gpu.ran] == [len(graph.work) for graph in other.ran]
    assert len(other.ran) == 1 + 3 + 9
    assert gpu.inputs == [INPUT]


def test_what_inboxes_have_no_room_for_is_refused(gpu: Gpu) -> None:
    plan = make_plan()
    (first, *rest) = plan.launches
    for num_bytes in (256, 257):
        sends = replace(first, kernels=(kernel("first", PeersParam(num_bytes)),))
        chain = Chain(replace(plan, launches=(sends, *rest)), 1, flush=False)
        if num_bytes == 256:
            assert timer(gpu).chains("decode", INPUT, 0, [chain], 3)
            continue
        with pytest.raises(EngineMismatchError, match=r"sends 512 bytes .* room for 256; build"):
            timer(gpu).chains("decode", INPUT, 0, [chain], 3)


def test_memory_is_given_back_after_an_error(gpu: Gpu) -> None:
    def fail() -> None:
        raise RuntimeError("gave up")

    gpu.failure = fail
    with pytest.raises(RuntimeError, match="gave up"):
        timer(gpu).chains("decode", INPUT, 1, [Chain(make_plan(), 1, flush=False)], 3)
    assert gpu.allocated == {}


@pytest.mark.parametrize("until", [None, 2])
def test_a_kernel_that_gave_up_gives_no_time(gpu: Gpu, until: int | None) -> None:
    def fail() -> None:
        raise RuntimeError("gave up")

    gpu.failure = fail
    with pytest.raises(RuntimeError, match="gave up"):
        timer(gpu).step("decode", INPUT, 3, until=until)


class Rounds:
    """A device whose rounds give their number; one of them may have nothing to give."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def begin_rounds(self, given: object) -> None:
        self.gpu.begun.append(given)

    def await_record(self, number: int) -> RoundRecord:
        assert number < len(self.gpu.ran), "it has run"
        status = RoundStatus.FULL if number == self.gpu.full_at else RoundStatus.OK
        return RoundRecord(status, [number], 0, 0, number)


def test_rounds_one_behind_the_other(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are records at once; the chain goes on."""
    monkeypatch.setattr(cuda_timing, "CudaRounds", Rounds)
    gpu.round_graph, gpu.begun, gpu.full_at = gpu.capture(make_plan()), [], 150
    times, records = timer(gpu).rounds("given", 150)  # type: ignore[arg-type]
    assert times == pytest.approx([GAP_US + 40] * 150)
    assert [record.tokens for record in records] == [[number] for number in range(150)]
    assert gpu.begun == ["given"]
    assert gpu.num_events == 0
    gpu.ran.clear()
    gpu.full_at = 3
    with pytest.raises(DeviceError, match="a round gave nothing: full"):
        timer(gpu).rounds("given", 9)  # type: ignore[arg-type]
