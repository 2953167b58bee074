"""What a driver does of the graphs that rounds of speculation are made of; takes seconds.

    python perf/kernels/graph_probe.py

prints a line for each question, "ok" or why not: `runtime/executor/cuda_rounds.py` relies on them.
It needs a GPU, NVRTC and cuda.core, but no engine.
"""

import ctypes
import gc
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from round_gpu import pinned

from inkrt.builder.compile import compile_cubin

_SLOW_NS = 30_000
_CASES = 3
_NOT_SET = -1


class Probe:
    """Kernels, and memory that they share: `at` and the values of two conditions."""

    def __init__(self) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        self.driver, self.device = driver, Device(0)
        self.device.set_current()
        capability = self.device.compute_capability
        target = f"sm_{capability.major}{capability.minor}a"
        source = Path(__file__).with_suffix(".cu")
        self.code = ObjectCode.from_cubin(compile_cubin(source, (), target))
        self.stream = self.device.create_stream()
        # A line of `at` for every body. The device addresses pinned memory as the host does.
        self.at = pinned(8 * 8 * 16).view(np.uint64).reshape(16, 8)
        self.values = pinned(8).view(np.int32)

    def add(self, builder: Any, entry: str, *params: Any, pdl: bool, **config: Any) -> None:
        """Add a kernel of one warp."""
        from cuda.core import LaunchConfig, launch

        options = {"grid": 1, "block": 32, "programmatic_stream_serialization": pdl} | config
        launch(builder, LaunchConfig(**options), self.code.get_kernel(entry), *params)

    def add_body(self, builder: Any, number: int, *, pdl: bool, **config: Any) -> None:
        """A slow kernel and one that may start beside it, with a line of `at`."""
        at = self.at[number].ctypes.data
        self.add(builder, "slow", at, ctypes.c_uint64(_SLOW_NS), pdl=False, **config)
        self.add(builder, "follow", at, pdl=pdl, **config)

    def round(self, *, pdl: bool, keep: bool = True, **config: Any) -> tuple[Any, Any]:
        """IF, whose body chooses the case of the SWITCH behind it; the graph, and its builder."""
        builder = self.device.create_graph_builder().begin_building()
        conditions = [builder.create_condition(default_value=value) for value in (0, _CASES)]
        handles = [ctypes.c_uint64(int(condition.handle)) for condition in conditions]
        first, second = (self.values[place:].ctypes.data for place in (0, 1))
        self.add(builder, "choose", handles[0], first, pdl=False)
        body = builder.if_then(conditions[0]).begin_building()
        self.add_body(body, _CASES, pdl=pdl, **config)
        self.add(body, "choose", handles[1], second, pdl=pdl)
        body.end_building()
        for number, case in enumerate(builder.switch(conditions[1], _CASES)):
            case.begin_building()
            self.add_body(case, number, pdl=pdl, **config)
            case.end_building()
        graph = builder.end_building().complete()
        graph.upload(self.stream)
        return graph, builder if keep else None

    def run(self, graph: Any, draft: int, width: int) -> list[int]:
        """How often every case, and the IF body, ran."""
        self.at[:] = 0
        self.values[:] = draft, width
        graph.launch(self.stream)
        self.stream.sync()
        return [int(count) for count in self.at[: _CASES + 1, 4]]

    def order(self, number: int) -> tuple[bool, bool]:
        """Whether the second kernel of a body started beside the first, and waited for it."""
        ended, started, read, seen, *_ = (int(one) for one in self.at[number])
        return started < ended, seen == ended > 0 and read >= ended


def _require(condition: bool, *found: object) -> None:
    if not condition:
        raise AssertionError(" ".join(map(str, found)))


def _decides(probe: Probe, *, keep: bool = True, **options: Any) -> str:
    """Every choice runs what it should, and nothing else; order within bodies."""
    graph, _builder = probe.round(keep=keep, **options)
    gc.collect()
    for draft, width in [(_NOT_SET, 1), (0, 1), *((1, case) for case in range(_CASES)), (1, 9)]:
        wanted = [int(draft == 1 and width == case) for case in range(_CASES)] + [int(draft == 1)]
        found = probe.run(graph, draft, width)
        _require(found == wanted, f"draft {draft}, case {width}: ran {found}, not {wanted}")
    overlaps = []
    for number in (_CASES, 1):  # of the IF, of the SWITCH
        probe.run(graph, 1, 1)
        overlap, waited = probe.order(number)
        _require(waited, f"no wait in body {number}: {probe.at[number]}")
        overlaps.append(overlap)
    _require(options["pdl"] or not any(overlaps), "kernels overlap without an edge that lets them")
    return f"started beside their predecessor: {overlaps[0]} in the IF, {overlaps[1]} in the SWITCH"


