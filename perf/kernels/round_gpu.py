"""The graph of a round on a GPU, but for its steps: checks by `tests/gpu`, and times.

    python perf/kernels/round_gpu.py

prints what a round takes, with kernels that do nothing for its steps: us a round, from one graph of
many.
"""

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from round_checks import CONTEXTS, STEPS, Proposed, RoundMemory, costs_at, make_policy

from inkrt.builder.compile import PLUGIN_FOLDER, compile_cubin
from inkrt.runtime.executor.round_state import MAX_DRAFTS

_REPEATS = 200


def capture(
    device: Any, code: Sequence[Any], at: Mapping[str, int], *, repeats: int = 1, pdl: bool = True
) -> tuple[Any, Any]:
    """A graph of rounds whose drafts and drawn tokens are what memory holds, and its builder.

    Args:
        device: of cuda.core.
        code: modules of the kernels, and of what stands where an engine has its steps.
        at: addresses of state, drafts, confidences (0 for none), drawn, tokens, num_tokens,
            position, ring (0 for none) and error.
        repeats: rounds of the graph.
        pdl: whether kernels in bodies may start beside the step, as in an engine.
    """
    from cuda.core import LaunchConfig, launch

    rounds, steps = code

    def add(builder: Any, entry: str, *params: Any, pdl: bool = pdl) -> None:
        config = LaunchConfig(grid=1, block=32, programmatic_stream_serialization=pdl)
        launch(builder, config, rounds.get_kernel(entry), *params)

    def add_step(builder: Any) -> None:
        launch(builder, LaunchConfig(grid=1, block=32), steps.get_kernel("step"))

    builder = device.create_graph_builder().begin_building()
    for _ in range(repeats):
        draft = builder.create_condition(default_value=0)
        width = builder.create_condition(default_value=len(STEPS))
        handles = [ctypes.c_uint64(int(condition.handle)) for condition in (draft, width)]
        names = ("state", "num_tokens", "position", "ring", "error")
        add(builder, "begin_round", *(at[name] for name in names), *handles, pdl=False)
        body = builder.if_then(draft).begin_building()
        add_step(body)
        add(
            body, "choose_width", at["state"], at["drafts"], at["confidences"],
            ctypes.c_int(MAX_DRAFTS), at["tokens"], at["num_tokens"], handles[1],
        )  # fmt: skip
        body.end_building()
        for case in builder.switch(width, len(STEPS)):
            case.begin_building()
            add_step(case)
            names = ("state", "drawn", "tokens", "position", "ring", "error")
            add(case, "commit_round", *(at[name] for name in names))
            case.end_building()
    return builder.end_building().complete(), builder


@cache
def load(device: Any) -> list[Any]:
    """The kernels, compiled for a device; see `capture`."""
    from cuda.core import ObjectCode

    capability = device.compute_capability
    target = f"sm_{capability.major}{capability.minor}a"
    sources = (PLUGIN_FOLDER / "round/round.cu", Path(__file__).with_name("graph_probe.cu"))
    return [ObjectCode.from_cubin(compile_cubin(source, (), target)) for source in sources]


class GpuRounds(RoundMemory):
    """A rank on the GPU; all its memory is pinned host memory, which kernels can address.

    Args:
        device: of cuda.core, current.
        has_confidences: whether the drafter has.
    """

    def __init__(self, device: Any, *, has_confidences: bool = True) -> None:
        super().__init__(pinned)
        self._drafts, self._drawn = pinned(4 * 7).view(np.int32), pinned(4 * 8).view(np.int32)
        self._confidences = pinned(4 * 7).view(np.float32)
        names = ("state", "ring", "tokens", "num_tokens", "position", "error")
        at = {name: getattr(self, name).ctypes.data for name in names}
        at |= {"drafts": self._drafts.ctypes.data, "drawn": self._drawn.ctypes.data}
        at["confidences"] = self._confidences.ctypes.data if has_confidences else 0
        self._stream = device.create_stream()
        self._graph, self._builder = capture(device, load(device), at)

    def run_round(
        self,
        draft: Callable[[], Proposed],
        step: Callable[[list[int]], Sequence[int]],
        verdict: tuple[int, int] | None,
        error: int,
    ) -> None:
        """See `RoundMemory.round`. What steps give stands in memory when the graph begins."""
        tokens, confidences = draft()
        self._drafts[:] = tokens
        if confidences is not None:
            self._confidences[:] = confidences
        self._drawn[:] = step([0] * (MAX_DRAFTS + 1))
        self.error[0] = error
        if verdict is not None:
            self.state["accepted"], self.state["token"] = verdict
        anchor = int(self.tokens[0])
        self._graph.launch(self._stream)
        self._stream.sync()
        self.read = [anchor, *self.tokens[1 : self.num_tokens[0]].tolist()]


