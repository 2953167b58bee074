"""The kernels of a round on the CPU under the runtime's own queue: whole generations.

What `cuda_rounds` encodes is what the kernels read, and what they leave is what it decodes.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake import VOCAB, generate_plainly
from fake_rounds import BLOCK, PROMPT, Bench, DraftingExecutor, FakeRoundDevice, cost_aware

ROOT = Path(__file__).parents[2]
sys.path += [
    str(ROOT / folder) for folder in ("perf/kernels", "tests/plugins", "tests/plugins/cuda_on_cpu")
]

from emulator import COMPILER, Emulator  # noqa: E402
from round_checks import STEPS  # noqa: E402
from round_device import EmulatedRounds  # noqa: E402

from inkrt.runtime.executor import Sampling  # noqa: E402
from inkrt.runtime.executor.cuda_rounds import decode_record, encode_state  # noqa: E402
from inkrt.runtime.executor.round_queue import RoundInput, RoundRecord  # noqa: E402
from inkrt.runtime.executor.round_state import RING_RECORDS  # noqa: E402
from inkrt.runtime.output import CompletionOutput  # noqa: E402
from inkrt.runtime.spec.width import ConfidenceThreshold, CostAware, FixedWidth  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")


NOISY = Sampling(temperature=0.8, seed=5)


class EmulatedDevice(FakeRoundDevice):
    """Runs a round by its kernels; the steps are those of the fake executor."""

    def __init__(self, executor: DraftingExecutor, rounds: EmulatedRounds) -> None:
        super().__init__(executor)
        self.rounds = rounds

    def begin_rounds(self, given: RoundInput) -> None:
        super().begin_rounds(given)
        policy = given.settings.policy
        self.num_places = len(policy.state.reached) if isinstance(policy, CostAware) else 0
        self.rounds.state[:] = encode_state(given, VOCAB, STEPS)
        self.rounds.ring["sequence"] = 0
        self.rounds.tokens[0], self.rounds.position[0] = given.step.tokens[0], given.step.position

    def extend_rounds(self, first: int, pages: Sequence[int], writable_end: int) -> None:
        super().extend_rounds(first, pages, writable_end)
        self.rounds.state["writable_end"] = writable_end

    def _run(self) -> RoundRecord:
        number = int(self.rounds.state["round"][0])

        def draft() -> Any:
            output = self.executor.draft(self._now())
            confidences = output.confidences
            return output.tokens.tolist(), None if confidences is None else confidences.tolist()

        def step(read: list[int]) -> list[int]:
            self.num_run += 1
            return self.executor.round_of(replace(self._now(), tokens=read[:1]), read[1:])

        self.rounds.round(draft, step)
        place = number % RING_RECORDS
        return decode_record(self.rounds.ring[place : place + 1].copy(), self.num_places)

    def _now(self) -> Any:
        position, token = int(self.rounds.position[0]), int(self.rounds.tokens[0])
        return replace(self.step, position=position, tokens=[token])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> EmulatedRounds:
    return EmulatedRounds(Emulator(tmp_path_factory.mktemp("kernels")))


def generate(bench: Bench, policy: Any, most: int = BLOCK, **params: Any) -> Any:
    generation = bench.generation(policy, most, temperature=0.8, seed=5, **params)
    output = CompletionOutput.join(list(generation))
    assert bench.states.num_free_slots == 3
    return output, generation.stats


@pytest.mark.parametrize("has_confidence", [True, False])
@pytest.mark.parametrize(
    ("name", "most", "params"),
    [
        ("fixed", BLOCK, {"max_tokens": 80, "ignore_eos": True}),
        ("fixed", 3, {"max_tokens": None, "ignore_eos": True}),
        ("threshold", BLOCK, {"max_tokens": 70, "ignore_eos": True}),
        ("cost", BLOCK, {"max_tokens": 86, "ignore_eos": True}),
        ("skips", BLOCK, {"max_tokens": 80, "ignore_eos": True}),
        ("stop", BLOCK, {"max_tokens": 80}),
    ],
)
def test_generations_are_those_of_the_host(
    kernels: EmulatedRounds, name: str, most: int, params: dict[str, Any], has_confidence: bool
) -> None:
    if name == "threshold" and not has_confidence:
        pytest.skip("goes by confidences")
    if name == "stop":
        params = params | {"stop_token_ids": [generate_plainly(PROMPT, NOISY, 40)[37]]}
    policies = [
        {
            "threshold": lambda: ConfidenceThreshold(0.5),
            "cost": lambda: cost_aware(explore_every=7, num_first=2),
            "skips": lambda: cost_aware(plain=0.3, explore_every=6),
        }.get(name, FixedWidth)()
        for _ in range(2)
    ]
    host = generate(
        Bench(on_device=False, has_confidence=has_confidence), policies[0], most, **params
    )
    bench = Bench(on_device=True, has_confidence=has_confidence)
    device = EmulatedDevice(bench.executor, kernels)
    assert bench.executor.rounds is not None
    bench.executor.rounds._device = device
    output, stats = generate(bench, policies[1], most, **params)
    assert output == host[0]
    assert replace(stats, on_device=0) == host[1]
    assert stats.on_device == stats.rounds + stats.plain_steps == device.num_run
    assert policies[0] == policies[1]
    assert device.num_begun == 1
