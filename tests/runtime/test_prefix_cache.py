"""Sessions that are kept for later prompts: the same tokens, fewer of them read.

The executor's logits are a hash of all tokens that it reads back, so a stale page, slot or rollback
gives other tokens than plain decoding.
"""

from pathlib import Path

import pytest
from fake import VOCAB, FakeExecutor, generate_plainly, write_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.errors import CapacityError
from inkrt.runtime.engine_file import StateLayout
from inkrt.runtime.executor import Sampling

PROMPT = list(range(20, 60))


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path, fake_executors: list[FakeExecutor]) -> LLM:
    write_engine(tmp_path)
    return LLM(tmp_path, prefix_cache=True)


def run(llm: LLM, prompt: list[int], max_tokens: int = 6) -> tuple[list[int], int]:
    """The tokens, which are checked, and how many of the prompt were not read."""
    (output,) = llm.generate([prompt], params(max_tokens))
    found = list(output.outputs[0].token_ids)
    assert found == generate_plainly(prompt, Sampling(), max_tokens)
    return found, output.metrics.num_cached_tokens


def num_read(executor: FakeExecutor) -> int:
    return sum(count for _, count in executor.calls)


def test_a_next_turn_reads_what_is_new(llm: LLM, fake_executors: list[FakeExecutor]) -> None:
    answer, num_cached = run(llm, PROMPT)
    assert num_cached == 0
    before = num_read(fake_executors[0])
    more = [*PROMPT, *answer, 7, 8, 9]
    second, num_cached = run(llm, more)
    assert num_cached == len(PROMPT) + len(answer) - 1  # the last token was read by nobody
    assert num_read(fake_executors[0]) - before == 4 + 5
    assert run(llm, [*more, *second, 5])[1] == len(more) + 5


def test_a_turn_without_what_was_thought(llm: LLM) -> None:
    """The answer is longer than a session can go back: the mark at the prompt's end has it."""
    run(llm, PROMPT, 30)
    assert run(llm, [*PROMPT, 300, 301])[1] == len(PROMPT)
    assert run(llm, PROMPT)[1] == len(PROMPT) - 1  # the last token must be read
    assert run(llm, [*PROMPT[:-5], 9, 9])[1] == len(PROMPT) - 5
    assert run(llm, [*PROMPT[:20], 9, 9])[1] == 0  # further than rings reach
    assert run(llm, PROMPT[:10])[1] == 0


def test_kept_sessions_make_room(llm: LLM) -> None:
    for i in range(8):
        run(llm, [i, *PROMPT])
    prompts = [[*PROMPT, i] for i in range(6)]
    outputs = llm.generate(prompts, params(5))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == generate_plainly(prompt, Sampling(), 5)
    sessions = [llm.stream([*PROMPT, i], params(50)) for i in range(4)]
    for stream in sessions[:3]:
        next(stream)
    with pytest.raises(CapacityError, match="all 3 session slots are in use"):
        next(sessions[3])
    for stream in sessions:
        stream.close()
    llm.close()
    states = llm.engine.states
    assert (states.num_free_slots, states.num_free_pages) == (3, 72)


def test_a_cancelled_request_is_kept_a_failed_one_is_not(
    llm: LLM, fake_executors: list[FakeExecutor]
) -> None:
    stream = llm.stream(PROMPT, params(50))
    first = [next(stream).token_ids[0] for _ in range(20)]
    stream.close()
    assert run(llm, [*PROMPT, *first, 9])[1] == len(PROMPT) + 19
    other = [*range(100, 140)]
    fake_executors[0].fail_after = 70
    with pytest.raises(OSError, match="the device failed"):
        llm.generate([other], params(50))
    assert run(llm, [*other, 9])[1] == len(other)  # of the mark


def test_one_slot_is_enough(tmp_path: Path, fake_executors: list[FakeExecutor]) -> None:
    write_engine(tmp_path, state=StateLayout(1, 4, 24, 9, ()))
    with LLM(tmp_path, prefix_cache=True) as llm:
        answer, _ = run(llm, PROMPT)
        assert run(llm, [*PROMPT, *answer, 7])[1] == len(PROMPT) + 5
        assert run(llm, [1, 2, 3])[1] == 0


def test_without_pages_for_all_nothing_is_kept(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    write_engine(tmp_path, state=StateLayout(3, 4, 3 * 24 - 1, 9, ()))
    with LLM(tmp_path, prefix_cache=True) as llm:
        run(llm, PROMPT)
        assert run(llm, PROMPT)[1] == 0
        assert llm.engine.states.num_free_slots == 3


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_requests(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from inkrt.runtime import engine as engine_module

    folder = tmp_path_factory.mktemp("any")
    config = write_engine(folder)
    executor = FakeExecutor(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "open_executor", lambda *_: executor)
        method = data.draw(st.sampled_from(["none", "ngram"]))
        llm = LLM(folder, prefix_cache=True, speculative=SpeculativeConfig(method=method))
    said: list[list[int]] = [[]]
    for _ in range(6):
        base = data.draw(st.sampled_from(said))
        cut = data.draw(st.integers(max(len(base) - 14, 0), len(base)))
        more = data.draw(st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=30))
        prompt = [*base[:cut], *more][:80]
        answer, _ = run(llm, prompt, data.draw(st.integers(1, 96 - len(prompt))))
        said.append([*prompt, *answer])
    llm.close()
    assert (llm.engine.states.num_free_slots, llm.engine.states.num_free_pages) == (3, 72)
