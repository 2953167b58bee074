"""Opening an engine on a GPU that does not fit it, or fails; calls from other threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake import make_config, make_plan

from inkrt.errors import DeviceError, EngineMismatchError
from inkrt.runtime.engine_file import EngineCode, StepSpec
from inkrt.runtime.executor import Sampling, StepInput, cuda, cuda_rank
from inkrt.runtime.executor.cuda_device import (
    enable_peer_access,
    open_device,
    require_driver,
    require_peers,
)
from inkrt.runtime.executor.cuda_rank import CudaRank
from inkrt.runtime.executor.decode_queue import DecodeQueue
from inkrt.runtime.executor.peers import RankSlice
from inkrt.runtime.executor.rank_threads import RankThreads
from inkrt.runtime.plan import Plan, TensorSpec


def gpu(major: int, minor: int, multiprocessors: int) -> Any:
    """A class of devices of this kind."""

    def make(number: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"GPU {number}",
            compute_capability=SimpleNamespace(major=major, minor=minor),
            properties=SimpleNamespace(multiprocessor_count=multiprocessors),
            set_current=lambda: None,
        )

    return make


def no_gpu(_number: int) -> None:
    raise RuntimeError("no driver")


class UsedError(Exception):
    """The driver was asked for what needs a context."""


ENGINE = Path("engine")
STEP = StepInput([1], 0, 0, [0], Sampling())


def test_the_gpu_it_was_built_for_is_taken() -> None:
    config = make_config(target="sm_90a")
    assert open_device(gpu(9, 0, 132), 0, ENGINE, config).name == "GPU 0"
    assert open_device(gpu(10, 0, 148), 1, ENGINE, make_config(target="sm_100a")).name == "GPU 1"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (
            gpu(10, 0, 148),
            "was built for sm_90a, this GPU is sm_100 (GPU 0); rebuild it for sm_100",
        ),
        # The architecture first: that is what another GPU is wrong in.
        (gpu(8, 9, 128), "was built for sm_90a, this GPU is sm_89 (GPU 0)"),
        (gpu(9, 0, 114), "needs a GPU with 132 multiprocessors, GPU 0 has 114; use a whole GPU"),
    ],
)
def test_another_gpu_is_refused(device: Any, words: str) -> None:
    with pytest.raises(EngineMismatchError) as caught:
        open_device(device, 0, ENGINE, make_config(target="sm_90a"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_gpu_is_said() -> None:
    with pytest.raises(DeviceError, match=r"no GPU is usable here \(no driver\)"):
        open_device(no_gpu, 0, ENGINE, make_config(target="sm_90a"))


@pytest.mark.parametrize("version", [13_000, 13_020, 14_000])
def test_a_driver_as_new_as_the_kernels_is_taken(version: int) -> None:
    require_driver(SimpleNamespace(cuDriverGetVersion=lambda: (0, version)), ENGINE)


def test_an_older_driver_is_refused() -> None:
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, 12_080))
    with pytest.raises(EngineMismatchError) as caught:
        require_driver(driver, ENGINE)
    assert str(caught.value) == (
        "engine engine needs a driver for CUDA 13.0 or newer, this one is for CUDA 12.8; update it "
        "to release 580 or newer"
    )


def test_a_driver_that_is_missing_is_left_to_the_device() -> None:
    def fail() -> None:
        raise RuntimeError("libcuda.so.1 is missing")

    require_driver(SimpleNamespace(cuDriverGetVersion=fail), ENGINE)


class Peers:
    """A driver with some GPUs, of which pairs are connected one way."""

    # ruff: noqa: N802 (the driver's own names)

    CUresult = SimpleNamespace(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED=704)

    def __init__(self, count: int, *pairs: tuple[int, int]) -> None:
        self.count, self.pairs = count, pairs
        self.enabled: list[object] = []

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, self.count

    def cuDeviceCanAccessPeer(self, a: int, b: int) -> tuple[int, int]:
        return 0, int((a, b) in self.pairs)

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, 11

    def cuCtxEnablePeerAccess(self, context: int, _flags: int) -> tuple[int]:
        self.enabled.append(context)
        return (704 if context == 12 else 0 if context == 13 else 1,)


TWO_RANKS = make_config(target="sm_90a", tp_size=2)


def test_gpus_that_reach_each_other_are_taken() -> None:
    require_peers(Peers(2, (0, 1), (1, 0)), [0, 1], ENGINE, TWO_RANKS)
    require_peers(Peers(1), [0, 0], ENGINE, TWO_RANKS)  # of tests
    require_peers(Peers(1), [0], ENGINE, make_config(target="sm_90a"))


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (Peers(1), "is for 2 ranks, which need GPUs 0, 1, but there are 1; rebuild it with: "),
        (Peers(2, (0, 1)), "GPU 1 has no peer access to GPU 0; choose GPUs that NVLink or one"),
    ],
)
def test_gpus_that_are_missing_or_apart_are_named(driver: Peers, words: str) -> None:
    with pytest.raises(EngineMismatchError) as caught:
        require_peers(driver, [0, 1], ENGINE, TWO_RANKS)
    assert words in str(caught.value)
    assert str(caught.value).endswith("--tp-size 1")


@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (2, 2), (3, 2), (7, 4)])
def test_missing_gpus_are_answered_by_ranks_that_an_engine_can_have(count: int, ranks: int) -> None:
    config = make_config(target="sm_90a", tp_size=8)
    with pytest.raises(EngineMismatchError, match=f"there are {count}; .*--tp-size {ranks}$"):
        require_peers(Peers(count), list(range(8)), ENGINE, config)


def test_access_is_enabled_to_all_others_once() -> None:
    def check(result: tuple[int, ...]) -> object:
        if result[0]:
            raise DeviceError
        return result[1] if len(result) > 1 else None

    driver = Peers(3)
    enable_peer_access(driver, check, [11, 12, 13])
    assert driver.enabled == [12, 13]  # of 12 it had been before
    with pytest.raises(DeviceError):
        enable_peer_access(driver, check, [14])


@pytest.mark.parametrize(
    "call",
    [
        lambda executor: executor.run("decode", STEP),
        lambda executor: executor.decode(STEP, 0),
        lambda executor: executor.copy_slot(0, 1),
        lambda executor: executor.copy_page(0, 1),
        lambda executor: executor.read("decode", 0),
        lambda executor: executor.close(),
    ],
    ids=["run", "decode", "copy_slot", "copy_page", "read", "close"],
)
def test_calls_may_come_from_any_thread(call: Callable[[Any], object]) -> None:
    """The driver has a context per thread: a thread that opened nothing has none."""
    contexts = {threading.get_ident(): "context"}
    used: list[object] = []

    def use(*_: object) -> Any:
        used.append(contexts.get(threading.get_ident()))
        raise UsedError

    def enter(context: object) -> tuple[int]:
        contexts[threading.get_ident()] = context
        return (0,)

    executor = object.__new__(cuda.CudaExecutor)
    rank = object.__new__(CudaRank)
    executor.ranks, executor.rank_slice, executor._threads = [rank], None, RankThreads(1)
    plan = Plan(
        "decode", 1, 1, (TensorSpec("x", "uint8", (1,), (1,), "arena", "", 0),), (), 0, {}, {}
    )
    rank.plans = {"decode": plan}
    rank.context, rank.check = "context", lambda _: None
    rank.driver = SimpleNamespace(cuCtxSetCurrent=enter, cuStreamSynchronize=use)
    rank.stream = SimpleNamespace(handle=0)
    executor._queue = DecodeQueue(executor)
    rank.memory = SimpleNamespace(  # type: ignore[assignment]
        base=1, copy_entries=use, input_bytes=0, input_offsets={}
    )
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsedError):
        pool.submit(call, executor).result()
    assert used == ["context"]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError])
def test_an_engine_that_does_not_open_leaves_no_memory_taken(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], num_ranks: int
) -> None:
    pytest.importorskip("cuda.core")
    closed = []
    config = make_config(target="sm_90a", tp_size=num_ranks, steps=(StepSpec("decode", 1, 1),))
    plan = make_plan(config.steps[0], config)
    memory = SimpleNamespace(
        check=lambda _: None, input_bytes=8, mailbox=None, connect=lambda _: None, slot_bytes=256,
        host_bytes=lambda size: np.zeros(max(size, 8), np.uint8), close=lambda: closed.append(True),
    )  # fmt: skip
    device = SimpleNamespace(create_stream=lambda: SimpleNamespace(handle=0))

    def capture(*_: object, **_advances: bool) -> None:
        raise error

    monkeypatch.setattr(cuda, "open_device", lambda *_: device)
    monkeypatch.setattr(cuda, "require_peers", lambda *_: None)
    monkeypatch.setattr(cuda, "enable_peer_access", lambda *_: None)
    monkeypatch.setattr(cuda_rank, "read_code", lambda *_: EngineCode({"decode": plan}))
    monkeypatch.setattr(cuda_rank, "DeviceMemory", lambda *_: memory)
    monkeypatch.setattr(CudaRank, "capture", capture)
    monkeypatch.setattr(CudaRank, "enter", lambda _: None)
    driver = SimpleNamespace(cuCtxGetCurrent=lambda: (0, 1), cuDriverGetVersion=lambda: (0, 13_000))
    monkeypatch.setattr("cuda.bindings.driver", driver)
    before = threading.active_count()
    with pytest.raises(error):
        cuda.CudaExecutor(ENGINE, config)
    assert closed == [True] * num_ranks
    assert threading.active_count() == before


def test_a_slice_is_of_as_many_ranks_as_the_engine() -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(EngineMismatchError, match="has 2 ranks, so there is no slice 0/4 of it"):
        cuda.CudaExecutor(ENGINE, TWO_RANKS, rank_slice=RankSlice(0, 4))


@pytest.mark.parametrize(
    "call",
    [lambda executor: executor.run("decode", STEP), lambda executor: executor.decode(STEP, 0)],
    ids=["run", "decode"],
)
def test_a_slice_gives_no_tokens(call: Callable[[Any], object]) -> None:
    executor = object.__new__(cuda.CudaExecutor)
    executor.rank_slice = RankSlice(1, 2)
    executor.ranks = [SimpleNamespace(enter=lambda: None)]  # type: ignore[list-item]
    executor._queue = DecodeQueue(executor)
    with pytest.raises(
        EngineMismatchError, match="a rank slice 1/2, collectives looped back, comp"
    ):
        call(executor)
