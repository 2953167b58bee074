"""Device memory of a CUDA engine, with a driver that allocates on the host: tables of addresses."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake import make_config

from inkrt.errors import CapacityError
from inkrt.runtime.engine_file import EngineCode, StateLayout, StateSpec
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
