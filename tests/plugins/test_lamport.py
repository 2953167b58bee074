"""The exchange of plugins/all_reduce/lamport.cuh as steps of memory, in all orders they can have.

A rank runs its launches one after the other; the blocks of a launch run in any order. A block sends
its words to every other rank, empties the words that it empties, and waits for those of the others.

Of pushed launches (plugins/all_reduce/push.cuh) blocks of the sender send to all ranks, their own
too, while blocks of the receiver run beside them, which empty and wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

EMPTY = None


@dataclass(frozen=True)
class Scheme:
    """Sizes of launches: words that each rank sends; a block has every `blocks`-th of them."""

    num_ranks: int
    launches: tuple[int, ...]
    blocks: int
    buffers: int = 3
    cleared: int = 1  # launches ago
    pushed: frozenset[int] = frozenset()  # launches that are two
    unwaited: int = 0  # words of each launch that nobody waits for
    clears_own: bool = True  # whether the place of a rank's own words is emptied

    def words(self, launch: int, block: int) -> range:
        size = self.launches[launch] if 0 <= launch < len(self.launches) else 0
        return range(block, size, self.blocks)

    def num_blocks(self, launch: int) -> int:
        return 2 * self.blocks if launch in self.pushed else self.blocks

    def steps(self, rank: int, launch: int, number: int) -> list[tuple[str, int, int, int, int]]:
        """(what, inbox, buffer, sender, word) in the block's order."""
        is_pushed, is_receiver = launch in self.pushed, number >= self.blocks
        block = number % self.blocks
        ranks = range(self.num_ranks)
        others = [other for other in ranks if other != rank]
        was_pushed = launch - self.cleared in self.pushed and self.clears_own
        now, before = launch % self.buffers, (launch - self.cleared) % self.buffers
        mine, old = self.words(launch, block), self.words(launch - self.cleared, block)
        size = self.launches[launch] - self.unwaited
        send = [("send", to, now, rank, w) for w in mine for to in (ranks if is_pushed else others)]
        take = [
            *(
                ("clear", rank, before, x, w)
                for w in old
                for x in (ranks if was_pushed else others)
            ),
            *(
                ("receive", rank, now, x, w)
                for w in mine
                if w < size
                for x in (ranks if is_pushed else others)
            ),
        ]
        if not is_pushed:
            return send + take
        return take if is_receiver else send


class LostError(Exception):
    """A word was written over, or one of another launch was read."""


# Steps that each block of each rank's current launch has done, and the number of that launch.
Place = tuple[tuple[int, tuple[int, ...]], ...]
Memory = frozenset[tuple[tuple[int, int, int, int], int]]


def explore(scheme: Scheme) -> int:
    """Go through all orders; gives the number of different states.

    Raises:
        LostError: in some order.
    """
    start: Place = ((0, (0,) * scheme.num_blocks(0)),) * scheme.num_ranks
    todo: list[tuple[Place, Memory]] = [(start, frozenset())]
    seen = set(todo)
    end = len(scheme.launches)
    while todo:
        place, memory = todo.pop()
        following = list(_after(scheme, place, memory))
        assert following or all(launch == end for launch, _ in place), f"deadlock at {place}"
        for state in following:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return len(seen)


def _after(scheme: Scheme, place: Place, memory: Memory) -> Iterator[tuple[Place, Memory]]:
    words = dict(memory)
    for rank, (launch, done) in enumerate(place):
        if launch == len(scheme.launches):
            continue
        for block, count in enumerate(done):
            steps = scheme.steps(rank, launch, block)
            if count == len(steps):
                continue
            what, *at = steps[count]
            found = words.get(tuple(at), EMPTY)  # type: ignore[arg-type]
            changed = dict(words)
            if what == "receive" and found is EMPTY:
                continue
            if what == "receive" and found != launch:
                raise LostError(f"launch {launch} of rank {rank} read a word of launch {found}")
            if what == "send":
                if found is not EMPTY:
                    raise LostError(f"launch {launch} of rank {rank} wrote over {found}")
                changed[tuple(at)] = launch  # type: ignore[index]
            if what == "clear":
                changed.pop(tuple(at), None)  # type: ignore[arg-type]
            yield _moved(scheme, place, rank, block), frozenset(changed.items())


def _moved(scheme: Scheme, place: Place, rank: int, block: int) -> Place:
    launch, done = place[rank]
    done = tuple(count + (number == block) for number, count in enumerate(done))
    # The next launch begins when all blocks have ended. Launches without words end at once.
    while launch < len(scheme.launches) and all(
        count == len(scheme.steps(rank, launch, number)) for number, count in enumerate(done)
    ):
        launch, done = launch + 1, (0,) * scheme.num_blocks(launch + 1)
    return (*place[:rank], (launch, done), *place[rank + 1 :])


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(2, (1,) * 8, 1),
        Scheme(2, (2, 1, 2, 2, 1, 1, 2), 2),  # sizes that change: what is emptied is the last one's
        Scheme(2, (1, 3, 1, 1, 3, 2), 1),
        Scheme(3, (1, 1, 1, 1), 1),
        Scheme(2, (1,) * 8, 1, pushed=frozenset(range(8))),
        Scheme(2, (1,) * 9, 1, pushed=frozenset({0, 2, 3, 6, 7, 8})),
        Scheme(2, (2, 1, 2, 1), 2, pushed=frozenset({0, 2})),
        Scheme(2, (1, 3, 1, 1, 3, 2), 1, pushed=frozenset({1, 3, 4})),
        Scheme(3, (1, 1, 1, 1), 1, pushed=frozenset({1})),
    ],
    ids=str,
)
def test_no_order_loses_a_word(scheme: Scheme) -> None:
    assert explore(scheme) > 100


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(2, (1,) * 5, 1, buffers=2),
        Scheme(2, (1,) * 5, 1, buffers=1),
        Scheme(2, (1,) * 5, 1, cleared=2),  # too late: launch i + 1 of another rank fills it
        Scheme(2, (1,) * 5, 1, buffers=2, pushed=frozenset(range(5))),
        Scheme(2, (1,) * 5, 1, pushed=frozenset({0, 3}), clears_own=False),
        Scheme(2, (2,) * 5, 1, pushed=frozenset(range(5)), unwaited=1),  # rows that are not there
    ],
    ids=str,
)
def test_with_less_some_order_does(scheme: Scheme) -> None:
    with pytest.raises(LostError):
        explore(scheme)
