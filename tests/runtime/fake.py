"""An engine folder and an executor without a model.

The executor keeps its state as a real one does: pages and rings, indexed by position. What it
stores are the token ids, and its logits are a hash of the tokens it reads back, so a wrong page,
slot, rollback or fork gives other tokens than `expected_logits` of the plain token list. Reading a
position that is not there is an AssertionError. Decode steps run ahead as on a GPU: whatever is
queued has written its state before anything that is asked for later.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from inkrt.runtime.engine_file import (
    CONFIG_NAME,
    DRAFT_STEP,
    FORMAT,
    FORMAT_VERSION,
    EngineCode,
    EngineConfig,
    FileEntry,
    MemoryTable,
    ModelInfo,
    StateLayout,
    StepSpec,
    encode_code,
    encode_config,
    plan_file,
    sha256_of,
)
from inkrt.runtime.executor import Sampling, StepInput, StepOutput
from inkrt.runtime.executor.decode_queue import DecodeQueue
from inkrt.runtime.executor.round_queue import RoundQueue
from inkrt.runtime.plan import Plan, TensorSpec
from inkrt.runtime.session import Session
from inkrt.runtime.spec.drafter import Proposal

VOCAB, NUM_EMBEDDINGS = 400, 410
WINDOW = 8  # positions that rings are read back for, the current one included
PAGED_WINDOW = 40  # positions that pages are read back for
ROLLBACK = 9
# As tight as it may be: `ROLLBACK` positions back, the window of the next token is just there.
RING = WINDOW + ROLLBACK - 1
EOS, USER, ASSISTANT, END = 0, 1, 2, 3
SPECIAL = ["<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, hello world, hello there",
    "你好世界。今天天气很好。",
    "naïve café ☃ 🎉🎉 👩‍👩‍👧 emojis",
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REBUILD = "ink-build CHECKPOINT -o ENGINE --target cpu --max-seq-len 96 --max-batch-size 3"


def make_config(**changes: Any) -> EngineConfig:
    """Three slots, pages of 4 positions, a context of 96, steps decode, verify2..8, prefill64."""
    steps = [StepSpec("decode", 1, 1)]
    steps += [StepSpec(f"verify{n}", n, n) for n in range(2, 9)]
    steps += [StepSpec("prefill64", 64, 1)]
    fields: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "inkrt_version": "0",
        "model": ModelInfo("fake", "float32", 1, 1, VOCAB, NUM_EMBEDDINGS, (EOS,)),
        "target": "cpu",
        "tp_size": 1,
        "max_seq_len": 96,
        "steps": tuple(steps),
        "state": StateLayout(3, 4, 3 * 24, ROLLBACK, ()),
        "memory": MemoryTable(0, 0, 0, 0, 0, 0),
        "build": {},
        "rebuild_command": REBUILD,
        "plugins": {},
        "checkpoint_fingerprint": "",
        "files": {},
    }
    return EngineConfig(**{**fields, **changes})


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer; `<think>` is an added token that is not declared special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def make_plan(step: StepSpec, config: EngineConfig) -> Plan:
    """A plan that does nothing and has the outputs that it must."""
    shapes = {"tokens": (step.num_rows,), "logits": (step.num_rows, config.model.vocab_size)}
    if step.name == DRAFT_STEP and config.draft is not None and config.draft.has_confidence:
        shapes["confidences"] = (step.num_rows,)
    tensors = tuple(
        TensorSpec(name, "int32" if name == "tokens" else "float32", shape, (1,), "arena", "", 0)
        for name, shape in shapes.items()
    )
    outputs = {name: index for index, name in enumerate(shapes)}
    return Plan(step.name, step.num_tokens, step.num_rows, tensors, (), 0, {}, outputs)


def write_engine(
    folder: Path,
    *,
    tokenizer: bool = True,
    template: str | None = TEMPLATE,
    generation_config: dict[str, Any] | None = None,
    **changes: Any,
) -> EngineConfig:
    """Write a minimal sound engine folder; `changes` replace fields of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(**changes)
    plans = {step.name: make_plan(step, config) for step in config.all_steps}
    for rank in range(config.tp_size):
        (folder / plan_file(rank)).write_bytes(encode_code(EngineCode(plans)))
    if tokenizer:
        make_tokenizer().save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    files = {
        path.name: FileEntry(path.stat().st_size, sha256_of(path))
        for path in folder.iterdir()
        if path.name != CONFIG_NAME
    }
    config = make_config(**{**changes, "files": files})
    (folder / CONFIG_NAME).write_bytes(encode_config(config))
    return config


def expected_logits(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits [vocabulary] after a token list."""
    return _hash_logits(len(tokens), tokens[-WINDOW:], tokens[-PAGED_WINDOW:])


def expected_token(tokens: Sequence[int], sampling: Sampling) -> int:
    """The token drawn after a token list; noise is keyed by seed and position."""
    return _draw(expected_logits(tokens), sampling, len(tokens))


def generate_plainly(prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """The first `count` tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_token(tokens, sampling))
    return tokens[len(prompt) :]


