"""AsyncLLM: the tokens of LLM.generate, taking turns, the queue, cancellation, failures."""

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake import FakeExecutor, generate_plainly, write_engine

from inkrt import AsyncLLM, SamplingParams
from inkrt.errors import (
    CancelledRequestError,
    ClosedError,
    DeviceError,
    QueueFullError,
    RequestError,
)
from inkrt.runtime.executor import Sampling, StepInput, StepOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, ignore_eos=True)
ALL_FREE = (3, 72)


@pytest.fixture
def llm(tmp_path: Path, fake_executors: list[FakeExecutor]) -> AsyncLLM:
    write_engine(tmp_path)
    return AsyncLLM(tmp_path, max_waiting=8)


def free(llm: AsyncLLM) -> tuple[int, int]:
    return llm.llm.engine.states.num_free_slots, llm.llm.engine.states.num_free_pages


def run(llm: AsyncLLM, work: Coroutine[Any, Any, None]) -> None:
    async def all_of_it() -> None:
        async with llm:
            await work
            while llm.stats().num_running or llm.stats().num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert free(llm) == ALL_FREE

    asyncio.run(all_of_it())


def slow_down(executor: FakeExecutor, step_s: float) -> None:
    fast = executor.run, executor.decode

    def slow_run(step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        time.sleep(step_s)
        return fast[0](step, step_input, wants_logits=wants_logits)

    def slow_decode(step_input: StepInput, num_ahead: int) -> int:
        time.sleep(step_s)
        return fast[1](step_input, num_ahead)

    executor.run, executor.decode = slow_run, slow_decode  # type: ignore[method-assign]


def test_more_requests_than_slots_give_the_tokens_of_plain_decoding(llm: AsyncLLM) -> None:
    prompts = [[i + 4, *range(10, 10 + 9 * i)] for i in range(8)]

    async def work() -> None:
        params = [
            SamplingParams(temperature=0.7, seed=i, max_tokens=12, ignore_eos=True)
            for i in range(8)
        ]
        outputs = await asyncio.gather(*map(llm.generate, prompts, params))
        for i, output in enumerate(outputs):
            expected = generate_plainly(prompts[i], Sampling(temperature=0.7, seed=i), 12)
            assert list(output.outputs[0].token_ids) == expected
            times = output.metrics
            assert min(times.queue_s, times.prefill_s, times.decode_s) >= 0

    run(llm, work())


def test_times_add_up(llm: AsyncLLM, fake_executors: list[FakeExecutor]) -> None:
    slow_down(fake_executors[0], 0.005)

    async def work() -> None:
        began = time.perf_counter()
        outputs = await asyncio.gather(*(llm.generate([i], GREEDY) for i in range(4, 9)))
        total = time.perf_counter() - began
        times = [output.metrics for output in outputs]
        sums = [t.queue_s + t.prefill_s + t.decode_s for t in times]
        assert total / 2 < max(sums) < total
        assert min(t.decode_s for t in times) >= 9 * 0.005
        waits = sorted(t.queue_s for t in times)
        assert waits[3] > waits[0] + 9 * 0.005  # three slots

    run(llm, work())


def test_a_short_request_overtakes_a_long_one(
    llm: AsyncLLM, fake_executors: list[FakeExecutor]
) -> None:
    slow_down(fake_executors[0], 0.003)

    async def work() -> None:
        ended = []

        async def one(name: str, params: SamplingParams) -> None:
            await llm.generate([7, 8, 9], params)
            ended.append(name)

        await asyncio.gather(one("long", LONG), one("short", GREEDY))
        assert ended == ["short", "long"]

    run(llm, work())


def test_a_stream_gives_deltas_and_closing_it_cancels(
    llm: AsyncLLM, fake_executors: list[FakeExecutor]
) -> None:
    slow_down(fake_executors[0], 0.002)

    async def work() -> None:
        output = await llm.generate("hello", GREEDY)
        deltas = [delta async for delta in llm.stream("hello", GREEDY)]
        assert "".join(delta.text for delta in deltas) == output.outputs[0].text
        assert sum((delta.token_ids for delta in deltas), ()) == output.outputs[0].token_ids
        stream = llm.stream("hello", LONG)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(llm.generate("hello", LONG))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(2):  # after the running step
            await asyncio.sleep(0.02)
        assert free(llm) == ALL_FREE
        num_calls = len(fake_executors[0].calls)
        await asyncio.sleep(0.02)
        assert len(fake_executors[0].calls) == num_calls

    run(llm, work())


def test_cancel_by_name(llm: AsyncLLM, fake_executors: list[FakeExecutor]) -> None:
    slow_down(fake_executors[0], 0.002)

    async def work() -> None:
        assert not await llm.cancel("a")
        task = asyncio.create_task(llm.generate("hello", LONG, request_id="a"))
        await asyncio.sleep(0.02)
        with pytest.raises(RequestError, match="request_id 'a' is in use"):
            await llm.generate("hello", GREEDY, request_id="a")
        assert await llm.cancel("a")
        with pytest.raises(CancelledRequestError):
            await task
        await llm.generate("hello", GREEDY, request_id="a")

    run(llm, work())


def test_the_queue_is_bounded(llm: AsyncLLM, fake_executors: list[FakeExecutor]) -> None:
    slow_down(fake_executors[0], 0.01)

    async def work() -> None:
        tasks = [asyncio.create_task(llm.generate([5], GREEDY)) for _ in range(3)]
        while llm.stats().num_running < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(llm.generate([5], GREEDY)) for _ in range(9)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        full = [item for item in outcomes if isinstance(item, BaseException)]
        assert [type(item) for item in full] == [QueueFullError]
        assert "would exceed the 8 that may" in str(full[0])

    run(llm, work())


def test_invalid_requests_raise_where_they_are_made(llm: AsyncLLM) -> None:
    async def work() -> None:
        with pytest.raises(RequestError) as caught:
            await llm.generate([999], GREEDY)
        assert caught.value.param == "prompt"
        with pytest.raises(RequestError):
            await anext(llm.stream([], GREEDY))

    run(llm, work())


def test_a_failed_step_ends_one_request(llm: AsyncLLM, fake_executors: list[FakeExecutor]) -> None:
    async def work() -> None:
        fake_executors[0].fail_after = 4
        outcomes = await asyncio.gather(
            llm.generate([5], GREEDY), llm.generate([6], GREEDY), return_exceptions=True
        )
        failed = [isinstance(item, OSError) for item in outcomes]
        assert sorted(failed) == [False, True]
        await llm.generate([7], GREEDY)

    run(llm, work())


def test_a_failed_device_ends_all(llm: AsyncLLM, fake_executors: list[FakeExecutor]) -> None:
    slow_down(fake_executors[0], 0.002)

    async def work() -> None:
        tasks = [asyncio.create_task(llm.generate([i], LONG)) for i in range(4, 9)]
        await asyncio.sleep(0.02)

        def fail(*_: object, **__: object) -> int:
            raise DeviceError("the device is gone")

        fake_executors[0].decode = fake_executors[0].run = fail  # type: ignore[assignment, method-assign]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {str(item) for item in outcomes} == {"the device is gone"}
        assert not llm.is_alive
        with pytest.raises(ClosedError, match="has failed"):
            await llm.generate([5], GREEDY)

    run(llm, work())


def test_closing_ends_what_runs(llm: AsyncLLM, fake_executors: list[FakeExecutor]) -> None:
    slow_down(fake_executors[0], 0.002)

    async def work() -> None:
        tasks = [asyncio.create_task(llm.generate([i], LONG)) for i in range(4, 9)]
        await asyncio.sleep(0.005)
        await llm.close()
        await llm.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(item, ClosedError) for item in outcomes)
        with pytest.raises(ClosedError):
            await llm.generate([5], GREEDY)

    asyncio.run(work())
    assert free(llm) == ALL_FREE


def test_loops_in_several_threads_share_an_engine(llm: AsyncLLM) -> None:
    found: dict[int, tuple[int, ...]] = {}

    def client(number: int) -> None:
        async def work() -> None:
            for _ in range(3):
                output = await llm.generate([number], GREEDY)
            found[number] = output.outputs[0].token_ids

        asyncio.run(work())

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm.close_now()
    assert {n: list(ids) for n, ids in found.items()} == {
        n: generate_plainly([n], Sampling(), 10) for n in range(4, 8)
    }


def test_a_fork_is_refused(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(DeviceError, match="forked"):
            await llm.generate([5], GREEDY)

    run(llm, work())


def test_an_event_loop_is_not_blocked(llm: AsyncLLM, fake_executors: list[FakeExecutor]) -> None:
    slow_down(fake_executors[0], 0.05)

    async def work() -> None:
        task = asyncio.create_task(llm.generate([5], SamplingParams(max_tokens=4)))
        gaps = []
        while not task.done():
            began = time.perf_counter()
            await asyncio.sleep(0)
            gaps.append(time.perf_counter() - began)
        assert sorted(gaps)[len(gaps) * 9 // 10] < 0.02

    run(llm, work())
