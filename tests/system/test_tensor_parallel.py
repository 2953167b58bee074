"""Engines of several ranks against one rank: same tokens, logits within the stated bound.

The bounds are those of `ink-verify`. On several ranks only orders of addition differ while ranks
hold whole experts; slices of experts leave out a rounding too.
"""

import numpy as np
import pytest

from inkrt.commands.parity import compare_logits
from inkrt.engines.interface import EXACT_PARITY
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

BOUNDS = {dtype: bound.relative_error for dtype, bound in EXACT_PARITY.items()}
NUM_DECODED = 40
PROMPT = [(7 * i + i * i) % 470 for i in range(61)]


def _generate(folder, forced=None) -> tuple[list[int], list[np.ndarray]]:
    """Greedy tokens and their logits; `forced`: what is fed back in their place."""
    tokens, logits = [], []
    with Engine.open(folder) as engine, engine.session() as session:
        output = session.prefill(PROMPT, Sampling())
        for place in range(NUM_DECODED):
            tokens.append(int(output.tokens[-1]))
            logits.append(output.logits[-1])
            output = session.step([forced[place] if forced else tokens[-1]], Sampling())
    return tokens, logits


def _require_near_ties(tokens_tp, tokens, logits) -> None:
    """Tokens are the same, but where one rank's own logits tie within the bound of bfloat16."""
    for place, (ours, expected) in enumerate(zip(tokens_tp, tokens, strict=True)):
        row = logits[place]
        near = 2 * BOUNDS["bfloat16"] * np.sqrt(np.mean(np.square(row)))
        assert row[expected] - row[ours] <= near, place


# A full layer and what stands around it.
OPTIONS = {"max_verify_tokens": 1, "num_layers": 7}


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def single(request, make_engine):
    return request.param, _generate(make_engine(request.param, **OPTIONS))


@pytest.mark.parametrize(
    ("single", "tp_size"),
    [
        ("bfloat16", 4),
        pytest.param("bfloat16", 2, marks=pytest.mark.slow),
        ("float32", 2),
        pytest.param("float32", 4, marks=pytest.mark.slow),
    ],
    indirect=["single"],
)
def test_ranks_agree_with_a_single_rank(single, make_engine, tp_size):
    dtype, (tokens, logits) = single
    folder = make_engine(dtype, **OPTIONS, tp_size=tp_size)
    # In bfloat16 a near tie may go either way, by the processor's order of additions.
    tokens_tp, logits_tp = _generate(folder, tokens if dtype == "bfloat16" else None)
    if dtype == "float32":
        assert tokens_tp == tokens
    else:
        _require_near_ties(tokens_tp, tokens, logits)
    distances = [compare_logits(a, b) for a, b in zip(logits_tp, logits, strict=True)]
    assert max(distance.relative_error for distance in distances) <= BOUNDS[dtype]


def test_slices_of_experts_agree_with_a_single_rank(single, make_engine):
    dtype, (tokens, logits) = single
    folder = make_engine(dtype, **OPTIONS, tp_size=2, moe_split="width")
    tokens_tp, logits_tp = _generate(folder)
    distances = [compare_logits(a, b) for a, b in zip(logits_tp, logits, strict=True)]
    if dtype == "float32":
        assert tokens_tp == tokens
        assert max(distance.relative_error for distance in distances) <= BOUNDS[dtype]
    else:  # an unrounded expert output moves every logit by about one bfloat16 rounding
        assert distances[0].relative_error <= 3e-2
    # It was other arithmetic: the test does not compare an engine with itself.
    assert not any(distance.same_bits for distance in distances)
