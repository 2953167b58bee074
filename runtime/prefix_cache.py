"""Sessions that are kept when their request ends, for prompts that begin as they do.

What is kept costs nothing but slots and pages that nobody else needs: the engine has memory for all
its sessions anyhow, and who needs a slot takes that of the session that was used longest ago. A
session can go back a few positions only (its rings hold no more), so two are kept of a request:
its end, for a next turn that repeats all that was said, and, where no other request needs the slot,
the end of its prompt, for one that leaves out what the model thought. The drafter's state stands in
the same slots and pages. Source: design.md, "State is indexed by position".
"""

from collections.abc import Sequence

from inkrt.errors import CapacityError
from inkrt.runtime.engine import Engine
from inkrt.runtime.session import Session

# Below, reading a prompt costs less than it takes to look for it: a single step has it.
MIN_TOKENS = 16


class PrefixCache:
    """Kept sessions of one engine; as its sessions, for one thread at a time.

    Args:
        engine: whose sessions they are.
    """

    def __init__(self, engine: Engine) -> None:
        states = engine.states
        per_session = states.pages_for(engine.config.max_seq_len)
        # Else running sessions could lack pages that kept ones hold.
        self._keeps = states.layout.num_pages >= states.layout.num_slots * per_session
        self._engine = engine
        self._kept: list[Session] = []  # the one used longest ago first

    @property
    def has_room(self) -> bool:
        """Whether `open` finds a slot."""
        return self._engine.states.num_free_slots > 0 or bool(self._kept)

    def open(self, prompt: Sequence[int]) -> Session:
        """A session that holds as much of the beginning of a prompt as a kept one does, or nothing.

        At least the last token of the prompt is left to be read.

        Raises:
            CapacityError: all slots are in use by requests.
        """
        found = [(_num_common(kept.tokens, prompt), kept) for kept in self._kept]
        for length, kept in sorted(found, key=lambda item: -item[0]):
            if length < MIN_TOKENS:
                break
            session = self._continue(kept, min(length, len(prompt) - 1))
            if session is not None:
                return session
        self._make_room()
        return self._engine.session()

    def keep(self, session: Session) -> None:
        """Take over a session that nobody else uses any more."""
        is_worth = self._keeps and session.length >= MIN_TOKENS
        if self._engine.states.is_closed or not is_worth:
            session.close()
            return
        self._drop_equal(session.tokens)
        self._kept.append(session)

    def mark(self, session: Session) -> None:
        """Keep what a session holds now, which goes on; only where there is room."""
        if not self._keeps or session.length < MIN_TOKENS:
            return
        self._drop_equal(session.tokens)
        if self._make_room():
            self._kept.append(session.fork())

    def clear(self) -> None:
        """Give back all that is kept."""
        while self._kept:
            self._kept.pop().close()

    def _continue(self, kept: Session, length: int) -> Session | None:
        """A session with the first `length` tokens of a kept one; None if it cannot go back.

        The kept one stays, if there is room for both, without what comes behind: a few tokens at
        most, or it could not go back.
        """
        try:
            kept.rollback(length)
        except CapacityError:
            return None
        self._kept.remove(kept)
        if not self._make_room():
            return kept
        self._kept.append(kept)
        return kept.fork()

    def _make_room(self) -> bool:
        """Free a slot if none is free; false if there is no session to give up for it."""
        if self._engine.states.num_free_slots == 0:
            if not self._kept:
                return False
            self._kept.pop(0).close()
        return True

    def _drop_equal(self, tokens: Sequence[int]) -> None:
        for kept in [one for one in self._kept if one.tokens == tokens]:
            self._kept.remove(kept)
            kept.close()


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is faster than comparing items
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
