"""A look at an engine's drafter before it is relied on: drafts that say nothing are refused.

A drafter that is broken changes no output, it only costs time, so nothing else would tell. What can
be judged without false alarms, a random drafter's included, is whether its logits and confidences
are numbers, and whether the logits depend on what they must depend on: on the token that no step
has read yet, which enters the block itself, and on the context, which enters through the features
of the target that the engine keeps for it. Whether drafts are any good is not judged here:
`ink-bench engine --acceptance` measures that. Three drafts and two prompts of a few tokens.
"""

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import EngineFormatError
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

# Of the prompts, at most: enough for a context, and read by one narrow step.
_NUM_TOKENS = 8
_GREEDY = Sampling()


def check_drafter(engine: Engine) -> None:
    """Draft behind short made-up prompts and look at the logits.

    Needs a free session.

    Raises:
        EngineFormatError: the drafter cannot propose anything useful; says what was seen.
    """
    problem = _problem(engine)
    if problem is not None:
        raise EngineFormatError(
            f"the drafter of engine {engine.folder} proposes nothing useful: {problem}; turn "
            f"speculation off with method=none or rebuild with: {engine.config.rebuild_command}"
        )


def _problem(engine: Engine) -> str | None:
    vocab_size = engine.config.model.vocab_size
    length = min(_NUM_TOKENS, engine.config.max_seq_len - 1)
    prompts = [
        [(first + step * place) % vocab_size for place in range(length)]
        for first, step in ((17, 31), (5, 43))
    ]
    # Far from each other and from the first ids, which may be of unused tokens, all alike.
    anchor, other = vocab_size // 3, vocab_size // 2
    first, changed_anchor = _draft(engine, prompts[0], [anchor, other])
    (changed_context,) = _draft(engine, prompts[1], [anchor])
    for logits, confidences in (first, changed_anchor, changed_context):
        if problem := _problem_of_values(logits, confidences):
            return problem
    if np.array_equal(first[0], changed_anchor[0]):
        return f"its logits are the same behind tokens {anchor} and {other}"
    if np.array_equal(first[0], changed_context[0]):
        return "its logits are the same behind two different contexts"
    return None


def _problem_of_values(
    logits: NDArray[np.float32], confidences: NDArray[np.float32] | None
) -> str | None:
    if confidences is not None and np.isnan(confidences).any():
        return "its confidences are not numbers (NaN)"
    if np.isnan(logits).any():
        return "its logits are not numbers (NaN)"
    if np.isposinf(logits).any() or np.isneginf(logits).all(-1).any():
        return "its logits are infinite"
    # Tokens that cannot be drafted at all are at -inf.
    lowest = np.where(np.isneginf(logits), np.inf, logits).min(-1)
    if (logits.max(-1) == lowest).all():
        return "it finds all tokens equally likely, as with weights that are all zero"
    return None


def _draft(
    engine: Engine, prompt: list[int], anchors: list[int]
) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
    """Logits [block, vocabulary] and confidences [block] of a draft behind a prompt and anchors."""
    with engine.session() as session:
        session.prefill(prompt, _GREEDY, wants_logits=False)
        drafts = [
            session.draft(anchor, _GREEDY, coupled=True, wants_logits=True) for anchor in anchors
        ]
        return [(draft.logits, draft.confidences) for draft in drafts]
