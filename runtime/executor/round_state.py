"""What rounds of speculative decoding keep on a GPU: `plugins/round/state.cuh` as numpy dtypes.

Field by field, with C's alignment and no byte between them: numpy's copies leave those undefined.
`plugins/round/state.cuh` says what the fields mean.
"""

from enum import IntEnum

import numpy as np

MAX_DRAFTS = 7
MAX_STOP_IDS = 64
MAX_CONTEXTS = 32
RING_RECORDS = 64


class RoundPolicy(IntEnum):
    """How many drafts are verified, see `runtime/spec/width.py`."""

    FIXED = 0
    THRESHOLD = 1
    COST = 2


class RoundRule(IntEnum):
    """How drafts are accepted, see `runtime/spec/round.py`.

    FORCED is for benchmarks with dummy weights: coins of given probabilities decide.
    """

    COUPLED = 0
    PROBABILISTIC = 1
    FORCED = 2


class RoundStatus(IntEnum):
    """What a round has to say; only one that is OK has tokens.

    FINISHED: the chain had ended before. ERROR: a kernel gave up, the error word says why, and
    the chain has ended. FULL: no position could be written, which a later round may.
    """

    OK = 0
    FINISHED = 1
    ERROR = 2
    FULL = 3


POLICY_STATE = np.dtype(
    [
        ("reached", np.float64, MAX_DRAFTS),
        ("accepted", np.float64, MAX_DRAFTS),
        ("unread", np.float64),
        ("num_rounds", np.int32),
        ("num_plain", np.int32),
        ("drafts_pay", np.int32),
        ("last_width", np.int32),
    ],
    align=True,
)
ROUND_STATE = np.dtype(
    [
        ("policy", np.int32),
        ("rule", np.int32),
        ("most", np.int32),
        ("num_left", np.int32),
        ("writable_end", np.int32),
        ("finished", np.int32),
        ("round", np.int32),
        ("num_stop_ids", np.int32),
        ("stop_ids", np.int32, MAX_STOP_IDS),
        ("explore_every", np.int32),
        ("num_first", np.int32),
        ("num_contexts", np.int32),
        ("contexts", np.int32, MAX_CONTEXTS),
        ("vocab_size", np.int32),
        ("case_of_width", np.int32, MAX_DRAFTS + 1),
        ("threshold", np.float64),
        ("margin", np.float64),
        ("plain", np.float64, MAX_CONTEXTS),
        ("rounds", np.float64, (MAX_CONTEXTS, MAX_DRAFTS + 1)),
        ("forced", np.float64, MAX_DRAFTS),
        ("seed", np.uint64),
        ("policy_state", POLICY_STATE),
        ("room", np.int32),
        ("width", np.int32),
        ("proposed", np.int32),
        ("accepted", np.int32),
        ("token", np.int32),
        ("reserved", np.int32),
        ("seconds", np.float64, MAX_DRAFTS + 1),
    ],
    align=True,
)
ROUND_RECORD = np.dtype(
    [
        ("num_tokens", np.int32),
        ("tokens", np.int32, MAX_DRAFTS + 1),
        ("drafted", np.int32),
        ("proposed", np.int32),
        ("accepted", np.int32),
        ("status", np.int32),
        ("position", np.int32),
        ("policy_state", POLICY_STATE),
        ("sequence", np.uint64),
    ],
    align=True,
)
