"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to the first stop string.

    The match that is complete first wins; of those that end at the same character, the longest.
    So the result does not depend on where the pieces are cut. Text that may be the beginning of a
    stop string is held back.

    Args:
        stops: non-empty strings; none is allowed.
        include_match: pass on the stop string itself too.

    Attributes:
        matched: the stop string that was found, else None. Nothing comes out after it.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include_match = include_match
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text; return what can no longer become part of a stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_match else end - len(self.matched)]
        cut = len(text) - self._possible_beginning(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """End of the text: return what was held back."""
        text, self._held = self._held, ""
        return text

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
