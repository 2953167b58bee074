"""A fake executor with a drafter, whose device runs rounds by itself if it is told to.

The drafter reads the state below its position as the model does, so what it drafts tells whether
that is intact: it knows what the model would say, and is wrong from a place on that a hash of
seed and position gives. A round of the device is written anew here, with the host's policies.
"""

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from fake import (
    PAGED_WINDOW,
    VOCAB,
    WINDOW,
    FakeExecutor,
    _draw,
    _hash_logits,
    make_config,
)

from inkrt.runtime.engine_file import DRAFT_STEP, DraftSpec, EngineConfig
from inkrt.runtime.executor import Sampling, StepInput, StepOutput
from inkrt.runtime.executor.round_queue import (
    DeviceRule,
    RoundInput,
    RoundQueue,
    RoundRecord,
    RoundSettings,
)
from inkrt.runtime.executor.round_state import RoundStatus
from inkrt.runtime.generation import Generation
from inkrt.runtime.noise import Purpose
from inkrt.runtime.sampling import draw
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.accept import accept_probabilistic
from inkrt.runtime.spec.drafter import EngineDrafter
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.width import CostAware, CostsByContext, RoundCosts, WidthPolicy
from inkrt.runtime.state import StateManager

BLOCK = 7
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(10)]


def drafting_config(has_confidence: bool = True, **changes: Any) -> EngineConfig:
    spec = DraftSpec("dspark", BLOCK, "rnn", has_confidence)
    return make_config(draft=spec, **changes)


