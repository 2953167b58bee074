"""Weights from files to the device: file headers, and a loader that overlaps reading and copying.

Weights go from the page cache through pinned buffers: reading threads fill buffers while earlier
ones are on their way over PCIe, so that neither waits for the other.
"""

import ctypes
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from inkrt.errors import EngineFormatError

CHUNK_BYTES = 32 * 2**20
NUM_BUFFERS = 12
NUM_READERS = 8


@dataclass(frozen=True, slots=True)
class WeightRegion:
    """Where a tensor stands in a weight file, in bytes."""

    name: str
    path: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """A run of bytes of one file that goes to one place on the device."""

    path: Path
    file_offset: int
    device_offset: int
    size: int


def weight_regions(paths: list[Path]) -> Iterator[WeightRegion]:
    """Every tensor of safetensors files.

    Raises:
        EngineFormatError: a header is damaged.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_size))
            for name, entry in header.items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    yield WeightRegion(name, path, 8 + header_size + first, last - first)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineFormatError(
                f"{path} is damaged ({error}); copy the engine again or rebuild it"
            ) from None


class WeightLoader:
    """Streams chunks of files to the device.

    Args:
        driver: `cuda.bindings.driver`.
        check: turns a driver result into its values or raises.
    """

    def __init__(self, driver: Any, check: Any) -> None:
        self._driver = driver
        self._check = check

    def load(self, chunks: list[WeightChunk], base: int, stream: Any) -> float:
        """Copy every chunk to `base + device_offset`; gives the rate in GB/s.

        Raises:
            EngineFormatError: a file cannot be read to its end.
        """
        driver, check = self._driver, self._check
        started = time.monotonic()
        pinned = check(driver.cuMemHostAlloc(NUM_BUFFERS * CHUNK_BYTES, 0))
        events = [check(driver.cuEventCreate(2)) for _ in range(NUM_BUFFERS)]
        free: Queue[int] = Queue()
        ready: Queue[tuple[int, WeightChunk] | Exception] = Queue()
        todo: Queue[WeightChunk] = Queue()
        for number in range(NUM_BUFFERS):
            free.put(number)
        for chunk in chunks:
            todo.put(chunk)
        stop = threading.Event()
        readers = [
            threading.Thread(
                target=_read_chunks, args=(todo, free, ready, int(pinned), stop), daemon=True
            )
            for _ in range(min(NUM_READERS, max(len(chunks), 1)))
        ]
        for reader in readers:
            reader.start()
        in_flight: list[int] = []
        try:
            for _ in chunks:
                item = ready.get()
                if isinstance(item, Exception):
                    raise item
                number, chunk = item
                source = int(pinned) + number * CHUNK_BYTES
                check(
                    driver.cuMemcpyHtoDAsync(base + chunk.device_offset, source, chunk.size, stream)
                )
                check(driver.cuEventRecord(events[number], stream))
                in_flight.append(number)
                if len(in_flight) > NUM_BUFFERS // 2:
                    oldest = in_flight.pop(0)
                    check(driver.cuEventSynchronize(events[oldest]))
                    free.put(oldest)
            check(driver.cuStreamSynchronize(stream))
        finally:
            stop.set()
            for _ in readers:
                free.put(-1)
            for reader in readers:
                reader.join()
            check(driver.cuStreamSynchronize(stream))
            for event in events:
                check(driver.cuEventDestroy(event))
            check(driver.cuMemFreeHost(pinned))
        return sum(chunk.size for chunk in chunks) / max(time.monotonic() - started, 1e-9) / 1e9


def _read_chunks(
    todo: "Queue[WeightChunk]",
    free: "Queue[int]",
    ready: "Queue[tuple[int, WeightChunk] | Exception]",
    pinned: int,
    stop: threading.Event,
) -> None:
    """Fill pinned buffers with chunks until there are none left."""
    while not stop.is_set() and not todo.empty():
        number = free.get()
        if number < 0:
            return
        try:
            chunk = todo.get_nowait()
        except Empty:  # another reader took the last one
            free.put(number)
            return
        buffer = (ctypes.c_char * chunk.size).from_address(pinned + number * CHUNK_BYTES)
        try:
            descriptor = os.open(chunk.path, os.O_RDONLY)
            try:
                done = 0
                view = memoryview(buffer)
                while done < chunk.size:
                    count = os.preadv(descriptor, [view[done:]], chunk.file_offset + done)
                    if count == 0:
                        raise EngineFormatError(
                            f"{chunk.path} ends early (truncated copy?); copy the engine again"
                        )
                    done += count
            finally:
                os.close(descriptor)
        except (OSError, EngineFormatError) as error:
            ready.put(error)
            return
        ready.put((number, chunk))
