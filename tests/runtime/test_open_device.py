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
from inkrt.runtime.executor import Sampling, StepInput, cuda
from inkrt.runtime.executor.cuda import _open_device, _require_driver
from inkrt.runtime.executor.decode_queue import DecodeQueue
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
    assert _open_device(gpu(9, 0, 132), 0, ENGINE, config).name == "GPU 0"
    assert _open_device(gpu(10, 0, 148), 1, ENGINE, make_config(target="sm_100a")).name == "GPU 1"


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
        _open_device(device, 0, ENGINE, make_config(target="sm_90a"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_gpu_is_said() -> None:
    with pytest.raises(DeviceError, match=r"no GPU is usable here \(no driver\)"):
        _open_device(no_gpu, 0, ENGINE, make_config(target="sm_90a"))


@pytest.mark.parametrize("version", [13_000, 13_020, 14_000])
def test_a_driver_as_new_as_the_kernels_is_taken(version: int) -> None:
    _require_driver(SimpleNamespace(cuDriverGetVersion=lambda: (0, version)), ENGINE)


def test_an_older_driver_is_refused() -> None:
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, 12_080))
    with pytest.raises(EngineMismatchError) as caught:
        _require_driver(driver, ENGINE)
    assert str(caught.value) == (
        "engine engine needs a driver for CUDA 13.0 or newer, this one is for CUDA 12.8; update it "
        "to release 580 or newer"
    )


def test_a_driver_that_is_missing_is_left_to_the_device() -> None:
    def fail() -> None:
        raise RuntimeError("libcuda.so.1 is missing")

    _require_driver(SimpleNamespace(cuDriverGetVersion=fail), ENGINE)


def test_several_ranks_are_refused() -> None:
    with pytest.raises(EngineMismatchError, match="is for 2 ranks"):
        _open_device(gpu(9, 0, 132), 0, ENGINE, make_config(target="sm_90a", tp_size=2))


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
    plan = Plan(
        "decode", 1, 1, (TensorSpec("x", "uint8", (1,), (1,), "arena", "", 0),), (), 0, {}, {}
    )
    executor._plans = {"decode": plan}
    executor._context, executor._check = "context", lambda _: None
    executor._driver = SimpleNamespace(cuCtxSetCurrent=enter, cuStreamSynchronize=use)
    executor._stream = SimpleNamespace(handle=0)
    executor._queue = DecodeQueue(executor)
    executor.memory = SimpleNamespace(base=1, copy_entries=use)  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsedError):
        pool.submit(call, executor).result()
    assert used == ["context"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError])
def test_an_engine_that_does_not_open_leaves_no_memory_taken(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    pytest.importorskip("cuda.core")
    closed = []
    config = make_config(target="sm_90a", steps=(StepSpec("decode", 1, 1),))
    plan = make_plan(config.steps[0], config)
    memory = SimpleNamespace(
        check=None, input_bytes=8, host_bytes=lambda size: np.zeros(max(size, 8), np.uint8),
        close=lambda: closed.append(True),
    )  # fmt: skip
    device = SimpleNamespace(create_stream=lambda: SimpleNamespace(handle=0))

    def capture(*_: object, **_advances: bool) -> None:
        raise error

    monkeypatch.setattr(cuda, "_open_device", lambda *_: device)
    monkeypatch.setattr(cuda, "read_code", lambda *_: EngineCode({"decode": plan}))
    monkeypatch.setattr(cuda, "DeviceMemory", lambda *_: memory)
    monkeypatch.setattr(cuda.CudaExecutor, "_capture", capture)
    with pytest.raises(error):
        cuda.CudaExecutor(ENGINE, config)
    assert closed == [True]
