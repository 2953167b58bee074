"""Whether an engine differs from transformers by rounding or by a defect: the distances to float32.

Where a model chooses experts, one bfloat16 rounding that falls the other way can choose another,
and the rows after it move by more than any bound that a defect should fail. But rounding is blind:
it moves the engine and transformers equally far from a run in float32, while a defect moves the
engine alone. So the two distances are compared, over all rows in which the two differ; rows with
equal bits say nothing and would only hide what the others say.

Between bfloat16 runs of transformers on the trained `inkling2-nano` that differ in the widths of
their steps, one prompt's 64 rows had medians within a factor of 1.24 and means, which hang on the
few rows that moved most, within 1.7 (40 prompts); of several prompts both are nearer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from inkrt.commands.parity import Reference, Trace, compare_logits

MIN_ROWS = 50
MEDIAN_FACTOR = 1.3
MEAN_FACTOR = 2.0
TOP1_DEVIATIONS = 3.0


@dataclass(frozen=True, slots=True)
class Nearness:
    """How near both sides are to float32 in the rows where they differ.

    Attributes:
        ours: relative errors of the engine's rows against float32, as in `parity.Distance`.
        theirs: of the same rows of transformers in bfloat16.
        ours_top1: whether a row of the engine has float32's most likely token.
        theirs_top1: whether transformers' has.
    """

    ours: NDArray[np.float64]
    theirs: NDArray[np.float64]
    ours_top1: NDArray[np.bool_]
    theirs_top1: NDArray[np.bool_]

    @property
    def is_rounding(self) -> bool:
        """Whether the engine is as near to float32 as transformers is, on rows enough to tell.

        Of the rows where just one of them has float32's most likely token, rounding gives each
        half; the engine may have fewer by TOP1_DEVIATIONS standard deviations.
        """
        if len(self.ours) < MIN_ROWS:
            return False
        lost = int(np.sum(self.theirs_top1 & ~self.ours_top1))
        won = int(np.sum(self.ours_top1 & ~self.theirs_top1))
        return bool(
            np.median(self.ours) <= MEDIAN_FACTOR * np.median(self.theirs)
            and self.ours.mean() <= MEAN_FACTOR * self.theirs.mean()
            and lost - won <= TOP1_DEVIATIONS * sqrt(lost + won)
        )

    def describe(self) -> str:
        """What was compared and found, without a full stop."""
        if len(self.ours) < MIN_ROWS:
            return (
                f"{len(self.ours)} rows that differ are too few to compare with float32, which "
                f"takes {MIN_ROWS}: verify more prompts or decode more tokens"
            )
        verdict = "as near to float32 as" if self.is_rounding else "further from float32 than"
        return (
            f"{len(self.ours)} rows that differ are {verdict} transformers in bfloat16: "
            f"median {np.median(self.ours):.2e} ({np.median(self.theirs):.2e}), "
            f"mean {self.ours.mean():.2e} ({self.theirs.mean():.2e}), "
            f"top-1 {self.ours_top1.mean():.1%} ({self.theirs_top1.mean():.1%})"
        )


def compare_with_float32(traces: Sequence[Trace], exact: Reference, width: int) -> Nearness:
    """Distances of the rows that differ.

    Args:
        traces: of runs in bfloat16.
        exact: the same checkpoint in float32.
        width: most tokens per forward.
    """
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}
    ours, theirs = [], []
    for trace in traces:
        key = (len(trace.prompt), *trace.prompt, *trace.decoded)
        if key not in known:  # chunkings of a prompt mostly decode the same tokens
            known[key] = _exact_rows(trace, exact, width)
        for our_row, their_row, row in zip(trace.ours, trace.reference, known[key], strict=True):
            if not np.array_equal(our_row, their_row):
                ours.append(compare_logits(our_row, row))
                theirs.append(compare_logits(their_row, row))
    return Nearness(
        np.array([distance.relative_error for distance in ours]),
        np.array([distance.relative_error for distance in theirs]),
        np.array([distance.same_top1 for distance in ours], dtype=bool),
        np.array([distance.same_top1 for distance in theirs], dtype=bool),
    )


def _exact_rows(trace: Trace, exact: Reference, width: int) -> NDArray[np.float32]:
    """Rows as in the trace; how tokens are cut into forwards makes no difference in float32."""
    exact.reset()
    for start in range(0, len(trace.prompt), width):
        last = exact.feed(trace.prompt[start : start + width])
    rows = [last[None]]
    for start in range(0, len(trace.decoded), width):
        piece = trace.decoded[start : start + width]
        rows.append(exact.feed_rows(piece, len(piece)))
    return np.concatenate(rows)
