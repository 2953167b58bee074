"""Device memory of a CUDA engine, with a driver that allocates on the host: tables, weights."""

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake import make_config

from inkrt.errors import CapacityError, DeviceError, EngineFormatError
from inkrt.runtime.engine_file import EngineCode, FileEntry, StateLayout, StateSpec
from inkrt.runtime.executor.cuda_memory import ALIGNMENT, DeviceMemory
from inkrt.runtime.plan import (
    Kernel,
    KernelParam,
    Launch,
    Plan,
    TableParam,
    TensorParam,
    TensorSpec,
    tables,
)

TABLES = (TableParam((0, 1, 2, 3)), TableParam((3, 3)))


class Host:
    """Memory that is full of ones at first, and the calls of the driver that opening takes."""

    def __init__(self, free: int) -> None:
        self.memory = np.empty(0, np.uint8)
        self.driver = SimpleNamespace(
            cuMemGetInfo=lambda: (0, free, free),
            cuMemAlloc=self.allocate,
            cuMemFree=self.free,
            cuMemsetD8Async=lambda target, value, size, _: self.done(
                ctypes.memset(target, value, size)
            ),
            cuMemcpyHtoDAsync=lambda target, source, size, _: self.done(
                ctypes.memmove(target, source, size)
            ),
            cuMemcpyDtoDAsync=None,
            cuStreamSynchronize=self.done,
        )

    def allocate(self, size: int) -> tuple[int, int]:
        self.memory = np.full(size, 0xFF, np.uint8)
        return 0, self.memory.ctypes.data

    def free(self, address: int) -> tuple[int]:
        assert address == self.memory.ctypes.data
        self.memory = np.empty(0, np.uint8)
        return (0,)

    @staticmethod
    def done(_: object) -> tuple[int]:
        return (0,)


def make_plan(name: str, *params: KernelParam) -> Plan:
    tensors = (
        TensorSpec("ring", "int32", (2, 8), (8, 1), "state", "ring", 0),
        TensorSpec("row", "int32", (8,), (1,), "state", "ring", 32),
        TensorSpec("tokens", "int32", (1,), (1,), "input", "tokens", 0),
        TensorSpec("x", "float32", (4,), (1,), "arena", "", 256),
    )
    kernels = tuple(
        Kernel("c", "k", (1, 1, 1), (1, 1, 1), 1, 0, True, False, (TensorParam(3), *given))
        for given in (params, params[:1])
    )
    launch = Launch("op", "tactic", {}, (), "", 0, kernels)
    return Plan(name, 1, 1, tensors, (launch, launch), 512, {"tokens": 2}, {})


def open_memory(free: int = 1 << 20) -> tuple[DeviceMemory, Host, dict[str, Plan]]:
    plans = {"decode": make_plan("decode", *TABLES), "verify2": make_plan("verify2", TABLES[1])}
    state = StateLayout(2, 4, 1, 3, (StateSpec("ring", "ring", (2, 8), "int32"),))
    host = Host(free)
    memory = DeviceMemory(host.driver, Path(), make_config(state=state), EngineCode(plans), 0)
    return memory, host, plans


@pytest.mark.parametrize(("tp_size", "where"), [(1, ""), (2, " on rank 1")])
def test_a_failing_call_names_the_rank(tp_size: int, where: str) -> None:
    host, plans = Host(1 << 20), {"decode": make_plan("decode", *TABLES)}
    state = StateLayout(2, 4, 1, 3, (StateSpec("ring", "ring", (2, 8), "int32"),))
    config = make_config(state=state, tp_size=tp_size)
    memory = DeviceMemory(host.driver, Path(), config, EngineCode(plans), 0, rank=tp_size - 1)
    host.driver.cuGetErrorName = lambda _: (0, b"CUDA_ERROR_X")
    host.driver.cuGetErrorString = lambda _: (0, None)
    with pytest.raises(DeviceError, match=f"CUDA call failed{where}: CUDA_ERROR_X: "):
        memory.check((700,))


