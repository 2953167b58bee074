"""Who owns which slot and which pages: bookkeeping without a device.

State is indexed by position (docs/architecture.md), so going back is setting a length. A sequence
has one slot (its rings) and a page table. Pages are shared between forks and copied by the first
that writes. This module moves no data: it says which pages and slots the caller must copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from inkrt.errors import CapacityError, RequestError
from inkrt.runtime.engine_file import StateLayout
from inkrt.runtime.rebuild import rebuild_with


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The caller must copy page `source` to page `target` before it runs the step."""

    source: int
    target: int


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one session; only its StateManager changes it.

    Attributes:
        slot: ring slot.
        pages: page table.
        length: committed positions.
        high_water: one more than the furthest position a step may have written in the slot.
        num_reserved: positions from `length` that a running step may write.
        written: `high_water` without the running step.
        replaced: shared pages that the running step's reservation has replaced by own copies, by
            index in `pages`; they stay referenced until the reservation ends.
        is_open: false after `free`.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    high_water: int = 0
    num_reserved: int = 0
    written: int = 0
    replaced: dict[int, int] = field(default_factory=dict)
    is_open: bool = True


class StateManager:
    """Slots and pages of one engine.

    A step is `reserve`, the copies it asks for, the run, then `commit`; or `cancel` if the run
    failed. Every method either takes effect as a whole or raises and changes nothing. Not
    thread-safe.

    Args:
        layout: numbers of slots, pages, positions per page, and how far sessions can go back.
        max_seq_len: positions per session.
        rebuild_command: of the engine, for error messages.

    Attributes:
        is_closed: set when the engine closes; from then on sequences can only be freed.
    """

    def __init__(self, layout: StateLayout, max_seq_len: int, rebuild_command: str) -> None:
        self.layout = layout
        self.max_seq_len = max_seq_len
        self.is_closed = False
        self._rebuild_command = rebuild_command
        # Taken from the end: low ids first.
        self._free_slots = list(reversed(range(layout.num_slots)))
        self._free_pages = list(reversed(range(layout.num_pages)))
        self._page_users = [0] * layout.num_pages

    @property
    def num_free_slots(self) -> int:
        """Sessions that can still be opened."""
        return len(self._free_slots)

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence refers to."""
        return len(self._free_pages)

    def pages_for(self, length: int) -> int:
        """Pages that hold `length` positions."""
        return -(-length // self.layout.page_tokens)

    def open(self) -> SequenceState:
        """Take a slot for a new, empty sequence.

        Raises:
            CapacityError: all slots are in use.
            RequestError: the engine is closed.
        """
        return SequenceState(slot=self._take_slot())

    def reserve(self, sequence: SequenceState, num_tokens: int) -> Sequence[PageCopy]:
        """Make the next `num_tokens` positions writable.

        Takes pages, and replaces shared pages that the step would write. `length` and the content
        of all earlier positions stay valid. End the reservation with `commit` or `cancel`.

        Returns:
            Copies to make, in any order, before anything is written.

        Raises:
            CapacityError: the context or the pages are exhausted, or an earlier step that failed
                has destroyed state that this one would read.
            RequestError: the engine is closed.
        """
        assert sequence.is_open, "the sequence is freed"
        assert sequence.num_reserved == 0, "the last reservation is neither committed nor cancelled"
        assert num_tokens > 0, num_tokens
        start, end = sequence.length, sequence.length + num_tokens
        self.require_context(sequence, num_tokens)
        if sequence.high_water - start > self.layout.rollback_tokens:
            raise CapacityError(
                f"a failed step may have overwritten state that position {start} needs: it wrote "
                f"up to position {sequence.high_water - 1}, {self.layout.rollback_tokens} can be "
                "undone; roll back to 0 and prefill the session again"
            )
        shared = self._shared_pages(sequence)
        num_new = max(self.pages_for(end) - len(sequence.pages), 0)
        if (num_wanted := len(shared) + num_new) > len(self._free_pages):
            raise CapacityError(
                f"{num_wanted} more pages are needed, {len(self._free_pages)} of "
                f"{self.layout.num_pages} are free; close or roll back a session"
            )
        copies = []
        for index in shared:
            sequence.replaced[index] = sequence.pages[index]
            sequence.pages[index] = self._take_page()
            copies.append(PageCopy(sequence.replaced[index], sequence.pages[index]))
        sequence.pages.extend(self._take_page() for _ in range(num_new))
        sequence.num_reserved = num_tokens
        sequence.written = sequence.high_water
        sequence.high_water = max(sequence.high_water, end)
        return copies

    def num_writable(self, sequence: SequenceState, num_tokens: int) -> int:
        """How many of the next `num_tokens` positions `reserve` can make writable now.

        No more than can be written and then given up, so that the session goes on behind the first.
        """
        return min(self.num_free(sequence, num_tokens), 1 + self.layout.rollback_tokens)

    def num_free(self, sequence: SequenceState, num_tokens: int) -> int:
        """How many of the next `num_tokens` positions `reserve` can make writable now."""
        if sequence.high_water - sequence.length > self.layout.rollback_tokens:
            return 0
        num_free = len(self._free_pages) - len(self._shared_pages(sequence))
        room = (len(sequence.pages) + num_free) * self.layout.page_tokens - sequence.length
        left = self.max_seq_len - sequence.length
        return max(min(num_tokens, room, left), 0)

    def require_context(self, sequence: SequenceState, num_tokens: int) -> None:
        """Check that `num_tokens` more positions fit into the context; changes nothing.

        Raises:
            CapacityError: they do not.
            RequestError: the engine is closed.
        """
        self._require_open()
        if (end := sequence.length + num_tokens) > self.max_seq_len:
            raise CapacityError(
                f"{sequence.length} + {num_tokens} tokens do not fit into the engine's context of "
                f"{self.max_seq_len}; send fewer tokens or rebuild with: "
                + rebuild_with(self._rebuild_command, "--max-seq-len", end)
            )

    def commit(
        self, sequence: SequenceState, num_tokens: int, *, num_written: int | None = None
    ) -> None:
        """End a reservation whose step has written its first `num_tokens` positions.

        Advances `length`; pages that are no longer needed are released. Never raises for a
        `num_tokens` up to the number reserved.

        Args:
            sequence: with the reservation.
            num_tokens: positions to keep.
            num_written: of those reserved, positions that may have been written; None for all.
        """
        assert 0 < num_tokens <= sequence.num_reserved, (num_tokens, sequence.num_reserved)
        if num_written is not None:
            assert num_tokens <= num_written, (num_tokens, num_written)
            end = sequence.length + min(num_written, sequence.num_reserved)
            sequence.high_water = max(sequence.written, end)
        for page in sequence.replaced.values():
            self._drop_page(page)
        self._end(sequence, sequence.length + num_tokens)

    def cancel(self, sequence: SequenceState) -> None:
        """End a reservation whose step failed: table and length are as before `reserve`.

        The step may have written part of its positions, so `high_water` stays, except in an empty
        sequence, which has nothing to lose.
        """
        for index, page in sequence.replaced.items():
            self._drop_page(sequence.pages[index])
            sequence.pages[index] = page
        self._end(sequence, sequence.length)
        if sequence.length == 0:
            sequence.high_water = 0

    def rollback(self, sequence: SequenceState, length: int) -> None:
        """Forget all positions from `length` on and release pages beyond.

        Positions below `length` stay valid. 0 is always allowed and starts over.

        Raises:
            RequestError: `length` is negative or more than the current length.
            CapacityError: so far back that rings have lost what is needed.
        """
        assert sequence.num_reserved == 0, "a reservation is open"
        if not 0 <= length <= sequence.length:
            raise RequestError(
                f"cannot roll back to length {length}: the session has {sequence.length} tokens; "
                f"0..{sequence.length} are allowed",
                param="length",
            )
        lowest = sequence.high_water - self.layout.rollback_tokens
        if 0 < length < lowest:
            raise CapacityError(
                f"cannot roll back to length {length}: {sequence.high_water} positions were "
                f"written and {self.layout.rollback_tokens} can be undone; go back to at least "
                f"{lowest}, or to 0 and prefill again"
            )
        self._end(sequence, length)
        if length == 0:
            sequence.high_water = 0

    def fork(self, sequence: SequenceState) -> SequenceState:
        """Open a sequence with the same content; all pages are shared until one side writes.

        The original is unchanged. The new one is valid once the caller has copied the rings of
        slot `sequence.slot` to its slot.

        Raises:
            CapacityError: all slots are in use.
            RequestError: the engine is closed.
        """
        assert sequence.is_open, "the sequence is freed"
        assert sequence.num_reserved == 0, "a reservation is open"
        slot = self._take_slot()
        for page in sequence.pages:
            self._page_users[page] += 1
        return SequenceState(slot, list(sequence.pages), sequence.length, sequence.high_water)

    def free(self, sequence: SequenceState) -> None:
        """Give back the slot and all pages; the sequence must not be used afterwards."""
        assert sequence.is_open, "the sequence is freed twice"
        if sequence.num_reserved:
            self.cancel(sequence)
        self._end(sequence, 0)
        self._free_slots.append(sequence.slot)
        sequence.is_open = False

    def _shared_pages(self, sequence: SequenceState) -> list[int]:
        """Places in the page table whose pages must be copied before anything more is written."""
        first = sequence.length // self.layout.page_tokens
        return [
            index
            for index in range(first, len(sequence.pages))
            if self._page_users[sequence.pages[index]] > 1
        ]

    def _end(self, sequence: SequenceState, length: int) -> None:
        sequence.replaced.clear()
        sequence.num_reserved = 0
        sequence.length = length
        keep = self.pages_for(length)
        # The last first: the next reservation then gets the same pages in the same places.
        for page in reversed(sequence.pages[keep:]):
            self._drop_page(page)
        del sequence.pages[keep:]

    def _require_open(self) -> None:
        if self.is_closed:
            raise RequestError("the engine is closed; open it again", param="engine")

    def _take_slot(self) -> int:
        self._require_open()
        if not self._free_slots:
            num_slots = self.layout.num_slots
            raise CapacityError(
                f"all {num_slots} session slots are in use; close a session or rebuild with: "
                + rebuild_with(self._rebuild_command, "--max-batch-size", num_slots + 1)
            )
        return self._free_slots.pop()

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._page_users[page] = 1
        return page

    def _drop_page(self, page: int) -> None:
        self._page_users[page] -= 1
        if self._page_users[page] == 0:
            self._free_pages.append(page)
