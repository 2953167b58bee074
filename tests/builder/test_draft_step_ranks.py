"""Drafts of the traced draft step on two and four ranks are those of one, and the same on each.

Ranks get slices of one rank's weights and context, cut here once more.
"""

import dataclasses
from typing import Any

import pytest
import torch
from graph_run import Tensors, run_graph, step_inputs
from test_draft_step import (
    BASE,
    EMBED_EPS,
    FULL,
    NUM_TOKENS,
    PAGES,
    SLIDING,
    STATE,
    TARGET,
    make_step,
)
from torch import Tensor

from inkrt.builder.passes import PASSES
from inkrt.builder.trace import trace
from inkrt.engines.dspark.config import DSparkConfig
from inkrt.engines.dspark.model import DraftStep
from inkrt.errors import ConfigError
from inkrt.runtime.engine_file import DRAFT_STEP, StepSpec

SHARED = dataclasses.replace(
    BASE, hidden_size=36, target_hidden_size=36, num_attention_heads=8, num_key_value_heads=4
)
WIDE_TARGET = dataclasses.replace(TARGET, hidden_size=36)
VARIANTS: dict[str, dict[str, Any]] = {
    "rnn": {},
    "vanilla, second table without padding": {"draft_vocab_size": NUM_TOKENS, "head": "vanilla"},
    "gated, sinks": {"head": "gated", "has_sinks": True, "anchor_first": False},
    "trimmed": {"is_trimmed": True, "draft_vocab_size": 31},
    "trimmed, fewer tokens than ranks hold": {"is_trimmed": True, "draft_vocab_size": 9},
    "trimmed, own projection": {
        "is_trimmed": True,
        "draft_vocab_size": 31,
        "has_own_unembed": True,
    },
    "own tables": {"has_own_embedding": True, "has_own_unembed": True, "layers": (FULL, SLIDING)},
}
REQUESTS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    "hot": {"temperature": 2.0, "seed": 2**62 + 3},
}
# Cut along their first dimension, along their second, and by tokens.
FIRST = ("ctx_proj", "wq", "wk", "wv", "gate", "up", "sinks")
SECOND = ("wo", "down")
TOKENS = ("markov_w2", "unembed")


def cut(name: str, value: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A rank's share of a weight of the whole."""
    last = name.rpartition(".")[2]
    if num_ranks == 1:
        return value
    if last in TOKENS:
        rows = -(-len(value) // (4 * num_ranks)) * 4
        padded = torch.cat([value, value.new_zeros(rows * num_ranks - len(value), value.shape[1])])
        return padded[rank * rows :][:rows]
    if name.startswith("drafter.") and last in FIRST + SECOND:
        return value.chunk(num_ranks, int(last in SECOND))[rank].contiguous()
    return value


def drafts(
    config: DSparkConfig, num_ranks: int, dtype: torch.dtype, request: dict[str, float]
) -> list[list[Tensor]]:
    """Outputs of every rank."""
    _, weights, state = make_step(config, dtype, WIDE_TARGET)
    module = DraftStep(config, WIDE_TARGET, EMBED_EPS, num_ranks, dtype, STATE)
    graph = trace(module, StepSpec(DRAFT_STEP, 1, config.block_size), STATE, num_ranks, dtype)
    for run_pass in PASSES:
        graph = run_pass(graph)
    ranks = range(num_ranks)
    shares: list[Tensors] = [
        {name: cut(name, value, rank, num_ranks) for name, value in weights.items()}
        for rank in ranks
    ]
    for name, parameter in module.named_parameters():
        assert {share[name].shape for share in shares} == {parameter.shape}, name
    # Ranks share the heads of the caches, [pages, positions, heads, d].
    contexts: list[Tensors] = [
        {name: value.chunk(num_ranks, 2)[rank].contiguous() for name, value in state.items()}
        for rank in ranks
    ]
    inputs = step_inputs(1, 1, 65) | {
        "tokens": torch.tensor([17], dtype=torch.int32),
        "page_table": PAGES,
        "is_coupled": torch.zeros(1, dtype=torch.int32),
        "wants_logits": torch.ones(1, dtype=torch.int32),
    }
    given = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, **request}
    inputs |= {
        name: torch.tensor([value], dtype=inputs[name].dtype) for name, value in given.items()
    }
    return run_graph(graph, shares, contexts, inputs)


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_draft_what_one_rank_drafts(variant: str, request_name: str) -> None:
    config = dataclasses.replace(SHARED, **VARIANTS[variant])
    request = REQUESTS[request_name]
    (one,) = drafts(config, 1, torch.float32, request)
    assert len(set(one[0].tolist())) > 1
    for num_ranks in (2, 4):
        every = drafts(config, num_ranks, torch.float32, request)
        for outputs in every:
            for ours, first in zip(outputs, every[0], strict=True):
                assert torch.equal(ours, first)
        tokens, *numbers = every[0]
        assert tokens.tolist() == one[0].tolist()
        for ours, theirs in zip(numbers, one[1:], strict=True):
            is_finite = torch.isfinite(theirs)
            assert torch.equal(torch.isfinite(ours), is_finite)
            # Sums of a row in float32, in parts.
            torch.testing.assert_close(ours[is_finite], theirs[is_finite], rtol=1e-4, atol=1e-4)


def test_the_graph_of_ranks_exchanges_sums_alone() -> None:
    """Two sums a layer; of the head nothing but what `draft_head` exchanges itself."""
    module = DraftStep(SHARED, WIDE_TARGET, EMBED_EPS, 4, torch.bfloat16, STATE)
    graph = trace(module, StepSpec(DRAFT_STEP, 1, 7), STATE, 4, torch.bfloat16)
    for run_pass in PASSES:
        graph = run_pass(graph)
    targets = [str(node.target) for node in graph.module.graph.nodes]
    assert targets.count("ink.all_reduce.default") == 2 * len(SHARED.layers)
    assert not any("all_gather" in target for target in targets)


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"]
)
def test_sizes_that_do_not_divide_are_named(name: str) -> None:
    config = dataclasses.replace(SHARED, **{name: 46})
    config.check_sharding(2)
    with pytest.raises(ConfigError, match=f"tp size 4 does not divide {name} = 46 of the drafter"):
        config.check_sharding(4)
