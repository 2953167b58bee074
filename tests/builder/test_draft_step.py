"""Drafts of the traced, lowered draft step against the equations in float64, written once more.

Weights and context are random; every kind of drafter that a `DSparkConfig` can say is there.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from graph_run import step_inputs
from plan_run import run_plan
from torch import Tensor

from inkrt.builder.lower import lower
from inkrt.builder.passes import PASSES
from inkrt.builder.trace import trace
from inkrt.engines.dspark.config import DraftLayerConfig, DSparkConfig
from inkrt.engines.dspark.model import DraftStep
from inkrt.engines.interface import DraftTarget, StateOptions
from inkrt.runtime.engine_file import DRAFT_STEP, StepSpec

WINDOW = 12
NUM_TOKENS, PADDED = 90, 96
TARGET = DraftTarget(
    hidden_size=30,
    num_hidden_layers=9,
    vocab_size=PADDED,
    unpadded_vocab_size=NUM_TOKENS,
    max_position_embeddings=1000,
    softcap=3.0,
    has_embed_norm=True,
    has_mlp_conv=True,
)
FULL, SLIDING = DraftLayerConfig(False, None), DraftLayerConfig(True, WINDOW)
BASE = DSparkConfig(
    hidden_size=30,
    target_hidden_size=30,
    layers=(FULL, SLIDING),
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=44,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    max_position_embeddings=4096,
    block_size=7,
    anchor_first=True,
    mask_token_id=93,
    taps=(2, 5),
    tap_point="layer_output",
    head="rnn",
    markov_rank=14,
    vocab_size=PADDED,
    draft_vocab_size=PADDED,
    is_trimmed=False,
    has_confidence=True,
    confidence_reads_markov=True,
    confidence_has_bias=True,
    has_own_embedding=False,
    has_own_unembed=False,
    applies_embed_norm=False,
    softcap_place="before_bias",
    logits_divisor=1.0,
    has_sinks=False,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "rnn": {},
    "gated": {"head": "gated"},
    "vanilla": {"head": "vanilla"},
    "causal": {"layers": (DraftLayerConfig(True, None),) * 2},
    "sliding both ways": {"layers": (DraftLayerConfig(False, WINDOW), FULL)},
    "window below the block": {"layers": (DraftLayerConfig(True, 3), SLIDING)},
    "1+N": {"anchor_first": False},
    "1+N, gated": {"anchor_first": False, "head": "gated", "layers": (SLIDING, SLIDING)},
    "sinks": {"has_sinks": True},
    "trimmed": {"is_trimmed": True, "draft_vocab_size": 31},
    "trimmed, own projection": {
        "is_trimmed": True,
        "draft_vocab_size": 31,
        "has_own_unembed": True,
        "softcap_place": "none",
    },
    "own tables": {"has_own_embedding": True, "has_own_unembed": True, "head": "gated"},
    "second table without padding": {"draft_vocab_size": NUM_TOKENS, "head": "vanilla"},
    "embedding norm": {"applies_embed_norm": True},
    "no confidence": {"has_confidence": False},
    "confidence without bias": {"confidence_has_bias": False},
    "confidence of the row alone": {"confidence_reads_markov": False},
    "cap behind the bias": {"softcap_place": "after_bias"},
    "no cap, divided": {"softcap_place": "none", "logits_divisor": 2.5},
    "block of one": {"block_size": 1},
    "block of 16": {"block_size": 16},
}
# Page ends and window-1, window, window+1.
POSITIONS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 63, 64, 65)
STATE = StateOptions(num_slots=2, max_seq_len=128, page_tokens=64)
PAGES = torch.tensor([3, 1], dtype=torch.int32)
ANCHOR = 17
EMBED_EPS = 0.01
Tensors = dict[str, Tensor]


def make_step(
    config: DSparkConfig, dtype: torch.dtype, target: DraftTarget = TARGET
) -> tuple[DraftStep, Tensors, Tensors]:
    """The module, its weights and its state, random."""
    module = DraftStep(config, target, EMBED_EPS, 1, dtype, STATE)
    generator = torch.Generator().manual_seed(3)

    def draw(name: str, shape: torch.Size, kept: torch.dtype) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("d2t"):
            ids = torch.randperm(NUM_TOKENS, generator=generator)[: shape[0]].sort().values
            return (ids - torch.arange(shape[0])).int()
        if name.endswith("norm"):
            return (1 + 0.3 * noise).to(kept)
        is_table = name.rpartition(".")[2] in ("embed", "markov_w1", "markov_w2", "sinks")
        # The mixing projections are loud, so that the token before decides what comes next.
        gain = 5.0 if name.endswith(("gate_proj", "joint_proj")) else 1.5
        is_unit = is_table or name.endswith("bias")
        return (noise * (1.0 if is_unit else gain * shape[-1] ** -0.5)).to(kept)

    weights = {name: draw(name, x.shape, x.dtype) for name, x in module.named_parameters()}
    state = {name: draw(name, x.shape, x.dtype) for name, x in module.named_buffers()}
    return module, weights, state


def run_step(
    config: DSparkConfig, dtype: torch.dtype, position: int
) -> tuple[list[Tensor], Tensors, Tensors]:
    """Outputs of the plan with greedy draws, and what it ran on."""
    module, weights, state = make_step(config, dtype)
    graph = trace(module, StepSpec(DRAFT_STEP, 1, config.block_size), STATE, 1, dtype)
    for run_pass in PASSES:
        graph = run_pass(graph)
    inputs = step_inputs(1, 1, position) | {
        "tokens": torch.tensor([ANCHOR], dtype=torch.int32),
        "page_table": PAGES,
        "temperature": torch.zeros(1),
        "is_coupled": torch.zeros(1, dtype=torch.int32),
        "wants_logits": torch.ones(1, dtype=torch.int32),
    }
    before = {name: value.clone() for name, value in state.items()}
    outputs = run_plan(lower(graph), weights, state, inputs)
    assert all(torch.equal(state[name], before[name]) for name in state), "state was written"
    return outputs, weights, state


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("position", [1, 65])
def test_kinds_of_drafters(name: str, position: int):
    config = dataclasses.replace(BASE, **VARIANTS[name])
    outputs, weights, state = run_step(config, torch.float32, position)
    require_near(outputs, Reference(config, weights, state, position), 2e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_positions(position: int):
    config = dataclasses.replace(BASE, layers=(FULL, SLIDING, DraftLayerConfig(False, WINDOW)))
    outputs, weights, state = run_step(config, torch.float32, position)
    require_near(outputs, Reference(config, weights, state, position), 2e-5)


def test_rows_may_reach_beyond_the_last_position():
    outputs, weights, state = run_step(BASE, torch.float32, 127)
    require_near(outputs, Reference(BASE, weights, state, 127), 2e-5)


def test_bfloat16():
    """Other roundings may tip a draft; the chain of this seed is the same."""
    outputs, weights, state = run_step(BASE, torch.bfloat16, 65)
    require_near(outputs, Reference(BASE, weights, state, 65, outputs[0].tolist()), 2e-2)


class Reference:
    """A block of greedy drafts in float64.

    Args:
        config: of the drafter.
        weights: of the step.
        state: of the step.
        position: of the anchor.
        forced: drafts to condition on instead of the reference's own.
    """

    def __init__(
        self,
        config: DSparkConfig,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        position: int,
        forced: list[int] | None = None,
    ) -> None:
        self.config = config
        self.position = position
        self.w = {name: value.double() for name, value in weights.items()}
        self.state = {name: value.double() for name, value in state.items()}
        own = "drafter." if config.has_own_embedding else ""
        table = self.w[f"{own}embed"]
        num_rows = config.block_size if config.anchor_first else config.block_size + 1
        rows = [table[token] for token in [ANCHOR] + [config.mask_token_id] * (num_rows - 1)]
        if config.applies_embed_norm:
            rows = [self.norm(row, self.w["embed_norm"], EMBED_EPS) for row in rows]
        for number, layer in enumerate(config.layers):
            rows = self.layer(rows, number, layer)
        rows = [self.norm(row, self.w["drafter.norm"]) for row in rows]
        self.tokens: list[int] = []
        self.confidences: list[float] = []
        self.logits = torch.full((config.block_size, NUM_TOKENS), -math.inf).double()
        self.head(rows if config.anchor_first else rows[1:], forced)

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        eps = self.config.rms_norm_eps if eps is None else eps
        return weight * x / (x.dot(x) / len(x) + eps) ** 0.5

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Pairs (i, i + d/2) as complex numbers, turned."""
        half = len(x) // 2
        angles = position * self.config.rope_theta ** (-torch.arange(half).double() / half)
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half).double(), angles)
        return torch.cat([turned.real, turned.imag])

    def layer(self, rows: list[Tensor], number: int, layer: DraftLayerConfig) -> list[Tensor]:
        config, p = self.config, f"drafter.layers.{number}."
        w = {name.removeprefix(p): x for name, x in self.w.items() if name.startswith(p)}
        d, first = config.head_dim, self.position
        queries, keys, values = [], [], []
        for j, row in enumerate(rows):
            u = self.norm(row, w["attn_norm"])
            q = (w["wq"] @ u).view(-1, d)
            k = (w["wk"] @ u).view(-1, d)
            queries.append([self.turn(self.norm(x, w["q_norm"]), first + j) for x in q])
            keys.append([self.turn(self.norm(x, w["k_norm"]), first + j) for x in k])
            values.append((w["wv"] @ u).view(-1, d))
        out = []
        for j, row in enumerate(rows):
            heads = []
            for h in range(config.num_attention_heads):
                kv = h // (config.num_attention_heads // config.num_key_value_heads)
                pairs = []
                lowest = first + j - (layer.window - 1) if layer.window else 0
                for at in range(max(lowest, 0), first):
                    place = (int(PAGES[at // 64]), at % 64, kv)
                    pairs.append(tuple(self.state[f"{p}{x}_cache"][place] for x in "kv"))
                seen = range(j + 1) if layer.is_causal else range(len(rows))
                pairs += [(keys[i][kv], values[i][kv]) for i in seen]
                weights = [math.exp(queries[j][h].dot(k).item() / d**0.5) for k, _ in pairs]
                total = sum(weights) + (math.exp(w["sinks"][h]) if config.has_sinks else 0)
                heads.append(sum(x / total * v for x, (_, v) in zip(weights, pairs, strict=True)))
            x = row + w["wo"] @ torch.cat(heads)
            z = self.norm(x, w["mlp_norm"])
            gate = w["gate"] @ z
            out.append(x + w["down"] @ (gate / (1 + torch.exp(-gate)) * (w["up"] @ z)))
        return out

    def head(self, rows: list[Tensor], forced: list[int] | None) -> None:
        config, rank = self.config, self.config.markov_rank
        w = {name.removeprefix("drafter."): x for name, x in self.w.items()}
        drafted = range(min(config.draft_vocab_size, NUM_TOKENS))
        target_of = [i + int(w["d2t"][i]) if config.is_trimmed else i for i in drafted]
        projection = self.w["drafter.unembed" if config.has_own_unembed else "unembed"]
        columns = list(drafted) if config.has_own_unembed else target_of
        state, previous = torch.zeros(rank).double(), ANCHOR

        def cap(x: Tensor, place: str) -> Tensor:
            return 3 * torch.tanh(x / 3) if config.softcap_place == place else x

        for k, h in enumerate(rows):
            e = w["markov_w1"][previous]
            z = e
            if config.head == "gated":
                z = torch.sigmoid(w["gate_proj"] @ torch.cat([h, e]) + w["gate_bias"]) * e
            if config.head == "rnn":
                joint = w["joint_proj"] @ torch.cat([state, e, h]) + w["joint_bias"]
                gate, candidate, output = joint[:rank], joint[rank:-rank], joint[-rank:]
                z = torch.tanh(output)
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(candidate)
            base = cap(projection[columns] @ (h / config.logits_divisor), "before_bias")
            logits = cap(base + w["markov_w2"][list(drafted)] @ z, "after_bias")
            self.logits[k, target_of] = logits
            if config.has_confidence:
                read = torch.cat([h, e]) if config.confidence_reads_markov else h
                bias = w["confidence_bias"][0] if config.confidence_has_bias else 0.0
                score = w["confidence_proj"][0].dot(read) + bias
                self.confidences.append(1 / (1 + math.exp(-score)))
            self.tokens.append(int(self.logits[k].argmax()))
            previous = forced[k] if forced else self.tokens[-1]


def require_near(outputs: list[Tensor], expected: Reference, rtol: float) -> None:
    """Drafts are equal, logits and confidences near, -inf where no token can be drafted."""
    tokens, logits = outputs[:2]
    assert tokens.tolist() == expected.tokens
    assert len(set(expected.tokens)) > 1 or expected.config.block_size == 1
    is_free = torch.isinf(expected.logits)
    assert torch.equal(torch.isinf(logits), is_free)
    assert is_free.any() == expected.config.is_trimmed
    error = (logits - expected.logits).masked_fill(is_free, 0.0)
    assert error.norm() <= rtol * expected.logits.masked_fill(is_free, 0.0).norm()
    if expected.config.has_confidence:
        wanted = torch.tensor(expected.confidences).double()
        assert (outputs[2] - wanted).norm() <= rtol * wanted.norm()
    else:
        assert len(outputs) == 2
