"""How ranks reach each other: the inbox of every rank, and the table by which kernels find them.

The layouts are those of `plugins/all_reduce/push.cuh` and `lamport.cuh`. Nothing here needs a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import ConfigError
from inkrt.runtime.plan import INBOX_ALIGNMENT, INBOX_BUFFERS, PEER_WORDS

# Every byte of an inbox before the first launch.
EMPTY_BYTE = 0xFF
_ERROR_PEER = 3


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Device addresses of what other ranks write to: the inbox and the error word of a rank."""

    inbox: int
    error: int


@dataclass(frozen=True, slots=True)
class RankSlice:
    """One rank of an engine, which runs alone, what it sends coming back to itself."""

    rank: int
    num_ranks: int

    @classmethod
    def parse(cls, text: str) -> "RankSlice":
        """Of "R/N".

        Raises:
            ConfigError: it is not that.
        """
        parts = text.split("/")
        if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts):
            rank, num_ranks = map(int, parts)
            if rank < num_ranks:
                return cls(rank, num_ranks)
        raise ConfigError(
            f"a rank slice is R/N, rank R of N, counted from 0 (say 0/4), got {text!r}"
        )

    def __str__(self) -> str:
        return f"rank slice {self.rank}/{self.num_ranks}, collectives looped back"


def inbox_size(slot_bytes: int, num_ranks: int) -> int:
    """Bytes of an inbox without its state."""
    return INBOX_BUFFERS * num_ranks * slot_bytes


def peer_table(
    rank: int, slot_bytes: int, turns: int, mailboxes: Sequence[Mailbox]
) -> NDArray[np.uint64]:
    """The table of a rank.

    Args:
        rank: of the table's owner.
        slot_bytes: of a slot of an inbox.
        turns: address of the owner's turns.
        mailboxes: of all ranks.
    """
    head = (rank, slot_bytes, turns)
    assert len(head) == PEER_WORDS
    inboxes = [mailbox.inbox for mailbox in mailboxes]
    errors = [mailbox.error for mailbox in mailboxes]
    return np.array([*head, *inboxes, *errors], np.uint64)


def looped_back(own: Mailbox, part: RankSlice, slot_bytes: int) -> list[Mailbox]:
    """Mailboxes of all ranks where there is one: what goes to rank r arrives as if r had sent it.

    A rank writes into the slot with its own number of every inbox. So the inbox that stands for
    rank r begins (r - rank) slots behind the real one, which makes it slot r of that.
    """
    assert slot_bytes % INBOX_ALIGNMENT == 0
    return [
        Mailbox(own.inbox + (rank - part.rank) * slot_bytes, own.error)
        for rank in range(part.num_ranks)
    ]


def describe_error(code: int) -> str:
    """What an error word of a kernel says, in words; which rank gave up, and whom it waited for."""
    kind, awaited, reporter = code & 0xFF, code >> 8 & 0xFF, code >> 16 & 0xFF
    where = f" of rank {reporter - 1}" if reporter else ""
    if kind == _ERROR_PEER:
        return (
            f"a kernel{where} gave up waiting for rank {awaited} (error word {code:#x}); that "
            f"rank's GPU has failed or is held up: look at nvidia-smi and open the engine again"
        )
    return (
        f"a kernel{where} gave up waiting (error word {code:#x}); another process may occupy "
        f"multiprocessors of this GPU: close it and open the engine again"
    )
