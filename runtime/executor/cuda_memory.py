"""Device memory of a rank: one allocation for all that plans refer to by an address."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import CapacityError, DeviceError, EngineFormatError
from inkrt.runtime.engine_file import EngineCode, EngineConfig, weight_files
from inkrt.runtime.executor.peers import EMPTY_BYTE, Mailbox, inbox_size, peer_table
from inkrt.runtime.executor.round_state import ROUND_STATE
from inkrt.runtime.executor.weight_loader import (
    WeightChunk,
    WeightLoader,
    WeightRegion,
    weight_regions,
)
from inkrt.runtime.plan import (
    ADDRESS_BYTES,
    DTYPE_BYTES,
    PEER_WORDS,
    ROUND_STATE_STORAGE,
    TURN_BYTES,
    Plan,
    TableParam,
    TensorParam,
    TensorSpec,
    slot_bytes,
    tables,
    weight_specs,
)

ALIGNMENT = 256
# The kernels between the steps of a round, in engines that can run rounds by themselves.
ROUND_CODE = "round"
ROUND_REGION = "rounds"


@dataclass(frozen=True, slots=True)
class Region:
    """A named piece of one allocation: offset and size in bytes."""

    offset: int
    size: int


class Arena:
    """One device allocation cut into named pieces."""

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self.size = 0

    def add(self, name: str, size: int) -> None:
        """Append a piece; offsets are ALIGNMENT-aligned."""
        assert name not in self.regions, f"{name} is allocated twice"
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.regions[name] = Region(offset, size)
        self.size = offset + size


def require_free(needed: int, free: int, what: str) -> None:
    """Raise CapacityError unless `needed` bytes are free on the device."""
    if needed > free:
        raise CapacityError(
            f"{what} needs {needed / 2**30:.2f} GiB of GPU memory, {free / 2**30:.2f} GiB are "
            f"free; free some, or rebuild with a smaller --max-seq-len or --max-batch-size"
        )


class DeviceMemory:
    """All device memory of a rank in one allocation, and its pinned host memory.

    Attributes:
        rank: whose memory it is.
        base: device address of the allocation; 0 once it is freed.
        inputs: device address of the block of step inputs.
        input_offsets: byte offset of every input in that block.
        input_dtypes: dtype of every input, as in plans.
        input_bytes: size of that block.
        error: device address of the error word that kernels share.
        slot_bytes: of a slot of the inbox, what one rank sends another at once; 0 if none does.
        load_rate: GB/s at which weights were loaded; 0 if there were none.

    Raises:
        CapacityError: from the constructor, if the engine does not fit into free memory.
        EngineFormatError: from the constructor, if a weight file is damaged or holds other weights
            than the plans read.
    """

    def __init__(
        self,
        driver: Any,
        folder: Path,
        config: EngineConfig,
        code: EngineCode,
        stream: Any,
        rank: int = 0,
    ) -> None:
        self.rank = rank
        self._driver = driver
        self._config = config
        self._stream = stream
        self._pinned: list[int] = []
        self._arena = Arena()
        self.base = 0
        paths = [folder / name for name in weight_files(config, rank)]
        weights = list(weight_regions(paths))
        sizes = {weight.name: weight.size for weight in weights}
        specs = weight_specs(code.plans)
        sizes |= {name: num_bytes(specs[name]) for name in code.template_of}
        _require_weights(folder, config, sizes, code.plans)
        self._plan(sizes, code)
        free, _ = self.check(driver.cuMemGetInfo())
        whose = f"rank {rank} of " if config.tp_size > 1 else ""
        require_free(self._arena.size, free, f"{whose}engine {folder}")
        self.base = int(self.check(driver.cuMemAlloc(self._arena.size)))
        regions = self._arena.regions
        self.inputs = self.base + regions["inputs"].offset
        self.error = self.base + regions["error"].offset
        try:
            self._fill(code.all_plans)
            self._write_tables(code.plans)
            self.load_rate = self._load(weights)
            self._fill_dummies(code)
        except BaseException:
            self.close()  # nobody else can
            raise

    def address(self, step: str, spec: TensorSpec) -> int:
        """Device address of a tensor of a step's plan."""
        regions = self._arena.regions
        if spec.space == "scratch" and spec.name.startswith("error."):
            return self.error
        if spec.storage == ROUND_STATE_STORAGE:
            return self.base + regions[ROUND_REGION].offset
        if spec.space == "input":
            return self.inputs + self.input_offsets[spec.storage] + spec.offset
        name = {
            "scratch": f"scratch/{step}",
            "arena": "arena",
        }.get(spec.space, f"{spec.space}/{spec.storage}")
        return self.base + regions[name].offset + spec.offset

    def table_address(self, step: str, table: TableParam) -> int:
        """Device address of a table of a step's plan."""
        return self.base + self.region(self._tables[step, table]).offset

    @property
    def mailbox(self) -> Mailbox:
        """What other ranks write to."""
        inbox = self.region("inbox").offset if self.slot_bytes else 0
        return Mailbox(self.base + inbox, self.error)

    @property
    def peers(self) -> int:
        """Device address of the table of peers."""
        return self.base + self.region("peers").offset

    def connect(self, mailboxes: Sequence[Mailbox]) -> None:
        """Write the table of peers from the mailboxes of all ranks."""
        if not self.slot_bytes:
            return
        turns = self.base + self.region("turns").offset
        table = peer_table(self.rank, self.slot_bytes, turns, mailboxes)
        self._send(self.peers, table.ctypes.data, table.nbytes)
        self.check(self._driver.cuStreamSynchronize(self._stream))

    def region(self, name: str) -> Region:
        """A piece of the allocation, e.g. "state/layers.0.attn.k_cache"."""
        return self._arena.regions[name]

    def copy_entries(self, kind: str, source: int, target: int) -> None:
        """Copy one slot or page of every state buffer of a kind."""
        for spec in self._config.state.buffers:
            if spec.kind != kind:
                continue
            region = self.region(f"state/{spec.name}")
            size = region.size // spec.shape[0]
            start = self.base + region.offset
            self.check(
                self._driver.cuMemcpyDtoDAsync(
                    start + target * size, start + source * size, size, self._stream
                )
            )

    def fill_state(self, value: int) -> None:
        """Set every byte of all state; for benchmarks, which have no real context."""
        for name, region in self._arena.regions.items():
            if name.startswith("state/"):
                self._set(self.base + region.offset, value, region.size)

    def host_bytes(self, size: int) -> NDArray[np.uint8]:
        """Zeroed pinned host memory, which kernels can address too."""
        address = int(self.check(self._driver.cuMemHostAlloc(max(size, 8), 0)))
        self._pinned.append(address)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        array[:] = 0
        return array

    def check(self, result: Any) -> Any:
        """Values of a driver call.

        Raises:
            DeviceError: the call failed.
        """
        status, *values = result
        if status:
            _, name = self._driver.cuGetErrorName(status)
            _, text = self._driver.cuGetErrorString(status)
            where = f" on rank {self.rank}" if self._config.tp_size > 1 else ""
            why = f"{(name or b'unknown').decode()}: {(text or b'').decode()}"
            raise DeviceError(f"CUDA call failed{where}: {why}")
        return values[0] if len(values) == 1 else tuple(values)

    def close(self) -> None:
        """Free everything; may be called again."""
        if self.base:
            self.check(self._driver.cuMemFree(self.base))
            self.base = 0
        while self._pinned:
            self.check(self._driver.cuMemFreeHost(self._pinned.pop()))

    def _plan(self, weight_sizes: dict[str, int], code: EngineCode) -> None:
        arena, plans = self._arena, code.plans
        for weight, size in weight_sizes.items():
            arena.add(f"weight/{weight}", size)
        for spec in self._config.state.buffers:
            size = math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]
            arena.add(f"state/{spec.name}", size)
        arena.add("arena", max(plan.arena_bytes for plan in plans.values()))
        for name, plan in code.all_plans.items():
            arena.add(f"scratch/{name}", plan.scratch_bytes)
        arena.add("error", 4)
        if ROUND_CODE in code.cubins:
            arena.add(ROUND_REGION, ROUND_STATE.itemsize)
        self.slot_bytes = slot_bytes(plans.values())
        if self.slot_bytes:
            num_ranks = self._config.tp_size
            arena.add("turns", TURN_BYTES)
            arena.add("inbox", inbox_size(self.slot_bytes, num_ranks))
            arena.add("peers", (PEER_WORDS + 2 * num_ranks) * ADDRESS_BYTES)
        self._tables = {
            (step, table): f"table/{step}/{number}"
            for step, plan in plans.items()
            for number, table in enumerate(tables(plan))
        }
        for (_, table), name in self._tables.items():
            arena.add(name, len(table.tensors) * ADDRESS_BYTES)
        input_sizes: dict[str, int] = {}
        self.input_dtypes: dict[str, str] = {}
        for plan in plans.values():
            for name, index in plan.inputs.items():
                spec_of_input = plan.tensors[index]
                size = num_bytes(spec_of_input)
                input_sizes[name] = max(input_sizes.get(name, 0), size)
                self.input_dtypes[name] = spec_of_input.dtype
        self.input_offsets: dict[str, int] = {}
        self.input_bytes = 0
        for name, size in input_sizes.items():
            self.input_offsets[name] = self.input_bytes
            self.input_bytes += -(-size // 16) * 16
        arena.add("inputs", self.input_bytes)

    def _fill(self, plans: dict[str, Plan]) -> None:
        """Zero everything that is not a weight, then set what kernels expect in scratch."""
        for name, region in self._arena.regions.items():
            if not name.startswith("weight/") and region.size:
                self._set(self.base + region.offset, 0, region.size)
        for step, plan in plans.items():
            start = self.base + self.region(f"scratch/{step}").offset
            for fill in plan.fills:
                self._set(start + fill.offset, fill.value, fill.size)
        if self.slot_bytes:
            self._set(self.mailbox.inbox, EMPTY_BYTE, self.region("inbox").size)

    def _write_tables(self, plans: dict[str, Plan]) -> None:
        """Write the tensors' addresses, which are fixed, into the tables."""
        for step, table in self._tables:
            specs = [plans[step].tensors[index] for index in table.tensors]
            rows = np.array([self.address(step, spec) for spec in specs], np.uint64)
            address = self.table_address(step, table)
            self._send(address, rows.ctypes.data, rows.nbytes)

    def _fill_dummies(self, code: EngineCode) -> None:
        """Repeat each template over the weights that it stands for, doubling what is there."""
        copy = self._driver.cuMemcpyDtoDAsync
        for name, kind in code.template_of.items():
            region, template = self.region(f"weight/{name}"), code.templates[kind]
            start = self.base + region.offset
            done = min(len(template), region.size)
            self._send(start, template, done)
            while done < region.size:
                # Whole templates only, so that every repetition begins at one's start.
                count = min(done, region.size - done)
                self.check(copy(start + done, start, count, self._stream))
                done += count
        self.check(self._driver.cuStreamSynchronize(self._stream))

    # On the executor's stream, which does not wait for the default one: the synchronous forms of
    # these may return before the device has done them.
    def _set(self, address: int, value: int, size: int) -> None:
        self.check(self._driver.cuMemsetD8Async(address, value, size, self._stream))

    def _send(self, address: int, source: int | bytes, size: int) -> None:
        """From memory that is not pinned: it is free again when this returns."""
        self.check(self._driver.cuMemcpyHtoDAsync(address, source, size, self._stream))

    def _load(self, weights: list[WeightRegion]) -> float:
        if not weights:
            return 0.0
        parts = [
            WeightChunk(
                weight.path, weight.offset, self.region(f"weight/{weight.name}").offset, weight.size
            )
            for weight in weights
        ]
        return WeightLoader(self._driver, self.check).load(parts, self.base)


def _require_weights(
    folder: Path, config: EngineConfig, sizes: dict[str, int], plans: dict[str, Plan]
) -> None:
    """Raise EngineFormatError unless all weights that kernels read have the sizes they expect."""
    specs = weight_specs(plans)
    for plan in plans.values():
        for param in (p for x in plan.launches for kernel in x.kernels for p in kernel.params):
            indices = param.tensors if isinstance(param, TableParam) else ()
            indices = (param.tensor,) if isinstance(param, TensorParam) else indices
            for spec in (plan.tensors[index] for index in indices):
                name = spec.storage
                if spec.space == "weight" and sizes.get(name) != num_bytes(specs[name]):
                    found = f"has {sizes[name]} bytes" if name in sizes else "is missing"
                    raise EngineFormatError(
                        f"engine {folder} is damaged: weight {name} {found}, its plans read "
                        f"{num_bytes(specs[name])}; rebuild it with: {config.rebuild_command}"
                    )


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]
