"""MTP heads of a tiny Inkling against transformers: drafts, state after rejections, ranks.

The oracle is `MtpModel` of transformers, fed with a whole context at once. So whatever a session
has been through, drafts must be those of its tokens alone. In two things transformers differs from
what the checkpoints are made for: it leaves out the model's embedding norm, and it gives depths
with a window the mask of full attention. The oracle puts both right.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny import inkling
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.noise import Purpose, gumbel, token_bits
from inkrt.runtime.session import DraftOutput, Session

transformers = pytest.importorskip("transformers")

GREEDY = Sampling()
LIMIT = 490
CONTEXT = 136
MakeFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Four layers, by what differs in config.json and tensors of the chain."""

    @cache
    def make(*, has_chain_norm: bool = False, hidden_first: bool = True) -> Path:
        folder = tmp_path_factory.mktemp("inkling") / "checkpoint"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inkling, "NUM_LAYERS", 4)
            patch.setattr(inkling, "HAS_CHAIN_NORM", has_chain_norm)
            patch.setattr(inkling, "HIDDEN_FIRST", hidden_first)
            write_checkpoint(folder, model="inkling", seed=3, dtype="float32")
        return folder

    return make


@pytest.fixture(scope="module")
def make_engine(
    make_checkpoint: MakeFolder, tmp_path_factory: pytest.TempPathFactory
) -> MakeFolder:
    @cache
    def make(tp_size: int = 1, max_verify_tokens: int = 4, **chain: bool) -> Path:
        folder = tmp_path_factory.mktemp("engine") / "engine"
        options = BuildOptions(
            max_seq_len=CONTEXT,
            max_batch_size=3,
            tp_size=tp_size,
            max_verify_tokens=max_verify_tokens,
            prefill_chunk=16,
        )
        build_engine(make_checkpoint(**chain), folder, options)
        return folder

    return make


@pytest.fixture(scope="module")
def engine(make_engine: MakeFolder) -> Iterator[Engine]:
    with Engine.open(make_engine()) as opened:
        yield opened


