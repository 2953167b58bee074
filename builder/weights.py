"""Streaming the weights of all ranks into their files, by several threads.

Every rank's files are written one after the other by a thread of its own, which hashes; pieces are
read, packed and written by a pool that all ranks share (torch, NumPy, hashlib and the system's
calls release the interpreter's lock). A rank starts no piece while those that it has not hashed yet
would take more memory than its share of MEMORY_BYTES, so memory does not grow with the model, and
ranks stay near each other in the checkpoint. What is in the files depends on none of that.
"""

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.pack import PackedTensor, header_of, pack, split_files
from inkrt.builder.pieces import Piece, cut
from inkrt.builder.quantize import Quantizer
from inkrt.builder.writer import Staging
from inkrt.engines.interface import WeightSource
from inkrt.runtime.engine_file import FileEntry

# Of all pieces that are being made: together with what Python, torch and the graphs take (0.6 GiB)
# well under two GiB.
MEMORY_BYTES = 5 * 2**28
MAX_WORKERS = 64

# Bytes that are done, and bytes in all; called by any thread, one at a time.
Meter = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of a rank.

    Attributes:
        header: its first bytes.
        pieces: that follow one behind the other.
    """

    name: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(piece.tensor.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What is to be written.

    Attributes:
        checkpoint: where it comes from.
        ranks: files of every rank.
    """

    checkpoint: CheckpointSource
    ranks: tuple[tuple[WeightFile, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for files in self.ranks for file in files)

    @property
    def share_bytes(self) -> int:
        """Memory for the pieces of a rank, unless a single one takes more."""
        return MEMORY_BYTES // len(self.ranks)

    def peak_bytes(self) -> int:
        """Most memory that pieces take at a time, mapped pages of the checkpoint included."""
        return sum(
            max(
                piece.work_bytes(self.checkpoint) if piece else self.share_bytes
                for piece in (None, *(piece for file in files for piece in file.pieces))
            )
            for files in self.ranks
        )


def plan_weights(
    checkpoint: CheckpointSource,
    tensors: list[PackedTensor],
    sources: Sequence[Mapping[str, WeightSource]],
) -> WeightPlan:
    """Lay out the files of all ranks; reads no data.

    Args:
        checkpoint: where parameters come from.
        tensors: of every rank's files, in order.
        sources: by parameter, of every rank.
    """
    files = split_files(tensors)
    ranks = []
    for rank, own in enumerate(sources):
        of_rank = []
        for number, content in enumerate(files, start=1):
            name = f"rank{rank}-{number:05}-of-{len(files):05}.safetensors"
            pieces = tuple(piece for tensor in content for piece in cut(tensor, own))
            of_rank.append(WeightFile(name, header_of(content), pieces))
        ranks.append(tuple(of_rank))
    return WeightPlan(checkpoint, tuple(ranks))


@dataclass(slots=True)
class Seconds:
    """Where time went, added up over threads."""

    packing: float = 0.0
    writing: float = 0.0
    hashing: float = 0.0


@dataclass(slots=True)
class WeightWriter:
    """Writes the files of a plan that are not finished yet.

    Attributes:
        staging: where to.
        workers: threads that make pieces.
        meter: told about progress.
        quantizers: of every rank, with account of what was rounded.
        seconds: where time went.
    """

    plan: WeightPlan
    staging: Staging
    workers: int
    meter: Meter = lambda _done, _total: None
    quantizers: list[Quantizer] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    _done_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write them.

        Raises:
            InkError: a tensor is unfit.
            OSError: reading or writing failed.
        """
        ranks = self.plan.ranks
        self.quantizers = [Quantizer() for _ in ranks]
        self._advance(0)
        with (
            ThreadPoolExecutor(self.workers, "packing", _use_one_thread) as pool,
            ThreadPoolExecutor(len(ranks), "rank", _use_one_thread) as lanes,
        ):
            running = [lanes.submit(self._write_rank, rank, pool) for rank in range(len(ranks))]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()  # also when the user interrupts
        for future in running:
            if (error := future.exception()) and not isinstance(error, _StoppedError):
                raise error

    def quantization(self) -> list[str]:
        """What was lost where matrices were quantized, see `Quantizer.report`."""
        total = Quantizer()
        for quantizer in self.quantizers:
            total.add(quantizer)
        return total.report()

    def _write_rank(self, rank: int, pool: ThreadPoolExecutor) -> None:
        for file in self.plan.ranks[rank]:
            if file.name in self.staging.finished:
                self._advance(file.num_bytes)
            else:
                self._write_file(rank, file, pool)

    def _write_file(self, rank: int, file: WeightFile, pool: ThreadPoolExecutor) -> None:
        digest = hashlib.sha256(file.header)
        started: deque[tuple[Future[memoryview], Piece, int]] = deque()
        memory, offset = 0, len(file.header)

        def finish_first() -> None:
            nonlocal memory
            future, piece, work = started.popleft()
            data = future.result()
            begun = time.monotonic()
            digest.update(data)
            del data
            for span in piece.spans(self.plan.checkpoint):
                span.release()
            with self._lock:
                self.seconds.hashing += time.monotonic() - begun
            self._advance(piece.tensor.num_bytes)
            memory -= work

        path = self.staging.unfinished(file.name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_at(descriptor, memoryview(file.header), 0)
            self._advance(len(file.header))
            for piece in file.pieces:
                work = piece.work_bytes(self.plan.checkpoint)
                while started and memory + work > self.plan.share_bytes:
                    finish_first()
                if self._stop.is_set():
                    raise _StoppedError
                memory += work
                for span in piece.spans(self.plan.checkpoint):
                    span.expect()
                future = self._submit(pool, rank, piece, descriptor, offset)
                started.append((future, piece, work))
                offset += piece.tensor.num_bytes
            while started:
                finish_first()
            os.fsync(descriptor)
        finally:
            for future, *_ in started:
                future.cancel()
            wait([future for future, *_ in started])  # before the descriptor is another file's
            os.close(descriptor)
        self.staging.finish(file.name, FileEntry(offset, digest.hexdigest()))

    def _submit(
        self, pool: ThreadPoolExecutor, rank: int, piece: Piece, descriptor: int, offset: int
    ) -> "Future[memoryview]":
        """Have a piece made; those that share a quantized matrix one after the other, here."""
        if not piece.is_quantized:
            return pool.submit(self._make, rank, piece, descriptor, offset)
        future: Future[memoryview] = Future()
        future.set_result(self._make(rank, piece, descriptor, offset))
        return future

    def _make(self, rank: int, piece: Piece, descriptor: int, offset: int) -> memoryview:
        if self._stop.is_set():
            raise _StoppedError
        begun = time.monotonic()
        data = pack(piece.tensor, self.plan.checkpoint, piece.sources, self.quantizers[rank])
        content = data.flatten().view(torch.uint8).numpy().data
        packed = time.monotonic()
        _write_at(descriptor, content, offset)
        with self._lock:
            self.seconds.packing += packed - begun
            self.seconds.writing += time.monotonic() - packed
        return content

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            self.meter(self._done_bytes, self.plan.num_bytes)


class _StoppedError(Exception):
    """Another thread has failed."""


def default_workers() -> int:
    """Threads for the processors that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(count, MAX_WORKERS)


def _use_one_thread() -> None:
    """Pieces are what runs in parallel, not the operations inside of them."""
    torch.set_num_threads(1)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
