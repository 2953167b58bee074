"""Loading weights, with a driver whose copies run as late as they may."""

import ctypes
import json
import threading
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inkrt.errors import DeviceError, EngineFormatError
from inkrt.runtime.executor.weight_loader import WeightChunk, WeightLoader, weight_regions


class Driver:
    """Copies wait in their stream until it, or an event behind them, is waited for."""

    def __init__(self) -> None:
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, list[tuple[int, int, int]]] = {}
        self.events: dict[int, tuple[int, int] | None] = {}
        self.contexts: dict[int, object] = {threading.get_ident(): "context"}
        self.num_done: dict[int, int] = defaultdict(int)
        self.fail_at: int | None = None
        self.num_copies = 0
        self._numbers = count(1)

    def cuCtxGetCurrent(self) -> tuple[int, object]:  # noqa: N802
        return 0, self.contexts[threading.get_ident()]

    def cuCtxSetCurrent(self, context: object) -> tuple[int]:  # noqa: N802
        self.contexts[threading.get_ident()] = context
        return (0,)

    def cuMemHostAlloc(self, size: int, _flags: int) -> tuple[int, int]:  # noqa: N802
        buffer = (ctypes.c_char * size)()
        self.pinned[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cuMemFreeHost(self, address: int) -> tuple[int]:  # noqa: N802
        del self.pinned[address]
        return (0,)

    def cuStreamCreate(self, _flags: int) -> tuple[int, int]:  # noqa: N802
        assert self.contexts[threading.get_ident()] == "context"
        number = next(self._numbers)
        self.streams[number] = []
        return 0, number

    def cuStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        assert self.num_done[stream] == len(self.streams.pop(stream))
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        self._run(stream, len(self.streams[stream]))
        return (0,)

    def cuEventCreate(self, _flags: int) -> tuple[int, int]:  # noqa: N802
        number = next(self._numbers)
        self.events[number] = None
        return 0, number

    def cuEventDestroy(self, event: int) -> tuple[int]:  # noqa: N802
        del self.events[event]
        return (0,)

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:  # noqa: N802
        self.events[event] = stream, len(self.streams[stream])
        return (0,)

    def cuEventSynchronize(self, event: int) -> tuple[int]:  # noqa: N802
        place = self.events[event]
        if place is not None:
            self._run(*place)
        return (0,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        self.num_copies += 1
        if self.num_copies == self.fail_at:
            return (719,)
        self.streams[stream].append((target, source, size))
        return (0,)

    def check(self, result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise DeviceError(f"CUDA error {result[0]}")
        return result[1] if len(result) == 2 else None

    def _run(self, stream: int, end: int) -> None:
        while self.num_done[stream] < end:
            target, source, size = self.streams[stream][self.num_done[stream]]
            ctypes.memmove(target, source, size)
            self.num_done[stream] += 1


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[Path], dict[str, np.ndarray]]:
    """Two safetensors files; sizes around the chunk of 64 bytes, and none at all."""
    generator = np.random.default_rng(1)
    paths, content = [], {}
    for number, sizes in enumerate([[1, 64, 65, 0, 1000], [63, 128, 5000]]):
        header, data, offset = {}, b"", 0
        for size in sizes:
            name = f"weight{number}.{size}"
            content[name] = generator.integers(256, size=size, dtype=np.uint8)
            spot = [offset, offset + size]
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": spot}
            data += content[name].tobytes()
            offset += size
        text = json.dumps(header).encode()
        paths.append(tmp_path / f"{number}.safetensors")
        paths[-1].write_bytes(len(text).to_bytes(8, "little") + text + data)
    return paths, content


def place(paths: list[Path]) -> tuple[list[WeightChunk], dict[str, int], int]:
    """Parts for all tensors, 16 bytes apart; where each goes; bytes in all."""
    parts, offsets, size = [], {}, 0
    for region in weight_regions(paths):
        offsets[region.name] = size
        parts.append(WeightChunk(region.path, region.offset, size, region.size))
        size += region.size + 16
    return parts, offsets, size


@pytest.mark.parametrize("num_readers", [1, 3, 50])
@pytest.mark.parametrize("chunk_bytes", [7, 64, 4096])
def test_every_byte_arrives_and_nothing_is_left(files, num_readers, chunk_bytes) -> None:
    paths, content = files
    parts, offsets, size = place(paths)
    device = np.full(size, 7, np.uint8)
    expected = device.copy()
    for name, values in content.items():
        expected[offsets[name] : offsets[name] + len(values)] = values
    driver = Driver()
    loader = WeightLoader(driver, driver.check, num_readers=num_readers, chunk_bytes=chunk_bytes)
    assert loader.load(parts, device.ctypes.data) > 0
    np.testing.assert_array_equal(device, expected)
    assert (driver.pinned, driver.streams, driver.events) == ({}, {}, {})


def test_a_file_that_ends_early(files) -> None:
    paths, _ = files
    parts, _, size = place(paths)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    device, driver = np.zeros(size, np.uint8), Driver()
    loader = WeightLoader(driver, driver.check, num_readers=3, chunk_bytes=64)
    with pytest.raises(EngineFormatError) as caught:
        loader.load(parts, device.ctypes.data)
    assert str(caught.value) == (
        f"cannot read {paths[1]} (it ends early, a truncated copy?); copy the engine again"
    )
    assert (driver.pinned, driver.streams, driver.events) == ({}, {}, {})


def test_a_file_that_is_missing(files, tmp_path: Path) -> None:
    driver = Driver()
    part = WeightChunk(tmp_path / "none", 0, 0, 10)
    with pytest.raises(EngineFormatError, match=r"cannot read .*none .*No such file"):
        WeightLoader(driver, driver.check).load([part], 0)


def test_a_failing_copy_stops_all_readers(files) -> None:
    paths, _ = files
    parts, _, size = place(paths)
    device, driver = np.zeros(size, np.uint8), Driver()
    driver.fail_at = 5
    loader = WeightLoader(driver, driver.check, num_readers=3, chunk_bytes=1)
    with pytest.raises(DeviceError, match="CUDA error 719"):
        loader.load(parts, device.ctypes.data)
    assert driver.num_copies < 5 + 3
    assert (driver.pinned, driver.streams, driver.events) == ({}, {}, {})


def test_no_parts() -> None:
    driver = Driver()
    assert WeightLoader(driver, driver.check).load([], 0) == 0


def test_damaged_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for content in (
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"{]",
        b"\4" + b"\0" * 7 + b"null",
        (28).to_bytes(8, "little") + b'{"a":{"data_offsets":[8,4]}}',
        (29).to_bytes(8, "little") + b'{"a":{"data_offsets":[-1,4]}}',
    ):
        path.write_bytes(content)
        with pytest.raises(EngineFormatError, match=r"a.safetensors is damaged"):
            list(weight_regions([path]))
