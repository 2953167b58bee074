"""perf/speculation_equality.py without a model: what it counts of all rounds, and what it finds."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake import EOS, VOCAB, generate_plainly
from fake_rounds import Bench

from inkrt.runtime.engine_file import StateLayout
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.round_queue import RoundRecord
from inkrt.runtime.executor.round_state import RoundStatus
from inkrt.runtime.spec.stats import SpeculationStats

sys.path.insert(0, str(Path(__file__).parents[2] / "perf"))

from speculation_answers import CHAT_TOKENS, TEXT_TOKENS, Prompt, Row, compare

DRAFTED = (0, 1, 3, 4, 6, 7, 9, 10)  # numbers of prompts for which the drafter drafts
Lie = Callable[[RoundRecord], RoundRecord]


def make_bench(*, on_device: bool, lie: Lie | None = None) -> Bench:
    """Three slots and a long context; `lie` changes the records of rounds that ran."""
    bench = Bench(on_device=on_device, max_seq_len=1024, state=StateLayout(3, 4, 768, 9, ()))
    if lie is not None:
        own = bench.device._run

        def run() -> RoundRecord:
            record = own()
            return lie(record) if record.status is RoundStatus.OK else record

        bench.device._run = run  # type: ignore[method-assign]
    return bench


def tokens_of(number: int) -> list[int]:
    return [(number * i * i + 3 * i + 5) % VOCAB for i in range(20 + number)]


def rows_of(bench: Bench, numbers: Iterable[int], kind: str = "chat") -> list[Row]:
    """Of prompts whose beginning a session holds, at both temperatures."""
    engine: Any = SimpleNamespace(folder=Path("none"), config=bench.config)
    found = []
    for number in numbers:
        tokens = tokens_of(number)
        with bench.session(tokens[:-3]) as base:
            for temperature in (0.0, 1.0):
                found.append(compare(engine, base, Prompt(number, kind, tokens), temperature))
        assert bench.states.num_free_slots == 3, "a way has left its session open"
    return found


def differences(bench: Bench, numbers: Iterable[int]) -> list[str]:
    return [row.difference for row in rows_of(bench, numbers)]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_all_ways_are_equal(kind: str) -> None:
    """Rows are the same whether a device ran the rounds, and they are what plain decoding says."""
    host = rows_of(make_bench(on_device=False), range(12), kind)
    bench = make_bench(on_device=True)
    device = rows_of(bench, range(12), kind)
    assert [replace(row, on_device=0) for row in device] == host
    for row in device:
        assert row.difference == ""
        sampling = Sampling(temperature=row.temperature, seed=row.number)
        most = TEXT_TOKENS if kind == "text" else CHAT_TOKENS
        plain = generate_plainly(tokens_of(row.number), sampling, most)
        ends = kind == "chat" and EOS in plain
        assert row.tokens == (plain.index(EOS) if ends else most - 1)
        assert row.on_device == (0 if row.way == "ngram" else row.rounds + row.plain_steps)
        if row.rounds:
            length = (row.tokens - row.plain_steps) / row.rounds
            assert row.acceptance_length == pytest.approx(length, rel=1e-15)
    for way in ("fixed", "confidence"):
        rounds = sum(row.rounds for row in device if row.way == way)
        assert sum(row.accepted for row in device if row.way == way) > rounds
    # Of all steps, as many were the device's as are reported; it ran nothing in vain.
    assert bench.device.num_run == sum(row.on_device for row in device)


def more_drafts(record: RoundRecord) -> RoundRecord:
    return replace(record, drafted=record.drafted + 1, proposed=record.proposed + 1)


def no_plain_steps(record: RoundRecord) -> RoundRecord:
    return replace(record, drafted=max(record.drafted, 1), proposed=max(record.proposed, 1))


def fewer_proposals(record: RoundRecord) -> RoundRecord:
    return replace(record, proposed=record.drafted)


@pytest.mark.parametrize("lie", [more_drafts, no_plain_steps, fewer_proposals])
def test_records_of_other_rounds_are_found_out(lie: Lie) -> None:
    """Tokens are right, and reports are what the records say: only the host's rounds tell."""
    honest = rows_of(make_bench(on_device=True), DRAFTED)
    found = rows_of(make_bench(on_device=True, lie=lie), DRAFTED)
    texts = [row.difference for row in found if row.difference]
    assert texts
    assert all("): rounds of the device are SpeculationStats(" in text for text in texts)
    if lie is more_drafts:
        assert len(texts) == sum(row.on_device > 0 for row in honest)
    if lie is no_plain_steps:
        assert len(texts) == sum(row.plain_steps > 0 for row in honest)


def test_a_device_that_gives_up_right_drafts_is_found_out() -> None:
    """It changes no token, but how many come of a round."""
    bench = make_bench(on_device=True)
    verify = bench.executor.verify

    def verify_half(step_input: Any, drafts: list[int]) -> Any:
        del drafts[len(drafts) // 2 :]
        return verify(step_input, drafts)

    bench.executor.verify = verify_half  # type: ignore[method-assign]
    for text in differences(bench, [0, 3]):
        assert "fixed" in text
        assert "): rounds of the device are SpeculationStats(" in text


def test_wrong_tokens_of_the_device_are_told() -> None:
    def lie(record: RoundRecord) -> RoundRecord:
        return replace(record, tokens=[*record.tokens[:-1], record.tokens[-1] ^ 1])

    for temperature, text in enumerate(differences(make_bench(on_device=True, lie=lie), [0])):
        name = f"prompt 0 (chat, fixed, T={temperature}, rounds of the device)"
        assert text.startswith(f"{name}: position ")
        assert "steps of 1 and of 8 draw" in text


@pytest.mark.parametrize("on_device", [False, True])
def test_a_wrong_report_is_found_out(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either way, where rounds of which nothing was accepted pass for plain steps."""
    count = SpeculationStats.count

    def flattering(
        stats: SpeculationStats, drafted: int, accepted: int, *rest: Any, **options: Any
    ) -> None:
        count(stats, drafted if accepted else 0, accepted, *rest, **options)

    who = "device" if on_device else "host"
    expected = rows_of(make_bench(on_device=on_device), DRAFTED)
    monkeypatch.setattr(SpeculationStats, "count", flattering)
    found = rows_of(make_bench(on_device=on_device), DRAFTED)
    num_found = 0
    for right, row in zip(expected, found, strict=True):
        length, rounds = right.acceptance_length, right.rounds
        assert row.acceptance_length == length
        assert (row.difference == "") == (row.rounds == rounds)
        if row.difference:
            num_found += 1
            assert f"rounds of the {who}): acceptance_length {length} is counted" in row.difference
            assert f"rounds {rounds} is counted, {row.rounds} reported" in row.difference
    assert num_found
