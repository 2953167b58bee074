"""A rank that fails, stops or stalls in the middle: the others notice, and it is named.

On one GPU both ranks run on it, side by side in two streams.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy

from inkrt.errors import DeviceError
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling, rank_threads
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.session import Session

# Kernels wait some three seconds for each other.
SPIN_S, BOUND_S = 3.0, 9.0
BOTH = [
    pytest.param((0, 0), marks=pytest.mark.gpu, id="one_gpu"),
    pytest.param((0, 1), marks=pytest.mark.multigpu, id="two_gpus"),
]


@pytest.fixture(params=BOTH)
def session(request: pytest.FixtureRequest, gpu: str, tmp_path: Path) -> Iterator[Session]:
    """Of the toy of two ranks, which has run a step."""
    from cuda.bindings import driver

    _, count = driver.cuDeviceGetCount()
    if count <= max(request.param):
        pytest.skip(f"needs two GPUs, there is {count}")
    config = toy.write_engine(tmp_path / "engine", gpu, num_ranks=2)
    executor = CudaExecutor(tmp_path / "engine", config, devices=request.param)
    session = Engine(tmp_path / "engine", config, executor).session()
    session.step([1, 2, 3], Sampling())
    yield session
    with contextlib.suppress(DeviceError):  # of an engine that has lost a rank
        executor.close()


def executor_of(session: Session) -> CudaExecutor:
    executor = session._executor
    assert isinstance(executor, CudaExecutor)
    return executor


def ask(session: Session, ahead: int) -> None:
    """For a token, with steps queued ahead or none."""
    if ahead:
        session.decode(4, Sampling(), num_more=ahead)
    else:
        session.step([4], Sampling())


@contextlib.contextmanager
def stalled(executor: CudaExecutor, rank: int, seconds: float) -> Iterator[None]:
    """Work of a rank stands still until a word of the host's memory changes."""
    own = executor.ranks[rank]
    word = own.memory.host_bytes(8)

    def wait() -> None:
        own.enter()
        # At least 1: what flags of 0 mean.
        own.check(own.driver.cuStreamWaitValue32(own.stream.handle, word.ctypes.data, 1, 0))

    executor._threads.run(lambda index: wait() if index == rank else None)
    release = threading.Timer(seconds, lambda: ctypes.memset(word.ctypes.data, 1, 1))
    release.start()
    try:
        yield
    finally:
        release.join()
        time.sleep(0.1)


@contextlib.contextmanager
def raises_within(seconds: float, match: str) -> Iterator[None]:
    started = time.monotonic()
    with pytest.raises(DeviceError, match=match):
        yield
    assert time.monotonic() - started < seconds


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_rank_whose_launch_raises(session: Session, ahead: int) -> None:
    executor = executor_of(session)

    def fail(*_: object) -> None:
        raise DeviceError("CUDA call failed on rank 1: CUDA_ERROR_LAUNCH_FAILED")

    executor.ranks[1].launch = executor.ranks[1].launch_loop = fail  # type: ignore[method-assign]
    with raises_within(BOUND_S, "failed on rank 1: CUDA_ERROR_LAUNCH_FAILED"):
        ask(session, ahead)
    with raises_within(1, "rank 1"):  # kernels do not wait again
        ask(session, ahead)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_rank_that_stops_between_steps(session: Session, ahead: int) -> None:
    """Its work never comes, and nothing raises there."""
    own = executor_of(session).ranks[1]
    own.launch = own.launch_loop = lambda *_: None  # type: ignore[method-assign]
    for seconds in (BOUND_S, 1):
        with raises_within(seconds, "a kernel of rank 0 gave up waiting for rank 1"):
            ask(session, ahead)


# Where rank 0 stalls the host waits before it queues steps, so none of the other runs ahead.
@pytest.mark.parametrize(("rank", "ahead"), [(0, 0), (1, 0), (1, 3)])
def test_a_rank_that_stalls_longer_than_kernels_wait(
    session: Session, rank: int, ahead: int
) -> None:
    with (
        stalled(executor_of(session), rank, SPIN_S + 2.5),
        raises_within(BOUND_S, f"a kernel of rank {1 - rank} gave up waiting for rank {rank}"),
    ):
        ask(session, ahead)


def test_a_rank_that_stalls_for_less_changes_nothing(session: Session) -> None:
    with stalled(executor_of(session), 1, 1.0):
        output = session.step([4], Sampling())
    assert output.tokens.tolist() == [toy.next_token([1, 2, 3, 4])]


def test_a_rank_that_never_comes_back(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is stuck in the driver: nobody waits for it, not even to close."""
    monkeypatch.setattr(rank_threads, "PATIENCE_S", 1.0)
    executor = executor_of(session)
    with stalled(executor, 1, SPIN_S + 6):
        with raises_within(BOUND_S - 2, "rank 1 has not answered for 1 s"):
            session.step([4], Sampling())
        with raises_within(1, "rank 1 has not answered"):
            session.step([4], Sampling())
        with raises_within(1, "rank 1 has not answered"):
            executor.close()
