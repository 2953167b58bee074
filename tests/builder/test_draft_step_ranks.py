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
from torch import Tensor, nn

from inkrt.builder.passes import PASSES
from inkrt.builder.trace import trace
from inkrt.engines.dspark.config import DSparkConfig
from inkrt.engines.dspark.model import Drafter, DraftStep
from inkrt.engines.dspark.weights import (
    DraftTensors,
    sources_of_rank,
    tensor_table,
    weight_sources,
)
from inkrt.engines.interface import StepInputs
from inkrt.engines.parts import parameter
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
NO_TENSORS = DraftTensors({}, {})
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
    for name, own in module.named_parameters():
        assert {share[name].shape for share in shares} == {own.shape}, name
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


class Context(nn.Module):
    """What a step of the target does for the drafter, behind features that it has."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        tokens, dtype = TARGET.unpadded_vocab_size, torch.float32
        self.drafter = Drafter(SHARED, tokens, num_ranks, dtype, STATE)
        self.features = nn.ParameterList(parameter(5, 36, dtype=dtype) for _ in SHARED.taps)

    def row_parallel_weights(self) -> frozenset[str]:
        return frozenset()

    def forward(self, step: StepInputs) -> Tensor:
        self.drafter.write_context(list(self.features), step)
        return step.tokens


def context(num_ranks: int, whole: Tensors) -> tuple[Tensors, set[str]]:
    """Caches with the heads of all ranks, and the operators of the graph."""
    module = Context(num_ranks)
    graph = trace(module, StepSpec("verify5", 5, 5), STATE, num_ranks, torch.float32)
    for run_pass in PASSES:
        graph = run_pass(graph)
    shares = [
        {
            name: value.chunk(num_ranks)[rank].contiguous()
            if "ctx_proj." in name
            else cut(name, value, rank, num_ranks)
            for name, value in whole.items()
        }
        for rank in range(num_ranks)
    ]
    states = [
        {name: torch.zeros(value.shape) for name, value in module.named_buffers()}
        for _ in range(num_ranks)
    ]
    inputs = step_inputs(5, 4, 62) | {"page_table": PAGES}
    run_graph(graph, shares, states, inputs)
    names = {str(node.target) for node in graph.module.graph.nodes}
    return {name: torch.cat([state[name] for state in states], 2) for name in states[0]}, names


def test_ranks_keep_the_context_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With features projected at once and tap by tap."""
    generator = torch.Generator().manual_seed(4)
    whole: Tensors = {
        name: torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5
        for name, value in Context(1).named_parameters()
    }
    expected, names = context(1, whole)
    assert "ink.sum_parts.default" not in names
    assert all(value.abs().sum() > 0 for value in expected.values())
    taps = whole["drafter.ctx_proj"].chunk(len(SHARED.taps), 1)
    apart = {name: value for name, value in whole.items() if name != "drafter.ctx_proj"}
    apart |= {f"drafter.ctx_proj.{i}": value.contiguous() for i, value in enumerate(taps)}
    for weights in (whole, apart):
        for num_ranks in (1, 2, 4):
            got, names = context(num_ranks, weights)
            assert ("ink.sum_parts.default" in names) == (weights is apart)
            assert ("ink.all_gather.default" in names) == (num_ranks > 1)
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr("inkrt.engines.dspark.config.MAX_FEATURES", 71)


def test_sources_are_cut_as_the_module_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter of every rank has a source of its shape; shares make up the whole."""
    for most in (8192, 71):
        monkeypatch.setattr("inkrt.engines.dspark.config.MAX_FEATURES", most)
        shapes = dict(tensor_table(SHARED, NO_TENSORS).values())
        tensors = DraftTensors({name: name for name in shapes}, shapes)
        sources = weight_sources(SHARED, tensors, "here", NUM_TOKENS)
        for num_ranks in (1, 2, 4):
            module = Drafter(SHARED, NUM_TOKENS, num_ranks, torch.float32, STATE)
            for rank in range(num_ranks):
                own = sources_of_rank(SHARED, sources, NUM_TOKENS, rank, num_ranks)
                found = {}
                for name, source in own.items():
                    (part,) = source.parts
                    like = torch.empty(part.shape, device="meta")[part.index]
                    found[name] = (len(like) + source.pad, *like.shape[1:])
                assert found == {
                    f"drafter.{name}": tuple(value.shape)
                    for name, value in module.named_parameters()
                }


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
