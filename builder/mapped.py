"""Files mapped into memory to be read, whose pages are given back once they are read.

Pages of a mapped file count as memory of the process for as long as it keeps them. A build reads
hundreds of gigabytes once each, so it says what it is about to read and what it is done with; to
read released bytes again is allowed and only costs time. Knows bytes, not tensors of models.
"""

import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


class MappedFile:
    """A file whose bytes are tensors that nobody may write to.

    Raises:
        OSError: from the constructor, if it cannot be opened.
        ValueError: from the constructor, if it is empty.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Shared and read-only: a private one that can be written to would count as memory that
            # may be needed, of which a small machine has not enough for a large shard.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Bytes from `offset` on as a vector; a view but for where they are not aligned."""
        found = self._bytes[offset : offset + num_bytes]
        if offset % dtype.itemsize:
            found = found.clone()
        return found.view(dtype)

    def advise(self, advice: int, first: int, last: int) -> None:
        """Tell the system about the pages of the bytes from `first` to before `last`."""
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        if start < last:
            self._map.madvise(advice, start, min(last, len(self._map)) - start)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a mapped file: all that reading a piece of a tensor touches, and maybe others.

    Attributes:
        file: that is mapped.
        first: offset of the first byte.
        last: offset behind the last one.
    """

    file: MappedFile
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        """Most memory that reading it takes."""
        return self.last - self.first

    def expect(self) -> None:
        """Start reading it from the disk."""
        self.file.advise(mmap.MADV_WILLNEED, self.first, self.last)

    def release(self) -> None:
        """Give its memory back."""
        self.file.advise(mmap.MADV_DONTNEED, self.first, self.last)


def extent(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[int, int]:
    """Places, in row-major order, of the first and behind the last element of a piece.

    Args:
        shape: of the whole.
        index: one slice per dimension, with positive steps.

    Returns:
        Both 0 if the piece is empty.
    """
    first = last = 0
    for size, part in zip(shape, index, strict=True):
        places = range(size)[part]
        if not places:
            return 0, 0
        first, last = first * size + places[0], last * size + places[-1]
    return first, last + 1
