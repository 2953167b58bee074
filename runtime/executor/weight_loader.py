"""Weights from files to the device: file headers, and a loader that overlaps reading and copying.

Weights go from the page cache through pinned memory. Copying out of the page cache is what takes
time, so several threads do it, each with two buffers: it fills one while the other is on its way
over PCIe.
"""

import ctypes
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from inkrt.errors import EngineFormatError

# The best of `perf/cold_start.py --sweep` on an H200: 42 GB/s from the page cache.
CHUNK_BYTES = 4 * 2**20
NUM_READERS = 12


@dataclass(frozen=True, slots=True)
class WeightRegion:
    """Where a tensor stands in a weight file, in bytes."""

    name: str
    path: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """Bytes of one file that go to one place on the device."""

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
                if header_size > path.stat().st_size:
                    raise ValueError(f"a header of {header_size} bytes")
                header = json.loads(file.read(header_size))
            for name, entry in header.items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    if not 0 <= first <= last:
                        raise ValueError(f"{name} from byte {first} to {last}")
                    yield WeightRegion(name, path, 8 + header_size + first, last - first)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFormatError(
                f"{path} is damaged ({error}); copy the engine again or rebuild it"
            ) from None


class WeightLoader:
    """Streams parts of files to the device.

    Args:
        driver: `cuda.bindings.driver`, with a current context.
        check: turns a driver result into its values or raises.
        num_readers: threads.
        chunk_bytes: what a thread reads and copies at once; twice as much is pinned for each.
    """

    def __init__(
        self,
        driver: Any,
        check: Any,
        *,
        num_readers: int = NUM_READERS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._driver = driver
        self._check = check
        self._num_readers = num_readers
        self._chunk_bytes = chunk_bytes

    def load(self, parts: Iterable[WeightChunk], base: int) -> float:
        """Copy every part to `base + device_offset`; gives the rate in GB/s.

        Raises:
            EngineFormatError: a file cannot be read to its end.
            DeviceError: a copy failed.
        """
        started = time.monotonic()
        chunks = [chunk for part in parts for chunk in self._cut(part)]
        num_bytes = sum(chunk.size for chunk in chunks)
        todo = deque(chunks)
        context = self._check(self._driver.cuCtxGetCurrent())
        num_readers = max(min(self._num_readers, len(chunks)), 1)
        with ExitStack() as opened, ThreadPoolExecutor(num_readers) as pool:
            try:
                files = _open_files({chunk.path for chunk in chunks}, opened)
                readers = [
                    pool.submit(self._copy_chunks, todo, files, base, context)
                    for _ in range(num_readers)
                ]
                for reader in readers:
                    reader.result()
            finally:
                todo.clear()  # after an error or an interrupt, no reader goes on
        return num_bytes / max(time.monotonic() - started, 1e-9) / 1e9

    def _cut(self, part: WeightChunk) -> Iterator[WeightChunk]:
        for done in range(0, part.size, self._chunk_bytes):
            size = min(self._chunk_bytes, part.size - done)
            yield WeightChunk(part.path, part.file_offset + done, part.device_offset + done, size)

    def _copy_chunks(
        self, todo: "deque[WeightChunk]", files: dict[Path, int], base: int, context: Any
    ) -> None:
        """Take chunks and copy them until none is left; what one thread does."""
        driver, check = self._driver, self._check
        with ExitStack() as cleanup:
            check(driver.cuCtxSetCurrent(context))
            pinned = int(check(driver.cuMemHostAlloc(2 * self._chunk_bytes, 0)))
            cleanup.callback(driver.cuMemFreeHost, pinned)
            stream = check(driver.cuStreamCreate(0))
            cleanup.callback(driver.cuStreamDestroy, stream)
            events = [check(driver.cuEventCreate(0)) for _ in range(2)]
            for event in events:
                cleanup.callback(driver.cuEventDestroy, event)
            cleanup.callback(driver.cuStreamSynchronize, stream)  # before any of that goes
            for number in cycle(range(2)):
                try:
                    chunk = todo.popleft()
                except IndexError:
                    break
                try:
                    check(driver.cuEventSynchronize(events[number]))
                    source = pinned + number * self._chunk_bytes
                    _read(chunk, files[chunk.path], source)
                    target = base + chunk.device_offset
                    check(driver.cuMemcpyHtoDAsync(target, source, chunk.size, stream))
                    check(driver.cuEventRecord(events[number], stream))
                except BaseException:
                    todo.clear()
                    raise
            check(driver.cuStreamSynchronize(stream))


def _open_files(paths: Iterable[Path], opened: ExitStack) -> dict[Path, int]:
    files = {}
    for path in paths:
        try:
            files[path] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(path, str(error)) from None
        opened.callback(os.close, files[path])
    return files


def _read(chunk: WeightChunk, file: int, address: int) -> None:
    """Read a chunk to a host address."""
    view = memoryview((ctypes.c_char * chunk.size).from_address(address))
    done = 0
    while done < chunk.size:
        try:
            count = os.preadv(file, [view[done:]], chunk.file_offset + done)
        except OSError as error:
            raise _unreadable(chunk.path, str(error)) from None
        if count == 0:
            raise _unreadable(chunk.path, "it ends early, a truncated copy?")
        done += count


def _unreadable(path: Path, why: str) -> EngineFormatError:
    return EngineFormatError(f"cannot read {path} ({why}); copy the engine again")