def pinned(size: int) -> NDArray[np.uint8]:
    """Pinned host memory, which is never given back."""
    from cuda.bindings import driver

    status, address = driver.cuMemHostAlloc(max(size, 8), 0)
    assert not status, status
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))


def _time(
    device: Any, code: Sequence[Any], rounds: RoundMemory, *, pdl: bool
) -> tuple[float, int, int]:
    """Microseconds of a round, and width and drafts of the last; only the ring is on the host."""
    from cuda.bindings import driver
    from cuda.core import EventOptions

    drafts = np.arange(MAX_DRAFTS, dtype=np.int32)
    drawn = np.array([*range(MAX_DRAFTS - 3), 9, 9, 9, 9], np.int32)
    confidences = np.linspace(0.95, 0.6, MAX_DRAFTS, dtype=np.float32)
    content = {
        "state": rounds.state, "tokens": rounds.tokens, "num_tokens": rounds.num_tokens,
        "position": rounds.position, "error": rounds.error, "drafts": drafts, "drawn": drawn,
        "confidences": confidences,
    }  # fmt: skip
    at = {"ring": rounds.ring.ctypes.data}
    for name, values in content.items():
        status, address = driver.cuMemAlloc(values.nbytes)
        assert not status, status
        at[name] = int(address)
    graph, _builder = capture(device, code, at, repeats=_REPEATS, pdl=pdl)
    stream, times = device.create_stream(), []
    for _ in range(7):
        for name, values in content.items():
            (status,) = driver.cuMemcpyHtoD(at[name], values.ctypes.data, values.nbytes)
            assert not status, status
        first = stream.record(options=EventOptions(timing_enabled=True))
        graph.launch(stream)
        last = stream.record(options=EventOptions(timing_enabled=True))
        last.sync()
        times.append((last - first) * 1e3 / _REPEATS)
    state = np.empty_like(rounds.state)
    (status,) = driver.cuMemcpyDtoH(state.ctypes.data, at["state"], state.nbytes)
    assert not status, status
    assert state[0]["round"] == _REPEATS, state[0]["round"]
    return float(np.median(times)), int(state[0]["width"]), int(state[0]["proposed"])


def main() -> None:
    """See the module."""
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    code = load(device)
    for name in ("had finished", "plain", "fixed", "cost"):
        for pdl in (False, True):
            rounds = GpuRounds(device)
            state = rounds.state[0]
            policy = make_policy("fixed" if name == "fixed" else "cost", MAX_DRAFTS)
            rounds.set_policy(policy, CONTEXTS, [costs_at(c, MAX_DRAFTS) for c in CONTEXTS])
            state["most"], state["vocab_size"] = MAX_DRAFTS, 100
            state["num_left"] = state["writable_end"] = 10**6
            state["explore_every"], state["num_first"] = 10**6, 0
            state["finished"] = name == "had finished"
            if name == "plain":
                state["rounds"] = 100.0
            taken, width, proposed = _time(device, code, rounds, pdl=pdl)
            edges = "programmatic edges" if pdl else "full edges"
            drafts = f"{width} of {proposed} drafts"
            sys.stdout.write(f"{name}, {edges}: {taken:.2f} us a round ({drafts})\n")


if __name__ == "__main__":
    main()
