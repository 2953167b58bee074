"""A drafter in a whole engine, against the model that it is trained with and against itself."""

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands import engine_text
from inkrt.engines.nano import export
from inkrt.engines.nano.drafter import HEADS, Drafter, drafter_config
from inkrt.engines.nano.drafter_export import embed_in_checkpoint
from inkrt.engines.nano.model import Nano
from inkrt.engines.nano.parts import NanoConfig, plain_rows
from inkrt.errors import CapacityError, RequestError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import DraftSpec, read_config, read_plans
from inkrt.runtime.executor import Sampling
from inkrt.runtime.llm import LLM
from inkrt.runtime.noise import Purpose
from inkrt.runtime.sampling import draw
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import DraftOutput, Session
from inkrt.runtime.spec.config import SpeculativeConfig

# Ranks share neither the tokens evenly nor the padding.
SMALL = NanoConfig(
    vocab_size=96,
    unpadded_vocab_size=89,
    eos_token_id=7,
    hidden_size=48,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    sliding_window_size=9,
    d_rel=4,
    rel_extent=14,
    log_scaling_n_floor=11,
    moe_intermediate_size=20,
    n_routed_experts=8,
    num_experts_per_tok=3,
    qk_l2_clip_threshold=2.5,
    rel_l2_clip_threshold=0.7,
)
CONTEXT = 136
BLOCK = 7
# No context, page ends, and the last position of a session.
POSITIONS = (0, 1, 2, 63, 64, 65, 128, CONTEXT - 1)
TOKENS = [random.Random(4).randrange(SMALL.unpadded_vocab_size) for _ in range(CONTEXT + 1)]
GREEDY = Sampling()
MakeEngine = Callable[..., Path]


@pytest.fixture(scope="module")
def target() -> Nano:
    """A model with every parameter away from its neutral value, in bfloat16's numbers."""
    torch.manual_seed(3)
    model = Nano(SMALL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "attn_res" in name or "sink" in name or "rel_logits" in name:
                parameter.add_(0.4 * torch.randn(parameter.shape))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(target: Nano) -> Drafter:
    """An untrained drafter whose heads are heard, in bfloat16's numbers, as it is exported."""
    torch.manual_seed(5)
    config = dataclasses.replace(drafter_config(target), block_size=BLOCK, head_dim=16)
    drafter = Drafter(config, HEADS).eval().requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape))
        if "heads." in name or "markov" in name:
            parameter.copy_(torch.randn(parameter.shape) * (0.4 if "heads" in name else 0.6))
        parameter.copy_(parameter.bfloat16().float())
    return drafter


