"""One round of speculative decoding: draft, choose a width, verify, accept, commit by position.

The target reads the last token, the anchor, and the drafts in one verify step; row i of it is what
follows draft i. What is kept of the drafts is decided by one of two rules, neither of which lets
the drafter change what is generated:

coupled: row i draws with the noise of its own position, so it draws the very token that plain
decoding would draw there, if the drafts before it are right. A draft is accepted where it is that
token. By induction the output is that of plain decoding, token for token, for any temperature,
filters and seed, whatever is proposed and however many drafts are read: that decides nothing but
how soon tokens are known.

probabilistic: block verification (`runtime/spec/accept.py`). More drafts are accepted, and the
output is distributed as that of plain decoding, but other tokens come for the same seed. It is
exact if whether draft j is verified depends on nothing that was known only after x_j was drawn. It
does not: the room of a round is a matter of counts; `WidthPolicy.skip` knows earlier rounds only;
`choose` reads c_1..c_j when it comes to draft j (`runtime/spec/width.py`), and c_j reads the
drafter's hidden row and x_{j-1}; and a row that bans all tokens ends the block before the draft
that it would judge, from the drafts in front of it. Earlier rounds used other random numbers, as
coins, drafts and residuals are keyed by the round's anchor; a plain step in between draws with
noise that no round uses.

At temperature 0 both rules are the same, and the first needs no logits.

(A verify step need not round as a decode step does; see docs/speculative.md.) State is indexed by
position, so the rows of rejected drafts are given up by going back. Source: dspark.md sections 5
to 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.round_queue import RoundSettings
from inkrt.runtime.logits import LogitsProcessor, draw_rows, require_choice
from inkrt.runtime.session import Session
from inkrt.runtime.spec.accept import Verdict, accept_probabilistic
from inkrt.runtime.spec.drafter import Drafter, EngineDrafter, Proposal
from inkrt.runtime.spec.width import CostAware, WidthPolicy

AcceptRule = Literal["coupled", "probabilistic"]


@dataclass(frozen=True, slots=True)
class Round:
    """What a round gives.

    Attributes:
        tokens: new tokens, at least one: the accepted drafts and one more. The last of them has not
            been read by a step yet.
        drafted: drafts that were read.
        proposed: drafts that there were, at least as many.
        on_device: whether the device ran it by itself.
    """

    tokens: list[int]
    drafted: int = 0
    proposed: int = 0
    on_device: bool = False


class Speculator:
    """Rounds of one session.

    The device runs them by itself where the executor offers that: with the engine's own drafter,
    for requests whose logits nothing but temperature and filters changes. Else the host does, step
    by step. What comes out is the same, but for how the device's draft of the ratio test rounds.

    Args:
        drafter: proposes tokens.
        policy: chooses how many of them are read.
        most: most drafts of a round, at least 1.
        rule: how drafts are accepted.
    """

    def __init__(
        self, drafter: Drafter, policy: WidthPolicy, most: int, rule: AcceptRule = "coupled"
    ) -> None:
        assert most >= 1, most
        self._drafter = drafter
        self._policy = policy
        self._most = most
        self._rule = rule

    def run(
        self,
        session: Session,
        tokens: Sequence[int],
        sampling: Sampling,
        most: int,
        processor: LogitsProcessor | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> Round:
        """Run one round.

        Args:
            session: holds all of `tokens` but the last.
            tokens: the timeline, with the token that comes next into the session.
            sampling: of the request.
            most: tokens that the caller can use, at least 1.
            processor: of the request; with one, the rows are drawn here, not by the step.
            stop_ids: tokens behind which the caller needs no more, so that none are run ahead.

        Raises:
            CapacityError: not even one token more fits.
            RequestError: the request bans every token that could come next.
        """
        assert session.length == len(tokens) - 1, (session.length, len(tokens))
        is_coupled = self._rule == "coupled" or sampling.temperature == 0
        settings = RoundSettings(
            "coupled" if is_coupled else "probabilistic", self._policy, self._most, stop_ids
        )
        is_plain = processor is None and isinstance(self._drafter, EngineDrafter)
        if is_plain and session.takes_rounds(settings):
            record = session.round(tokens[-1], sampling, settings, most)
            if isinstance(self._policy, CostAware) and record.learned is not None:
                self._policy.state = record.learned
            return Round(record.tokens, record.drafted, record.proposed, on_device=True)
        # The last row needs no draft of its own; its token is written in the next round.
        room = min(self._most, most - 1, session.num_writable(1 + self._most) - 1)
        num_plain = self._policy.skip(session.length) if room > 0 else 1
        if num_plain:
            num_more = min(num_plain, most) - 1
            return Round([_decode(session, tokens, sampling, processor, num_more)])
        proposal = self._drafter.draft(session, tokens, sampling, room, coupled=is_coupled)
        proposal = _generable(proposal.first(room), session.config.model.vocab_size)
        num_proposed = len(proposal.tokens)
        width = 0
        if num_proposed:
            width = self._policy.choose(proposal.confidences, num_proposed, session.length)
        if width == 0:
            return Round([_decode(session, tokens, sampling, processor)], proposed=num_proposed)
        drafts = proposal.first(width)
        start = session.length
        verify = _verify_coupled if is_coupled else _verify_probabilistic
        verdict = verify(session, tokens, drafts, sampling, processor)
        session.rollback(start + 1 + verdict.accepted)
        self._policy.observe(width, verdict.accepted)
        return Round(
            [*drafts.tokens[: verdict.accepted], verdict.token], width, proposed=num_proposed
        )


def _generable(proposal: Proposal, vocab_size: int) -> Proposal:
    """The drafts before the first that has no logit: prompts may hold such tokens, outputs not.

    Where drafts were drawn there is none, so this tells nothing of them.
    """
    ends = (place for place, token in enumerate(proposal.tokens) if token >= vocab_size)
    return proposal.first(next(ends, len(proposal.tokens)))


def _decode(
    session: Session,
    tokens: Sequence[int],
    sampling: Sampling,
    processor: LogitsProcessor | None,
    num_more: int = 0,
) -> int:
    """The token behind the timeline, by a plain step."""
    if processor is None:
        return session.decode(tokens[-1], sampling, num_more=num_more)
    logits = session.step(tokens[-1:], sampling).logits
    return draw_rows(logits, processor, sampling, tokens)[0]


def _verify_coupled(
    session: Session,
    tokens: Sequence[int],
    drafts: Proposal,
    sampling: Sampling,
    processor: LogitsProcessor | None,
) -> Verdict:
    block = [tokens[-1], *drafts.tokens]
    if processor is not None:
        logits = session.step(block, sampling).logits
        drawn = draw_rows(logits, processor, sampling, tokens, drafts.tokens)
        return Verdict(len(drawn) - 1, drawn[-1])
    drawn = session.step(block, sampling, wants_logits=False).tokens.tolist()
    accepted = 0
    while accepted < len(drafts.tokens) and drafts.tokens[accepted] == drawn[accepted]:
        accepted += 1
    return Verdict(accepted, drawn[accepted])


def _verify_probabilistic(
    session: Session,
    tokens: Sequence[int],
    drafts: Proposal,
    sampling: Sampling,
    processor: LogitsProcessor | None,
) -> Verdict:
    anchor = session.length
    rows = session.step([tokens[-1], *drafts.tokens], sampling).logits
    is_empty = [False] * len(rows)
    if processor is not None:
        rows = processor.process(rows, tokens, drafts.tokens)
        # A row that bans everything has no distribution: the block ends in front of it.
        is_empty = [bool(np.isneginf(row).all()) for row in rows]
        if any(is_empty):
            drafts = drafts.first(is_empty.index(True))
    rows = rows[: len(drafts.tokens) + 1]
    verdict = accept_probabilistic(drafts.tokens, rows, drafts.logits, sampling, anchor)
    if not is_empty[verdict.accepted]:
        return verdict
    if verdict.accepted == 0:
        require_choice(rows[0])  # raises
    # As `draw_rows`: the last right draft may be the end; if not, the next round raises.
    return Verdict(verdict.accepted - 1, drafts.tokens[verdict.accepted - 1])
