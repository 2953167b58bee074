"""Log-probabilities of generated tokens: the model's own, before anything a request changes."""

import numpy as np
from numpy.typing import NDArray

from inkrt.runtime.output import TokenLogprob


class LogprobReader:
    """Keeps rows of logits by position until it is known which token stands there.

    A round of speculation reads rows behind drafts that may turn out wrong; the next round reads
    those positions again, and the later row holds.

    Args:
        num_top: of the likeliest tokens, how many to name.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._rows: dict[int, NDArray[np.float32]] = {}

    def read(self, logits: NDArray[np.float32], position: int) -> None:
        """Keep rows [n, V], of the tokens at `position` and behind."""
        # Copies: an executor may use its memory again.
        self._rows.update((position + i, row.copy()) for i, row in enumerate(logits))

    def take(self, token: int, position: int) -> TokenLogprob:
        """What is known of the token that has come to stand at `position`; asked in order."""
        row = self._rows.pop(position).astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        # The likeliest first; of equals the lowest id, as in greedy decoding.
        top = np.lexsort((np.arange(len(row)), -row))[: self._num_top] if self._num_top else ()
        return TokenLogprob(token, float(row[token]), tuple((int(i), float(row[i])) for i in top))