@pytest.fixture(scope="module")
def make_drafting_engine(
    target: Nano, drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> MakeEngine:
    """Engines by head; further arguments are build options."""

    @cache
    def make(head: str, **options: int) -> Path:
        folder = tmp_path_factory.mktemp("nano")
        export.write_checkpoint(target, folder / "checkpoint", folder)
        embed_in_checkpoint(folder / "checkpoint", drafter, head)  # type: ignore[arg-type]
        chosen = {"max_seq_len": CONTEXT, "max_verify_tokens": 1, "dtype": "float32"} | options
        build_engine(folder / "checkpoint", folder / "engine", BuildOptions(**chosen))  # type: ignore[arg-type]
        return folder / "engine"

    return make


class Oracle:
    """Drafts of the training code for the token list TOKENS."""

    def __init__(self, drafter: Drafter, folder: Path, head: str) -> None:
        self.target = export.read_model(folder, torch.float32).eval()
        self.drafter, self.head = drafter, head
        self.tokens = torch.tensor([TOKENS])
        taps = drafter.config.target_layer_ids
        with torch.no_grad():
            self.taps = self.target(self.tokens, taps=taps).taps

    @torch.no_grad()
    def __call__(self, position: int, drafts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits [g, V] and confidences [g] of a block, each behind the drafts before it."""
        rows, anchors = plain_rows(self.tokens), torch.tensor([[position]])
        hidden = self.drafter(
            self.target, self.taps, self.tokens, rows.position, rows.segment, anchors
        )[0, 0]
        previous = torch.tensor([TOKENS[position], *drafts[:-1]])
        logits, scores = self.drafter.draft(self.head, self.target, hidden, previous)
        return logits.numpy(), scores.sigmoid().numpy()


def draft_at(session: Session, position: int, sampling: Sampling, *, coupled: bool) -> DraftOutput:
    """Append TOKENS up to a position and draft behind the token there."""
    if position > session.length:
        session.prefill(TOKENS[session.length : position], GREEDY, wants_logits=False)
    return session.draft(TOKENS[position], sampling, coupled=coupled, wants_logits=True)


def require_near(got: np.ndarray, expected: np.ndarray, rtol: float = 1e-4) -> None:
    assert got.shape == expected.shape
    assert np.linalg.norm(got - expected) <= rtol * np.linalg.norm(expected)


@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_those_of_the_training_code(drafter, make_drafting_engine, head):
    folder = make_drafting_engine(head)
    oracle = Oracle(drafter, folder.parent / "checkpoint", head)
    hot = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=2**61 + 5)
    drafted = set()
    with Engine.open(folder) as engine, engine.session() as session:
        assert engine.config.draft == DraftSpec("dspark", BLOCK, head, True)
        for position in POSITIONS:
            greedy = draft_at(session, position, GREEDY, coupled=False)
            coupled = draft_at(session, position, hot, coupled=True)
            independent = draft_at(session, position, hot, coupled=False)
            assert session.length == position
            for output in (greedy, coupled, independent):
                logits, confidences = oracle(position, output.tokens.tolist())
                require_near(output.logits, logits)
                require_near(output.confidences, confidences)
                drafted.add(tuple(output.tokens.tolist()))
            # The runtime's own sampling has the same noise without torch.
            places = position + 1 + np.arange(BLOCK)
            assert greedy.tokens.tolist() == greedy.logits.argmax(-1).tolist()
            assert coupled.tokens.tolist() == draw(coupled.logits, hot, places).tolist()
            noise = {"purpose": Purpose.DRAFT, "anchors": position}
            expected = draw(independent.logits, hot, places, **noise)
            assert independent.tokens.tolist() == expected.tolist()
    assert len(drafted) > 2 * len(POSITIONS)


def _context(engine: Engine, session: Session, rank: int = 0) -> dict[str, torch.Tensor]:
    """Keys and values of the drafter at the session's positions, by buffer."""
    places = torch.arange(session.length)
    pages = torch.tensor(session._sequence.pages)[places // 64]
    return {
        spec.name: engine.executor.state(spec.name, rank)[pages, places % 64].clone()
        for spec in engine.config.state.buffers
        if spec.name.startswith("drafter.")
    }


@pytest.fixture(scope="module")
def engine(make_drafting_engine):
    folder = make_drafting_engine("rnn", max_verify_tokens=8, max_batch_size=5)
    with Engine.open(folder) as opened:
        yield opened


@pytest.mark.slow
def test_context_is_the_same_however_tokens_came(drafter: Drafter, engine):
    """Narrow steps give the same bits at any width and after any rejections, wide ones nearly."""
    length = 133
    wide, narrow, single, verified = (engine.session() for _ in range(4))
    wide.prefill(TOKENS[:length], GREEDY)
    narrow.prefill(TOKENS[:length], GREEDY, chunk=8)
    for token in TOKENS[:length]:
        single.decode(token, GREEDY)
    generator = random.Random(9)
    while (position := verified.length) < length:
        width = min(generator.randint(1, 8), CONTEXT - position)
        kept = min(generator.randint(1, width), length - position)
        drafts = TOKENS[position : position + kept]
        drafts += [generator.randrange(89) for _ in range(width - kept)]
        verified.step(drafts, GREEDY)
        verified.rollback(position + kept)

    expected = _context(engine, single)
    assert len(expected) == 2 * drafter.config.num_hidden_layers  # keys and values
    for session in (narrow, verified):
        for name, value in _context(engine, session).items():
            assert torch.equal(value, expected[name]), name
    for name, value in _context(engine, wide).items():
        require_near(value.numpy(), expected[name].numpy())
        assert value.norm(dim=-1).min() > 0  # every position was written
    sampling = Sampling(temperature=1.0, seed=3)
    first, *others = (
        session.draft(TOKENS[length], sampling, coupled=False, wants_logits=True)
        for session in (single, narrow, verified)
    )
    for other in others:
        np.testing.assert_array_equal(other.logits, first.logits)
        assert other.tokens.tolist() == first.tokens.tolist()
    for session in (wide, narrow, single, verified):
        session.close()


def test_drafting_changes_no_state(engine):
    names = [spec.name for spec in engine.config.state.buffers]
    with engine.session() as session:
        session.prefill(TOKENS[:70], GREEDY)
        before = {name: engine.executor.state(name).clone() for name in names}
        first, second = (
            session.draft(5, Sampling(temperature=1.0), coupled=True, wants_logits=wants)
            for wants in (True, False)
        )
        assert all(torch.equal(engine.executor.state(name), before[name]) for name in names)
    assert first.tokens.tolist() == second.tokens.tolist()
    assert second.logits.shape == (0, SMALL.unpadded_vocab_size)


def test_forks_draft_the_same_and_go_apart(engine):
    with engine.session() as session:
        session.prefill(TOKENS[:66], GREEDY)
        with session.fork() as fork, engine.session() as alone:
            other = [*TOKENS[:66], 3, 4, 5]
            fork.prefill(other[66:], GREEDY)
            alone.prefill(other[:64], GREEDY)
            alone.prefill(other[64:], GREEDY)
            drafts = [
                s.draft(9, GREEDY, coupled=False, wants_logits=True).logits for s in (fork, alone)
            ]
            require_near(drafts[0], drafts[1])
        session.prefill(TOKENS[66:69], GREEDY)
        ours = session.draft(9, GREEDY, coupled=False, wants_logits=True).logits
        assert np.linalg.norm(ours - drafts[0]) > 1e-3 * np.linalg.norm(ours)


def test_a_full_session_drafts_nothing(engine):
    with engine.session() as session:
        session.prefill(TOKENS[:CONTEXT], GREEDY)
        with pytest.raises(CapacityError, match="do not fit into the engine's context of 136"):
            session.draft(1, GREEDY, coupled=False, wants_logits=False)


def test_ranks_draft_what_one_rank_drafts(make_drafting_engine, engine):
    """Every rank computes the same bits; of one and two ranks only orders of addition differ."""
    folder = make_drafting_engine("rnn", tp_size=2)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=11)
    with Engine.open(folder) as two, two.session() as session, engine.session() as one:
        for position in (0, 64, 100):
            ours = draft_at(session, position, sampling, coupled=False)
            theirs = draft_at(one, position, sampling, coupled=False)
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            require_near(ours.logits, theirs.logits)
            require_near(ours.confidences, theirs.confidences)
            bound = two.executor._bound["draft"]
            for name, index in bound.plan.outputs.items():
                first, second = (tensors[index] for tensors in bound.tensors)
                assert torch.equal(first, second), name
        halves = [_context(two, session, rank) for rank in (0, 1)]
        for name, whole in _context(engine, one).items():
            both = torch.cat([half[name] for half in halves], dim=1)  # each has half of the heads
            require_near(both.numpy(), whole.numpy())


@pytest.mark.slow
def test_ranks_agree_in_every_round(make_drafting_engine):
    """Drafts and drawn rows of each rank are the same, and so is what each of them would accept."""
    folder = make_drafting_engine("rnn", tp_size=2, max_verify_tokens=8)
    params = SamplingParams(temperature=3.0, seed=4, max_tokens=40, ignore_eos=True)
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        plain = llm.generate([TOKENS[:30]], params)[0].outputs
    drawn: list[tuple[str, list[list[int]]]] = []
    with LLM(folder) as llm:
        run = llm.engine.executor.run

        def watched(step, *given, **options):
            output = run(step, *given, **options)
            bound = llm.engine.executor._bound[step]
            index = bound.plan.outputs["tokens"]
            drawn.append((step, [tensors[index].tolist() for tensors in bound.tensors]))
            return output

        llm.engine.executor.run = watched
        output = llm.generate([TOKENS[:30]], params)[0]
    assert output.outputs == plain
    assert output.speculation.accepted > 3
    assert all(first == second for _, (first, second) in drawn)
    accepted = []
    for (step, drafts), (after, rows) in itertools.pairwise(drawn):
        if step == "draft" and after.startswith("verify"):
            for ours, theirs in zip(drafts, rows, strict=True):  # each rank by its own
                same = [a == b for a, b in zip(ours, theirs, strict=False)]
                accepted.append([*same, False].index(False))
    assert accepted[::2] == accepted[1::2]
    assert len(accepted) == 2 * output.speculation.rounds
    assert sum(accepted[::2]) >= output.speculation.accepted


def test_shared_weights_are_packed_once(make_drafting_engine):
    folder = make_drafting_engine("rnn")
    with safe_open(folder / "rank0-00001-of-00001.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"embed", "unembed", "drafter.ctx_proj", "drafter.layers.1.wo"} <= names
    assert not {"drafter.embed", "drafter.unembed"} & names
    config = json.loads((folder / "config.json").read_text())
    assert [step["name"] for step in config["steps"]] == ["decode", "prefill64"]
    assert Engine.check(folder, verify=True) == []
    lines = engine_text.summary(read_config(folder), read_plans(folder, 0))
    assert "drafter     dspark, 7 drafts, rnn head, with confidences" in lines
    assert any(line.startswith("draft ") for line in lines)


def test_an_engine_without_drafter_says_so(make_engine):
    folder = make_engine("float32", num_layers=6, max_batch_size=8)
    with Engine.open(folder) as opened, opened.session() as session:
        assert opened.config.draft is None
        with pytest.raises(RequestError, match="this engine has no drafter") as caught:
            session.draft(1, GREEDY, coupled=False, wants_logits=False)
        assert caught.value.param == "method"
