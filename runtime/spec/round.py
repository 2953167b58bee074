"""One round of speculative decoding: draft, verify, accept, commit by position.

The target reads the last token and the drafts in one verify step. Row i of it sees the drafts
before it and draws the token behind them, with the noise of that token's own position: the very
token that plain decoding would draw there, if the drafts before it are right. So a draft is
accepted where it is the token that was drawn, and the first row behind the accepted ones gives one
token more. Output is that of plain decoding for any temperature, filters and seed, whatever the
drafter proposes and however many drafts are read: that decides nothing but how soon tokens are
known. (A verify step need not round as a decode step does; see docs/speculative.md.) Source:
dspark.md sections 5 and 6.1, the accept rule with shared noise.

State is indexed by position, so the rows of rejected drafts are given up by going back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from inkrt.runtime.executor import Sampling
from inkrt.runtime.logits import LogitsProcessor, draw_rows
from inkrt.runtime.session import Session
from inkrt.runtime.spec.drafter import Drafter


@dataclass(frozen=True, slots=True)
class Round:
    """What a round gives.

    Attributes:
        tokens: new tokens, at least one. The last of them has not been read by a step yet.
        drafted: drafts that were read.
    """

    tokens: list[int]
    drafted: int


class Speculator:
    """Rounds of one session.

    Args:
        drafter: proposes tokens.
        width: most drafts of a round, at least 1.
    """

    def __init__(self, drafter: Drafter, width: int) -> None:
        assert width >= 1, width
        self._drafter = drafter
        self._width = width

    def run(
        self,
        session: Session,
        tokens: Sequence[int],
        sampling: Sampling,
        most: int,
        processor: LogitsProcessor | None = None,
    ) -> Round:
        """Run one round.

        Args:
            session: holds all of `tokens` but the last.
            tokens: the timeline, with the token that comes next into the session.
            sampling: of the request.
            most: tokens that the caller can use, at least 1.
            processor: of the request; with one, the rows are drawn here, not by the step.

        Raises:
            CapacityError: not even one token more fits.
            RequestError: the request bans every token that could come next.
        """
        assert session.length == len(tokens) - 1, (session.length, len(tokens))
        # The last row needs no draft of its own; its token is written in the next round.
        room = min(self._width, most - 1, session.num_writable(1 + self._width) - 1)
        drafts = self._drafter.draft(tokens, room)[:room] if room > 0 else []
        start = session.length
        if processor is not None:
            logits = session.step([tokens[-1], *drafts], sampling).logits
            drawn = draw_rows(logits, processor, sampling, tokens, drafts)
            session.rollback(start + len(drawn))
            return Round(drawn, len(drafts))
        if not drafts:
            return Round([session.decode(tokens[-1], sampling)], 0)
        output = session.step([tokens[-1], *drafts], sampling, wants_logits=False)
        drawn = [int(token) for token in output.tokens]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
            accepted += 1
        session.rollback(start + 1 + accepted)
        return Round(drawn[: accepted + 1], len(drafts))
