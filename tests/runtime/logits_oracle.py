"""Logits processing token by token in float64, from the whole timeline each time."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake import EOS, expected_logits
from numpy.typing import NDArray

from inkrt.runtime.executor import Sampling
from inkrt.runtime.sampling import draw


def process_row(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: dict[str, Any],
    ends: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> list[float]:
    """The row that the next token is drawn from."""
    row = []
    for token, logit in enumerate(logits):
        value = float(logit) + params.get("logit_bias", {}).get(token, 0.0)
        if token in prompt or token in output:
            penalty = params.get("repetition_penalty", 1.0)
            value = value / penalty if value > 0 else value * penalty
        value -= params.get("frequency_penalty", 0.0) * list(output).count(token)
        value -= params.get("presence_penalty", 0.0) * (token in output)
        allowed = params.get("allowed_token_ids")
        if allowed is not None and token not in allowed:
            value = -math.inf
        if any([*output, token][-len(word) :] == list(word) for word in bad_words):
            value = -math.inf
        if token in ends and len(output) < params.get("min_tokens", 0):
            value = -math.inf
        row.append(value)
    return row


def generate(
    prompt: Sequence[int],
    params: dict[str, Any],
    count: int,
    logits_of: Callable[[Sequence[int]], NDArray[np.float32]] = expected_logits,
) -> list[int]:
    """What the fake engine says under `params`, at most `count` tokens; EOS ends it."""
    filters = {name: params[name] for name in ("temperature", "top_k", "top_p") if name in params}
    sampling = Sampling(**filters, seed=params.get("seed", 0))
    output: list[int] = []
    eos = [] if params.get("ignore_eos") else [EOS]
    ends = [*eos, *params.get("stop_token_ids", [])]
    words = params.get("bad_words", [])
    while len(output) < count and not (output and output[-1] in ends):
        tokens = [*prompt, *output]
        row = process_row(logits_of(tokens), prompt, output, params, ends, words)
        output.append(int(draw(np.array(row, np.float32), sampling, len(tokens))))
    return output