def test_tables_hold_the_addresses_of_their_tensors() -> None:
    memory, _, plans = open_memory()
    places = set()
    for step, plan in plans.items():
        for table in tables(plan):
            address = memory.table_address(step, table)
            assert (address - memory.base) % ALIGNMENT == 0
            places.add(address)
            wanted = [memory.address(step, plan.tensors[index]) for index in table.tensors]
            got = (ctypes.c_uint64 * len(wanted)).from_address(address)
            assert list(got) == wanted
    ring = memory.base + memory.region("state/ring").offset
    first = (ctypes.c_uint64 * 2).from_address(memory.table_address("decode", TABLES[0]))
    assert list(first) == [ring, ring + 32]
    assert len(places) == 3


def test_a_table_of_several_kernels_is_there_once() -> None:
    _, _, plans = open_memory()
    assert [tables(plan) for plan in plans.values()] == [list(TABLES), [TABLES[1]]]
    assert tables(make_plan("none")) == []


def test_tables_count_as_memory() -> None:
    _, host, _ = open_memory()
    needed = len(host.memory)
    open_memory(needed)
    with pytest.raises(CapacityError, match="of GPU memory"):
        open_memory(needed - 1)


def open_with_weights(folder: Path, host: Host, entries: dict[str, tuple[int, int]]) -> None:
    """Open an engine whose plan reads `scale` directly and `packed` through a table.

    Args:
        folder: where the weight file goes: 24 bytes.
        host: whose memory is taken.
        entries: first and last byte of each tensor, as the file's header says.
    """
    header = {
        name: {"dtype": "U8", "shape": [last - first], "data_offsets": [first, last]}
        for name, (first, last) in entries.items()
    }
    text = json.dumps(header).encode()
    path = folder / "rank0-00001-of-00001.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(24)))
    tensors = (
        TensorSpec("scale", "float32", (2,), (1,), "weight", "scale", 0),
        TensorSpec("w", "uint8", (4, 4), (4, 1), "weight", "packed", 0),
        TensorSpec("plain.1", "uint8", (16,), (1,), "weight", "packed", 0),
        TensorSpec("tokens", "int32", (1,), (1,), "input", "tokens", 0),
    )
    kernel = Kernel("c", "k", (1, 1, 1), (1, 1, 1), 1, 0, True, False, (
        TensorParam(0), TableParam((2,)),
    ))  # fmt: skip
    launch = Launch("op", "tactic", {}, (), "", 0, (kernel,))
    plan = Plan("decode", 1, 1, tensors, (launch,), 512, {"tokens": 3}, {})
    state = StateLayout(2, 4, 1, 3, (StateSpec("ring", "ring", (2, 8), "int32"),))
    config = make_config(state=state, files={path.name: FileEntry(1, "")})
    DeviceMemory(host.driver, folder, config, EngineCode({"decode": plan}), 0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"scale": (0, 8)}, "weight packed is missing, its plans read 16"),
        ({"scale": (0, 8), "packed": (8, 23)}, "weight packed has 15 bytes, its plans read 16"),
        ({"scale": (4, 8), "packed": (8, 24)}, "weight scale has 4 bytes, its plans read 8"),
    ],
)
def test_weights_that_are_not_those_of_the_plans(
    tmp_path: Path, entries: dict[str, tuple[int, int]], message: str
) -> None:
    host = Host(1 << 20)
    with pytest.raises(EngineFormatError) as caught:
        open_with_weights(tmp_path, host, entries)
    assert f"is damaged: {message}; rebuild it with: ink-build" in str(caught.value)
    assert len(host.memory) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_memory_is_given_back_when_loading_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    host = Host(1 << 20)

    def load(*_: object) -> float:
        assert len(host.memory) > 24
        raise error

    monkeypatch.setattr(DeviceMemory, "_load", load)
    with pytest.raises(error):
        open_with_weights(tmp_path, host, {"scale": (0, 8), "packed": (8, 24)})
    assert len(host.memory) == 0