class FakeExecutor:
    """See the module. After `fail_after` more rows it raises OSError, once.

    Attributes:
        calls: step and number of tokens of all that ran, ahead or not.
        num_begun: times that decoding began with inputs of the host.
        num_taken: tokens that decode calls have given.
    """

    rounds: RoundQueue | None = None
    can_refit = False

    def __init__(self, config: EngineConfig) -> None:
        self.config, layout = config, config.state
        self.page_tokens = layout.page_tokens
        self.steps = {step.name: step for step in config.steps}
        self.max_pages = -(-config.max_seq_len // layout.page_tokens)
        # [..., 0] is the position, [..., 1] the token.
        self.pages = np.full((layout.num_pages, layout.page_tokens, 2), -1)
        self.rings = np.full((layout.num_slots, RING, 2), -1)
        self.calls: list[tuple[str, int]] = []
        self.num_begun = self.num_taken = 0
        self.fail_after: int | None = None
        self.is_closed = False
        self.queue = DecodeQueue(self)
        # What is on the device of a decode step: its inputs, and tokens by position.
        self.device_input = StepInput([], 0, 0, [], Sampling())
        self.device_ring: dict[int, int | OSError] = {}

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        self.forget_queued()
        output = self._run(step, step_input)
        return output if wants_logits else StepOutput(output.tokens, output.logits[:0])

    def decode(self, step_input: StepInput, num_ahead: int) -> int:
        assert len(step_input.pages) * self.page_tokens > step_input.position + num_ahead
        token = self.queue.decode(step_input, num_ahead)
        self.num_taken += 1
        return token

    def forget_queued(self) -> None:
        self.queue.clear()
        if self.rounds is not None:
            self.rounds.clear()

    def begin(self, step_input: StepInput) -> None:
        self.forget_queued()
        self.num_begun += 1
        self.device_input = replace(step_input, pages=list(step_input.pages))
        self.device_ring.clear()

    def extend_pages(self, first: int, pages: Sequence[int]) -> None:
        known = self.device_input.pages
        assert len(known) == first
        self.device_input = replace(self.device_input, pages=[*known, *pages])

    def queue_step(self) -> None:
        place = self.device_input.position + 1
        word = self.device_ring.get(place - 1)
        if not isinstance(word, OSError):  # nothing useful runs behind a failed step
            try:
                word = int(self._run("decode", self.device_input).tokens[0])
            except OSError as error:
                word = error
        self.device_ring[place] = word
        token = -1 if isinstance(word, OSError) else word
        self.device_input = replace(self.device_input, tokens=[token], position=place)

    def await_token(self, position: int) -> int:
        word = self.device_ring[position]
        if isinstance(word, OSError):
            raise word
        return word

    def _run(self, step: str, step_input: StepInput) -> StepOutput:
        assert not self.is_closed
        spec, tokens = self.steps[step], step_input.tokens
        assert 1 <= len(tokens) <= spec.num_tokens
        assert len(step_input.pages) <= self.max_pages
        self.calls.append((step, len(tokens)))
        rows = []
        for i, token in enumerate(tokens):
            if self.fail_after is not None:
                if self.fail_after == 0:
                    self.fail_after = None
                    raise OSError("the device failed")
                self.fail_after -= 1
            position = step_input.position + i
            page = step_input.pages[position // self.page_tokens]
            self.pages[page, position % self.page_tokens] = position, token
            self.rings[step_input.slot, position % RING] = position, token
            rows.append(self._read(step_input, position))
        if spec.num_rows != spec.num_tokens:
            rows = rows[-1:]
        end = step_input.position + len(tokens)
        drawn = [
            self.draw(row, step_input.sampling, end - len(rows) + 1 + i)
            for i, row in enumerate(rows)
        ]
        return StepOutput(np.array(drawn, np.int32), np.stack(rows))

    def draw(self, logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
        return _draw(logits, sampling, position)

    def copy_slot(self, source: int, target: int) -> None:
        self.forget_queued()
        self.rings[target] = self.rings[source]

    def copy_page(self, source: int, target: int) -> None:
        self.forget_queued()
        self.pages[target] = self.pages[source]

    def refit(self, folder: Path, config: EngineConfig) -> None:
        raise NotImplementedError

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def _read(self, step_input: StepInput, position: int) -> NDArray[np.float32]:
        near = np.arange(max(position - WINDOW + 1, 0), position + 1)
        far = np.arange(max(position - PAGED_WINDOW + 1, 0), position + 1)
        ring = self.rings[step_input.slot, near % RING]
        table = np.array(step_input.pages)
        paged = self.pages[table[far // self.page_tokens], far % self.page_tokens]
        assert (ring[:, 0] == near).all(), f"ring of position {position} lacks {near}: {ring[:, 0]}"
        assert (paged[:, 0] == far).all(), f"pages of position {position} lack {far}: {paged[:, 0]}"
        return _hash_logits(position + 1, ring[:, 1].tolist(), paged[:, 1].tolist())


class CertainDrafter:
    """A drafter that goes by the timeline alone: `propose` gives the tokens."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        raise NotImplementedError

    def draft(
        self,
        session: Session,  # noqa: ARG002
        tokens: Sequence[int],
        sampling: Sampling,  # noqa: ARG002
        most: int,
        *,
        coupled: bool,  # noqa: ARG002
    ) -> Proposal:
        return Proposal(self.propose(tokens, most))


def _hash_logits(length: int, near: Sequence[int], far: Sequence[int]) -> NDArray[np.float32]:
    digest = hashlib.sha256(f"{length} {list(near)} {list(far)}".encode()).digest()
    key = np.frombuffer(digest[:16], np.uint64)
    mixed = (np.arange(1, VOCAB + 1, dtype=np.uint64) * (key[0] | np.uint64(1))) ^ key[1]
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(40)).astype(np.float32) / 2**24 - 0.5) * 8


def _draw(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    noise = np.random.default_rng((sampling.seed, position)).gumbel(size=VOCAB)
    return int((logits / sampling.temperature + noise).argmax())
