"""What proposes tokens: the protocol, and a drafter that needs no weights."""

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes the tokens that may come next. One object serves one session."""

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Tokens that may follow, the nearest first.

        What it proposes costs time where it is wrong, and never changes what is generated.

        Args:
            tokens: the timeline, prompt and output, with the token that no step has read yet. From
                call to call it only grows.
            most: how many can be used, at least 1.

        Returns:
            At most `most` tokens; none if there is nothing to propose.
        """


class NgramDrafter:
    """Proposes what followed the last time the timeline ended like this.

    The longest ending of `longest` down to `shortest` tokens that stood before decides, and of its
    places the latest. Good where the output repeats its prompt: edits, quotes, code, tables.

    Args:
        shortest: tokens that must agree, at least 1.
        longest: tokens that are compared at most.
    """

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        assert 1 <= shortest <= longest, (shortest, longest)
        self._sizes = range(longest, shortest - 1, -1)
        # What followed each n-gram: the index behind its latest place that has a next token.
        self._behind: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`; the time it takes does not grow with the timeline."""
        end = len(tokens)
        for behind in range(self._num_indexed + 1, end):
            for size in self._sizes:
                if size <= behind:
                    self._behind[tuple(tokens[behind - size : behind])] = behind
        self._num_indexed = max(end - 1, 0)
        for size in self._sizes:
            if size <= end and (start := self._behind.get(tuple(tokens[end - size :]))) is not None:
                return list(tokens[start : start + most])
        return []