class DraftingExecutor(FakeExecutor):
    """Has a draft step; `device` runs rounds if `on_device`."""

    def __init__(self, config: EngineConfig, *, on_device: bool = False) -> None:
        super().__init__(config)
        self.device = FakeRoundDevice(self)
        if on_device:
            self.rounds = RoundQueue(self.device, frozenset(get_args(DeviceRule)))

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        if step != DRAFT_STEP:
            return super().run(step, step_input, wants_logits=wants_logits)
        self.forget_queued()
        return self.draft(step_input)

    def draft(self, step_input: StepInput) -> StepOutput:
        position = step_input.position
        far = np.arange(max(position - PAGED_WINDOW, 0), position)
        table = np.array(step_input.pages, int)
        paged = self.pages[table[far // self.page_tokens], far % self.page_tokens]
        assert (paged[:, 0] == far).all(), f"pages below {position} lack {far}: {paged[:, 0]}"
        tokens = [*paged[:, 1].tolist(), step_input.tokens[0]]
        digest = hashlib.sha256(f"{step_input.sampling.seed} {position}".encode()).digest()
        right = digest[0] % (BLOCK + 1)
        drafts, confidences, rows = [], [], []
        for place in range(BLOCK):
            length = position + 1 + place
            logits = _hash_logits(length, tokens[-WINDOW:], tokens[-PAGED_WINDOW:])
            if step_input.is_coupled:
                token = _draw(logits, step_input.sampling, length)
                drafts.append(token if place < right else (token + 1) % VOCAB)
            else:  # from a distribution that is near the target's, or far from it
                rows.append(logits if place < right else np.roll(logits, 1))
                drawn = draw(
                    rows[-1][None], step_input.sampling, np.array([length]),
                    purpose=Purpose.DRAFT, anchors=np.array([position]),
                )  # fmt: skip
                drafts.append(int(drawn[0]))
            tokens.append(drafts[-1])
            base = 0.65 if place < right else 0.15
            confidences.append(base + 0.3 * digest[1 + place] / 255)
        spec = self.config.draft
        assert spec is not None
        return StepOutput(
            np.array(drafts, np.int32),
            np.array(rows, np.float32).reshape(-1, VOCAB),
            np.array(confidences, np.float32) if spec.has_confidence else None,
        )

    def verify(self, step_input: StepInput, drafts: Sequence[int]) -> StepOutput:
        """The rows that follow an anchor and drafts."""
        step = "decode" if not drafts else f"verify{len(drafts) + 1}"
        return self._run(step, replace(step_input, tokens=[*step_input.tokens, *drafts]))

    def round_of(self, step_input: StepInput, drafts: Sequence[int]) -> list[int]:
        """The tokens that follow an anchor and drafts."""
        return [int(token) for token in self.verify(step_input, drafts).tokens]


@dataclass
class FakeRoundDevice:
    """Runs a round as soon as it is queued: what may have run ahead has.

    Attributes:
        num_begun: chains.
        num_run: rounds that ran, asked for or not.
        longest_lead: most rounds that were queued behind the last that was taken.
    """

    executor: DraftingExecutor
    num_begun: int = 0
    num_run: int = 0
    longest_lead: int = 0

    def begin_rounds(self, given: RoundInput) -> None:
        self.num_begun += 1
        self.executor.queue.clear()
        self.step = replace(given.step, pages=list(given.step.pages))
        self.settings = given.settings
        self.policy: WidthPolicy = deepcopy(given.settings.policy)
        if isinstance(self.policy, CostAware):
            assert self.policy.on_device is not None
            self.policy.costs = self.policy.on_device
        self.num_left, self.writable_end = given.num_left, given.writable_end
        self.has_finished = False
        self.records: list[RoundRecord | OSError] = []
        self.num_awaited = 0

    def extend_rounds(self, first: int, pages: Sequence[int], writable_end: int) -> None:
        assert first == len(self.step.pages)
        assert writable_end >= self.writable_end
        self.step = replace(self.step, pages=[*self.step.pages, *pages])
        self.writable_end = writable_end

    def queue_round(self) -> None:
        page_tokens = self.executor.page_tokens
        assert self.writable_end <= len(self.step.pages) * page_tokens
        if self.records and isinstance(self.records[-1], OSError):
            self.records.append(self.records[-1])
            return
        try:
            self.records.append(self._run())
        except OSError as error:
            self.records.append(error)
        self.longest_lead = max(self.longest_lead, len(self.records) - self.num_awaited - 1)

    def await_record(self, number: int) -> RoundRecord:
        assert number == self.num_awaited
        record = self.records[number]
        if isinstance(record, OSError):
            raise record
        self.num_awaited += 1
        return record

    def _run(self) -> RoundRecord:
        position = self.step.position
        if self.has_finished:
            return RoundRecord(RoundStatus.FINISHED, [], 0, 0, position)
        if position >= self.writable_end:
            return RoundRecord(RoundStatus.FULL, [], 0, 0, position)
        self.num_run += 1
        room = min(self.settings.most, self.num_left - 1, self.writable_end - position - 1)
        drafts: list[int] = []
        proposed = 0
        if room > 0 and not self.policy.skip(position):
            output = self.executor.draft(self.step)
            drafts = output.tokens.tolist()[:room]
            proposed = len(drafts)
            confidences = None if output.confidences is None else output.confidences.tolist()
            if self.settings.forced:
                confidences = list(self.settings.forced)
            drafts = drafts[: self.policy.choose(confidences, proposed, position)]
        rows = self.executor.verify(self.step, drafts)
        drawn = [int(token) for token in rows.tokens]
        accepted = 0
        forced = self.settings.forced
        while accepted < len(drafts) and (
            forced[accepted] == 1 if forced else drafts[accepted] == drawn[accepted]
        ):
            accepted += 1
        last = drawn[accepted]
        if drafts and self.settings.rule == "probabilistic":
            verdict = accept_probabilistic(
                drafts, rows.logits, output.logits[: len(drafts)], self.step.sampling, position
            )
            accepted, last = verdict.accepted, verdict.token
        if drafts:
            self.policy.observe(len(drafts), accepted)
        tokens = [*drafts[:accepted], last]
        self.num_left -= len(tokens)
        is_stop = not self.settings.stop_ids.isdisjoint(tokens)
        self.has_finished = is_stop or self.num_left <= 0
        self.step = replace(self.step, tokens=tokens[-1:], position=position + len(tokens))
        learned = self.policy.state if isinstance(self.policy, CostAware) else None
        return RoundRecord(
            RoundStatus.OK, tokens, len(drafts), proposed, self.step.position, learned
        )


def cost_aware(plain: float = 1.0, scale: float = 1.0, **options: Any) -> CostAware:
    """Costs that change with the context, the same for host and device."""
    costs = CostsByContext(
        (16, 40, 100),
        tuple(
            RoundCosts(plain, [scale * (1.1 + slope * width) for width in range(BLOCK + 1)])
            for slope in (0.05, 0.2, 0.4)
        ),
    )
    return CostAware(costs, on_device=costs, **options)


class Bench:
    """A fake engine with sessions and speculators."""

    def __init__(self, *, on_device: bool, **changes: Any) -> None:
        self.config = drafting_config(**changes)
        self.executor = DraftingExecutor(self.config, on_device=on_device)
        config = self.config
        self.states = StateManager(config.state, config.max_seq_len, config.rebuild_command)

    @property
    def device(self) -> FakeRoundDevice:
        return self.executor.device

    def session(self, tokens: Sequence[int] = PROMPT) -> Session:
        session = Session(self.executor, self.states, self.config, self.states.open())
        if tokens:
            session.prefill(tokens, Sampling())
        return session

    def generation(
        self, policy: WidthPolicy, most: int = BLOCK, prompt: Sequence[int] = PROMPT, **params: Any
    ) -> Generation:
        speculator = Speculator(EngineDrafter(), policy, most)
        session = Session(self.executor, self.states, self.config, self.states.open())
        return Generation(session, list(prompt), SamplingParams(**params), None, speculator)


def make_input(policy: WidthPolicy, **changes: Any) -> RoundInput:
    """The first round of a request that has settings of its own."""
    step = StepInput([5], 30, 1, [8, 9], Sampling(temperature=0.5, seed=2**62 + 3), True)
    settings = RoundSettings("coupled", policy, BLOCK, frozenset({9, 2}))
    return RoundInput(step, replace(settings, **changes), 44, 128)