class Oracle:
    """Drafts of transformers for whole token lists."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers.modeling_layers import MtpModel

        self.model = transformers.InklingForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.heads = MtpModel.from_pretrained(self.model).eval()
        self.raw_embedding = self.heads.embed_tokens
        self.heads.embed_tokens = self.model.get_input_embeddings()

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> tuple[list[int], NDArray[np.float32]]:
        """Greedy drafts behind the last token, the anchor, and their logits [g, V]."""
        from transformers import masking_utils
        from transformers.cache_utils import MtpCache

        ids = torch.tensor([tokens])
        hidden = self.model.model.language_model(input_ids=ids[:, :-1]).last_hidden_state
        masks = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["hybrid_sliding"]
        windowed = masking_utils.create_sliding_window_causal_mask
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(masks, "sliding_attention", windowed)
            drafts, logits, _ = self.heads(
                input_ids=ids[:, 1:],
                last_hidden_states=hidden,
                attention_mask=None,
                position_ids=torch.arange(1, len(tokens))[None],
                mtp_cache=MtpCache(config=self.model.config.get_mtp_config()),
            )
        return drafts[0].tolist(), logits[0].numpy()


@pytest.fixture(scope="module")
def oracle(make_checkpoint: MakeFolder) -> Oracle:
    return Oracle(make_checkpoint())


def tokens_of(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(LIMIT) for _ in range(count)]


def draft(session: Session, anchor: int, sampling: Sampling = GREEDY) -> DraftOutput:
    return session.draft(anchor, sampling, coupled=False, wants_logits=True)


def relative_error(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def require_drafts(session: Session, anchor: int, oracle: Oracle) -> None:
    ours = draft(session, anchor)
    tokens, logits = oracle([*session.tokens, anchor])
    assert ours.tokens.tolist() == tokens
    assert relative_error(ours.logits, logits) < 1e-5


# Inputs of depth i begin at position i + 1; windows of 22 and an extent of 37.
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 21, 22, 23, 60, 131])
def test_drafts_are_those_of_transformers(
    engine: Engine, oracle: Oracle, length: int, chunk: int | None
) -> None:
    tokens = tokens_of(length, length + 1)
    with engine.session() as session:
        session.prefill(tokens[:-1], GREEDY, chunk=chunk)
        require_drafts(session, tokens[-1], oracle)


@pytest.mark.parametrize(
    "chain",
    [{"has_chain_norm": True}, pytest.param({"hidden_first": False}, marks=pytest.mark.slow)],
)
def test_kinds_of_chains(
    make_checkpoint: MakeFolder, make_engine: MakeFolder, oracle: Oracle, chain: dict[str, bool]
) -> None:
    tokens = tokens_of(7, 41)
    other = Oracle(make_checkpoint(**chain))
    with Engine.open(make_engine(**chain)) as opened, opened.session() as session:
        session.prefill(tokens[:-1], GREEDY)
        require_drafts(session, tokens[-1], other)
        assert relative_error(oracle(tokens)[1], other(tokens)[1]) > 0.1


def test_the_models_embedding_norm_matters(engine: Engine, oracle: Oracle) -> None:
    tokens = tokens_of(8, 31)
    normed = oracle.heads.embed_tokens
    oracle.heads.embed_tokens = oracle.raw_embedding
    _, raw = oracle(tokens)
    oracle.heads.embed_tokens = normed
    with engine.session() as session:
        session.prefill(tokens[:-1], GREEDY)
        assert relative_error(draft(session, tokens[-1]).logits, raw) > 1e-2


def test_fewer_depths_draft_the_same(make_engine: MakeFolder, engine: Engine) -> None:
    tokens = tokens_of(9, 31)
    with Engine.open(make_engine(max_verify_tokens=3)) as short, short.session() as session:
        assert short.config.draft is not None
        assert (short.config.draft.method, short.config.draft.block_size) == ("mtp", 2)
        session.prefill(tokens[:-1], GREEDY)
        ours = draft(session, tokens[-1])
    with engine.session() as session:
        session.prefill(tokens[:-1], GREEDY)
        theirs = draft(session, tokens[-1])
    assert np.array_equal(ours.logits, theirs.logits[:2])


def test_drafting_changes_no_state(engine: Engine) -> None:
    tokens = tokens_of(10, 41)
    names = [spec.name for spec in engine.config.state.buffers]
    with engine.session() as session:
        session.prefill(tokens[:-1], GREEDY)
        before = {name: engine.executor.state(name).clone() for name in names}
        first = draft(session, tokens[-1])
        draft(session, tokens[0])
        assert all(torch.equal(engine.executor.state(name), before[name]) for name in names)
        assert np.array_equal(draft(session, tokens[-1]).logits, first.logits)


def state_at(engine: Engine, session: Session, position: int) -> dict[str, torch.Tensor]:
    """What the heads keep at a position."""
    found = {}
    sequence = session._sequence
    for spec in engine.config.state.buffers:
        if spec.name.startswith("drafter."):
            rows = spec.shape[1]
            entry = sequence.slot if spec.kind == "ring" else sequence.pages[position // rows]
            found[spec.name] = engine.executor.state(spec.name)[entry, position % rows].clone()
    return found


def test_state_after_rejections_is_that_of_a_session_without(
    engine: Engine, oracle: Oracle
) -> None:
    """Every step is a verify step whose last tokens are wrong and rolled back.

    What the heads keep of a token depends on the tokens up to it, so entries of rejected tokens are
    wrong for those that come in their place. For depth i they are at the same time all that looks
    ahead, from rows of the model up to i + 1 positions before, to a rejected token: a cache by the
    model's rows would keep them. Here they lie behind the session's end and are written again.
    """
    generator = random.Random(5)
    text = tokens_of(11, 120)
    start = 9
    with engine.session() as plain:
        plain.prefill(text[:start], GREEDY, chunk=1)
        truth: dict[int, dict[str, torch.Tensor]] = {}
        for position in range(start, len(text) - 1):
            plain.step([text[position]], GREEDY)
            truth[position] = state_at(engine, plain, position)

    num_stale = dict.fromkeys(truth[start], 0)
    with engine.session() as session:
        session.prefill(text[:start], GREEDY, chunk=1)
        length = start
        while length < 110:
            right = generator.randrange(0, 4)  # accepted drafts of 3
            wrong = [generator.randrange(LIMIT) for _ in range(3 - right)]
            session.step([*text[length : length + 1 + right], *wrong], GREEDY)
            # The entries that read a rejected token, before they are rolled back.
            for position in range(length + 1 + right, length + 4):
                for name, value in state_at(engine, session, position).items():
                    num_stale[name] += not torch.equal(value, truth[position][name])
            session.rollback(length + 1 + right)
            for position in range(length, session.length):
                for name, value in state_at(engine, session, position).items():
                    assert torch.equal(value, truth[position][name]), (position, name)
            length = session.length
            if generator.random() < 0.3:
                require_drafts(session, text[length], oracle)
        require_drafts(session, text[length], oracle)
    # The comparison sees stale entries: nearly every rejected token left one in every buffer.
    assert min(num_stale.values()) > 40
    assert len(num_stale) == 3 * 7


def test_forks_go_on_independently(engine: Engine, oracle: Oracle) -> None:
    text, other = tokens_of(12, 80), tokens_of(13, 10)
    with engine.session() as session:
        session.prefill(text[:66], GREEDY)
        with session.fork() as fork:
            for place in range(8):
                session.step([text[66 + place]], GREEDY)
                fork.step([other[place]], GREEDY)
            require_drafts(session, text[74], oracle)
            require_drafts(fork, other[8], oracle)
        session.rollback(68)
        require_drafts(session, other[9], oracle)


def test_drafts_reach_beyond_the_last_position(engine: Engine, oracle: Oracle) -> None:
    tokens = tokens_of(14, CONTEXT)
    with engine.session() as session:
        session.prefill(tokens[:-1], GREEDY)
        require_drafts(session, tokens[-1], oracle)


def test_ranks_draft_what_one_rank_drafts(make_engine: MakeFolder, engine: Engine) -> None:
    tokens = tokens_of(15, 61)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=11)
    with (
        Engine.open(make_engine(tp_size=2)) as two,
        two.session() as session,
        engine.session() as one,
    ):
        outputs = []
        for each in (session, one):
            each.prefill(tokens[:-1], GREEDY)
            outputs.append(draft(each, tokens[-1], sampling))
        assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
        assert relative_error(outputs[0].logits, outputs[1].logits) < 1e-5
        executor: Any = two.executor
        bound = executor._bound["draft"]
        for name, index in bound.plan.outputs.items():
            first, second = (tensors[index] for tensors in bound.tensors)
            assert torch.equal(first, second), name


def test_noise_of_drafts(engine: Engine) -> None:
    """Coupled drafts take the noise of the target's draws: equal logits give equal tokens."""
    tokens = tokens_of(16, 31)
    sampling = Sampling(temperature=2.0, seed=4)
    with engine.session() as session:
        session.prefill(tokens[:-1], GREEDY)
        coupled = session.draft(tokens[-1], sampling, coupled=True, wants_logits=True)
        free = draft(session, tokens[-1], sampling)
        for output, purpose, key in (
            (coupled, Purpose.SAMPLE, 0),
            (free, Purpose.DRAFT, session.length),
        ):
            for place, token in enumerate(output.tokens):
                position = session.length + 1 + place
                noise = gumbel(token_bits(4, position, purpose, LIMIT, key))
                assert int((output.logits[place] / 2.0 + noise).argmax()) == token