def _first_of_a_body(probe: Probe) -> str:
    """A programmatic edge from nothing: the first kernel of a body."""
    builder = probe.device.create_graph_builder().begin_building()
    condition = builder.create_condition(default_value=1)
    probe.add(builder, "choose", ctypes.c_uint64(int(condition.handle)), probe.values.ctypes.data,
              pdl=False)  # fmt: skip
    body = builder.if_then(condition).begin_building()
    probe.add(body, "follow", probe.at.ctypes.data, pdl=True)
    body.end_building()
    found = probe.run(builder.end_building().complete(), 1, 0)
    _require(found[0] == 1, found)
    return ""


def _relaunch(probe: Probe, count: int = 300) -> str:
    """Launches of one graph queued behind each other, each from the default values."""
    graph, _builder = probe.round(pdl=True)
    probe.run(graph, 1, 2)
    started = time.perf_counter()
    for _ in range(count):
        graph.launch(probe.stream)
    queued = time.perf_counter() - started
    probe.stream.sync()
    taken = time.perf_counter() - started
    _require(probe.at[2, 4] == probe.at[_CASES, 4] == 1 + count, probe.at[:, 4])
    beside = taken / count * 1e6 - 2 * _SLOW_NS / 1e3
    return f"{queued / count * 1e6:.1f} us a launch; nodes take {beside:.1f} us beside two kernels"


def _large(probe: Probe, cases: int = 8, kernels: int = 350) -> str:
    """As many kernels as the rounds of an engine have."""
    free, _ = probe.driver.cuMemGetInfo()[1:]
    started = time.perf_counter()
    builder = probe.device.create_graph_builder().begin_building()
    condition = builder.create_condition(default_value=1)
    at = probe.at.ctypes.data
    for case in builder.switch(condition, cases):
        case.begin_building()
        for number in range(kernels):
            probe.add(case, "follow", at, pdl=number > 0)
        case.end_building()
    captured = time.perf_counter()
    graph = builder.end_building().complete()
    graph.upload(probe.stream)
    probe.stream.sync()
    ended = time.perf_counter()
    used = free - probe.driver.cuMemGetInfo()[1]
    found = probe.run(graph, 0, 0)
    _require(found[0] == kernels, found)
    began = time.perf_counter()
    for _ in range(20):
        graph.launch(probe.stream)
    queued = (time.perf_counter() - began) / 20
    probe.stream.sync()
    taken = (time.perf_counter() - began) / 20
    return (
        f"{captured - started:.2f} s to capture, {ended - captured:.2f} s to instantiate and "
        f"upload, {used / 2**20:.0f} MiB; {queued * 1e6:.0f} us a launch of {taken * 1e6:.0f}"
    )


def _record(probe: Probe) -> str:
    """The host sees a whole record while the graph that wrote it still runs."""
    record = pinned(256).view(np.uint64)
    builder = probe.device.create_graph_builder().begin_building()
    probe.add(builder, "publish", record.ctypes.data, ctypes.c_uint64(77), pdl=False)
    probe.add(builder, "slow", probe.at.ctypes.data, ctypes.c_uint64(200_000_000), pdl=False)
    graph = builder.end_building().complete()
    graph.launch(probe.stream)
    deadline = time.monotonic() + 5
    while record[31] != 77 and time.monotonic() < deadline:
        pass
    (status,) = probe.driver.cuStreamQuery(probe.stream.handle)
    words = record.tolist()
    probe.stream.sync()
    _require(words == [77] * 32, words)
    _require(status == probe.driver.CUresult.CUDA_ERROR_NOT_READY, "only when the graph had ended")
    return ""


def _thread(probe: Probe, *, is_current: bool) -> str:
    """Bodies are captured in a thread that has not opened the device."""
    context = probe.driver.cuCtxGetCurrent()[1]
    failures: list[BaseException] = []

    def capture() -> None:
        try:
            probe.driver.cuCtxSetCurrent(context)
            if is_current:
                type(probe.device)(0).set_current()
            probe.round(pdl=True)
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=capture)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return ""


def main() -> None:
    """See the module."""
    probe = Probe()
    questions = {
        "full edges in bodies": lambda: _decides(probe, pdl=False),
        "programmatic edges in bodies": lambda: _decides(probe, pdl=True),
        "the builder is dropped": lambda: _decides(probe, pdl=True, keep=False),
        "clusters in bodies, full edges": lambda: _decides(probe, pdl=False, grid=4, cluster=4),
        "clusters in bodies, programmatic": lambda: _decides(probe, pdl=True, grid=4, cluster=4),
        "a body begins with a programmatic launch": lambda: _first_of_a_body(probe),
        "one graph launched again while it runs": lambda: _relaunch(probe),
        "2,800 kernels in bodies": lambda: _large(probe),
        "a record before the graph's end": lambda: _record(probe),
        "another thread, device made current": lambda: _thread(probe, is_current=True),
        "another thread, context alone (may fail)": lambda: _thread(probe, is_current=False),
    }
    for name, ask in questions.items():
        try:
            answer = f"ok {ask()}"
        except Exception as error:  # the next question may have another answer
            answer = f"FAILED {type(error).__name__}: {error}"
        sys.stdout.write(f"{name}: {answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
