"""StateManager against a plain model: who owns what, what may be read, what is refused."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
from fake import REBUILD
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inkrt.errors import CapacityError, RequestError
from inkrt.runtime.engine_file import StateLayout
from inkrt.runtime.state import SequenceState, StateManager

LAYOUT = StateLayout(num_slots=3, page_tokens=4, num_pages=8, rollback_tokens=6, buffers=())
MAX_SEQ_LEN = 24


def make_manager(**changes: Any) -> StateManager:
    layout = {"num_slots": 3, "page_tokens": 4, "num_pages": 8, "rollback_tokens": 6, **changes}
    return StateManager(StateLayout(**layout, buffers=()), MAX_SEQ_LEN, REBUILD)


def write(manager: StateManager, sequence: SequenceState, count: int) -> None:
    manager.reserve(sequence, count)
    manager.commit(sequence, count)


class Machine(RuleBasedStateMachine):
    """Every page holds, as data, what was written to each of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = make_manager()
        self.pages: list[list[object]] = [[None] * LAYOUT.page_tokens for _ in range(8)]
        # Of each open sequence: what its positions must hold, and the furthest written.
        self.open: list[tuple[SequenceState, list[object]]] = []
        self.high_water: dict[int, int] = {}
        self.stamp = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.open) - 1))

    @rule()
    def open_one(self) -> None:
        if len(self.open) == LAYOUT.num_slots:
            with pytest.raises(CapacityError, match="all 3 session slots are in use"):
                self.manager.open()
            return
        sequence = self.manager.open()
        self.open.append((sequence, []))
        self.high_water[id(sequence)] = 0

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 10), used=st.integers(0, 10))
    def step(self, data: st.DataObject, count: int, used: int) -> None:
        sequence, content = self.open[self.pick(data)]
        before = (list(sequence.pages), sequence.length, self.manager.num_free_pages)
        damaged = self.high_water[id(sequence)] - len(content) > LAYOUT.rollback_tokens
        try:
            copies = self.manager.reserve(sequence, count)
        except CapacityError:
            assert before == (list(sequence.pages), sequence.length, self.manager.num_free_pages)
            wanted = -(-(len(content) + count) // 4) - len(sequence.pages)
            assert (
                len(content) + count > MAX_SEQ_LEN
                or damaged
                or wanted + 1 > self.manager.num_free_pages
            )
            return
        assert not damaged
        for copy in copies:
            self.pages[copy.target] = list(self.pages[copy.source])
        used = min(used, count)
        written = []
        for i in range(count):  # a step may write all that it reserved
            self.stamp += 1
            page, offset = divmod(len(content) + i, 4)
            self.pages[sequence.pages[page]][offset] = self.stamp
            written.append(self.stamp)
        high_water = max(self.high_water[id(sequence)], len(content) + count)
        if used:
            self.manager.commit(sequence, used)
            content += written[:used]
        else:
            self.manager.cancel(sequence)
            assert before == (list(sequence.pages), sequence.length, self.manager.num_free_pages)
            high_water = high_water if content else 0
        self.high_water[id(sequence)] = high_water

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        sequence, content = self.open[self.pick(data)]
        length = data.draw(st.integers(0, len(content)))
        allowed = self.high_water[id(sequence)] - length <= LAYOUT.rollback_tokens or length == 0
        if not allowed:
            with pytest.raises(CapacityError, match="cannot roll back"):
                self.manager.rollback(sequence, length)
            return
        self.manager.rollback(sequence, length)
        del content[length:]
        if length == 0:
            self.high_water[id(sequence)] = 0

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence, content = self.open[self.pick(data)]
        if len(self.open) == LAYOUT.num_slots:
            with pytest.raises(CapacityError):
                self.manager.fork(sequence)
            return
        twin = self.manager.fork(sequence)
        assert twin.pages == sequence.pages
        self.open.append((twin, list(content)))
        self.high_water[id(twin)] = self.high_water[id(sequence)]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence, _ = self.open.pop(self.pick(data))
        self.manager.free(sequence)

    @invariant()
    def content_is_right(self) -> None:
        for sequence, content in self.open:
            assert sequence.length == len(content)
            assert len(sequence.pages) == -(-len(content) // 4)
            read = [self.pages[sequence.pages[p // 4]][p % 4] for p in range(len(content))]
            assert read == content

    @invariant()
    def what_is_writable_can_be_reserved_and_no_more(self) -> None:
        for sequence, _ in self.open:
            count = self.manager.num_writable(sequence, 99)
            assert count <= 1 + LAYOUT.rollback_tokens
            assert self.manager.num_writable(sequence, 2) == min(count, 2)
            if count > 0:
                manager, twin = deepcopy((self.manager, sequence))
                manager.reserve(twin, count)
                manager.commit(twin, 1)
                manager.reserve(twin, 1) if count > 1 else None
            if count <= LAYOUT.rollback_tokens:
                manager, twin = deepcopy((self.manager, sequence))
                with pytest.raises(CapacityError):
                    manager.reserve(twin, count + 1)

    @invariant()
    def nothing_leaks(self) -> None:
        slots = [sequence.slot for sequence, _ in self.open]
        assert len(set(slots)) == len(slots)
        assert self.manager.num_free_slots == LAYOUT.num_slots - len(slots)
        users = Counter(page for sequence, _ in self.open for page in sequence.pages)
        assert self.manager.num_free_pages == LAYOUT.num_pages - len(users)


Machine.TestCase.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
TestStateMachine = Machine.TestCase


def test_context_error_says_how_to_rebuild() -> None:
    manager = make_manager()
    sequence = manager.open()
    write(manager, sequence, 20)
    with pytest.raises(CapacityError) as caught:
        manager.reserve(sequence, 5)
    assert str(caught.value) == (
        "20 + 5 tokens do not fit into the engine's context of 24; send fewer tokens or rebuild "
        "with: ink-build CHECKPOINT -o ENGINE --target cpu --max-seq-len 25 --max-batch-size 3"
    )


def test_slot_error_names_the_number_and_the_option() -> None:
    manager = make_manager()
    for _ in range(3):
        manager.open()
    with pytest.raises(CapacityError) as caught:
        manager.open()
    assert str(caught.value) == (
        "all 3 session slots are in use; close a session or rebuild with: "
        "ink-build CHECKPOINT -o ENGINE --target cpu --max-seq-len 96 --max-batch-size 4"
    )


def test_page_error_names_both_numbers_and_changes_nothing() -> None:
    manager = make_manager(num_pages=4)
    first, second = manager.open(), manager.open()
    write(manager, first, 12)
    with pytest.raises(CapacityError) as caught:
        manager.reserve(second, 5)
    assert str(caught.value) == (
        "2 more pages are needed, 1 of 4 are free; close or roll back a session"
    )
    assert second.pages == []
    manager.reserve(second, 4)


def test_rollback_limit_counts_from_the_furthest_position_written() -> None:
    manager = make_manager()
    sequence = manager.open()
    write(manager, sequence, 10)
    manager.rollback(sequence, 6)
    write(manager, sequence, 2)
    with pytest.raises(CapacityError) as caught:
        manager.rollback(sequence, 3)
    assert str(caught.value) == (
        "cannot roll back to length 3: 10 positions were written and 6 can be undone; "
        "go back to at least 4, or to 0 and prefill again"
    )
    manager.rollback(sequence, 4)
    manager.rollback(sequence, 0)
    assert sequence.high_water == 0
    assert manager.num_free_pages == 8


@pytest.mark.parametrize("length", [-1, 5])
def test_rollback_outside_the_timeline_is_a_request_error(length: int) -> None:
    manager = make_manager()
    sequence = manager.open()
    write(manager, sequence, 4)
    with pytest.raises(RequestError) as caught:
        manager.rollback(sequence, length)
    assert str(caught.value) == (
        f"cannot roll back to length {length}: the session has 4 tokens; 0..4 are allowed"
    )


def test_a_wide_step_that_failed_may_have_destroyed_the_window() -> None:
    manager = make_manager()
    sequence = manager.open()
    write(manager, sequence, 4)
    manager.reserve(sequence, 7)
    manager.cancel(sequence)
    with pytest.raises(CapacityError) as caught:
        manager.reserve(sequence, 1)
    assert str(caught.value) == (
        "a failed step may have overwritten state that position 4 needs: it wrote up to position "
        "10, 6 can be undone; roll back to 0 and prefill the session again"
    )
    manager.rollback(sequence, 0)
    write(manager, sequence, 7)


def test_the_writer_copies_a_shared_page_once() -> None:
    manager = make_manager()
    first = manager.open()
    write(manager, first, 6)
    second = manager.fork(first)
    (copy,) = manager.reserve(second, 1)
    assert (copy.source, copy.target) == (first.pages[1], second.pages[1])
    manager.commit(second, 1)
    assert first.pages[0] == second.pages[0]
    assert manager.reserve(first, 1) == []
    manager.commit(first, 1)
    assert manager.reserve(second, 1) == []
    manager.commit(second, 1)
