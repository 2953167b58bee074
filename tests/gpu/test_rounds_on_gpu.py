"""Rounds that the GPU runs by itself, on the trained nano: those of the host, token for token."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from nano_engines import CHECKPOINT, nano_prompts
from typer.testing import CliRunner

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands import bench
from inkrt.commands.bench_speculation import measure_costs, steady_width
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_config
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.executor.cuda_timing import Timer
from inkrt.runtime.executor.round_queue import RoundInput, RoundSettings
from inkrt.runtime.output import RequestOutput
from inkrt.runtime.spec.costs import CostTable, engine_hash, most_drafted
from inkrt.runtime.spec.stats import SpeculationStats

pytestmark = pytest.mark.gpu

WIDTHS = ["fixed", "confidence", "cost"]


def write_costs(folder: Path) -> None:
    """Costs that make widths differ, the same for rounds of the host and of the device."""
    config = read_config(folder)
    verify = tuple(1.0 + 0.06 * width for width in range(config.widest_verify))
    rows = [(scale * 1.0, [scale * one for one in verify], scale * 0.1) for scale in (1.0, 1.5)]
    CostTable(
        engine_hash(config),
        "made up",
        (150, 700),
        tuple(plain for plain, _, _ in rows),
        tuple(tuple(row) for _, row, _ in rows),
        tuple(draft for _, _, draft in rows),
        tuple((plain, *[draft + one for one in row]) for plain, row, draft in rows),
    ).write(folder)


@pytest.fixture(scope="module")
def folder(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rounds") / "engine"
    options = BuildOptions(target="sm_90a", prefill_chunk=64, max_seq_len=1024, max_batch_size=3)
    build_engine(CHECKPOINT, made, options)
    write_costs(made)
    return made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return nano_prompts(300)


@pytest.fixture(scope="module", params=WIDTHS)
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, speculative=SpeculativeConfig("dspark", width=request.param)) as opened:
        yield opened


def answers(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], *, on_device: bool
) -> list[RequestOutput]:
    """All prompts at once, in turns."""
    executor = llm.engine.executor
    assert isinstance(executor, CudaExecutor)
    rounds = executor.rounds
    assert rounds is not None, "the engine has no rounds"
    if not on_device:
        executor.rounds = None
    try:
        return llm.generate(prompts, params)
    finally:
        executor.rounds = rounds


def require_equal(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    """Rounds of the device give what those of the host give, and count the same."""
    host = answers(llm, prompts, params, on_device=False)
    device = answers(llm, prompts, params, on_device=True)
    assert [one.outputs for one in device] == [one.outputs for one in host]
    for ours, theirs in zip(device, host, strict=True):
        assert theirs.speculation.on_device == 0
        stats = ours.speculation
        assert stats.on_device == stats.rounds + stats.plain_steps
        assert replace(stats, on_device=0) == theirs.speculation


def test_one_request_at_a_time(llm: LLM, prompts: list[list[int]]) -> None:
    """Long enough for all rings to wrap; greedy, sampled, and with all filters."""
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2**62 + 5, max_tokens=400, ignore_eos=True),
        SamplingParams(
            temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, seed=4, max_tokens=250,
            ignore_eos=True,
        ),
    ]  # fmt: skip
    for prompt, params in zip(prompts[::7], kinds, strict=True):
        require_equal(llm, [prompt], [params])


def test_requests_in_turns(llm: LLM, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(temperature=float(number % 2), seed=number, max_tokens=50, ignore_eos=True)
        for number in range(5)
    ]
    require_equal(llm, prompts[:5], params)


def test_every_cut(llm: LLM, prompts: list[list[int]]) -> None:
    for count in range(1, 20):
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=count, ignore_eos=True)
        require_equal(llm, [prompts[0]], [params])


def test_stop_ids_at_every_place(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    tokens = answers(llm, [prompts[0]], [params], on_device=False)[0].outputs[0].token_ids
    for place in range(1, 20):
        stopping = replace(params, stop_token_ids=[tokens[place]])
        require_equal(llm, [prompts[0]], [stopping])


def test_to_the_end_of_the_context(llm: LLM, prompts: list[list[int]]) -> None:
    text = (max(prompts, key=len) * 8)[:1000]
    for length in (1000, 990, 983):
        params = SamplingParams(temperature=1.0, seed=8, max_tokens=None, ignore_eos=True)
        require_equal(llm, [text[:length]], [params])


def test_forks_and_going_back(folder: Path, prompts: list[list[int]]) -> None:
    """Sessions that go apart while a round runs ahead."""
    with Engine.open(folder) as engine, engine.session() as session:
        sampling = Sampling(temperature=1.0, seed=11)
        settings = RoundSettings("coupled", steady_width(4, 7), 7)
        tokens = [int(session.prefill(prompts[1], sampling).tokens[-1])]

        def go_on(one: Any, tokens: list[int], count: int) -> None:
            while len(tokens) < count:
                tokens += one.round(tokens[-1], sampling, settings, 500 - len(tokens)).tokens

        go_on(session, tokens, 40)
        twin, theirs = session.fork(), list(tokens)
        go_on(session, tokens, 80)
        go_on(twin, theirs, 80)
        twin.close()
        common = min(len(tokens), len(theirs))
        assert tokens[:common] == theirs[:common]
        back = session.length - 3
        session.rollback(back)
        kept = tokens[: back - len(prompts[1]) + 1]
        again = list(kept)
        go_on(session, again, 120)
        session.rollback(0)
        session.prefill(prompts[1], sampling, wants_logits=False)
        plain = tokens[:1]
        while len(plain) < 120:
            plain.append(session.decode(plain[-1], sampling, num_more=120 - len(plain)))
        assert again[:120] == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_ratio_test(folder: Path, prompts: list[list[int]], temperature: float) -> None:
    """Most verdicts are the host's; all of them are as good. Greedy is coupled."""
    chosen = SpeculativeConfig("dspark", accept="probabilistic", width="fixed")
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=120, ignore_eos=True)
        for seed in range(6)
    ]
    with LLM(folder, speculative=chosen) as llm:
        host, device = (
            [
                answers(llm, [prompt], [own], on_device=on)[0]
                for prompt, own in zip(prompts, params, strict=False)
            ]
            for on in (False, True)
        )
    same = sum(ours.outputs == theirs.outputs for ours, theirs in zip(device, host, strict=True))
    assert same >= (4 if temperature else 6), same
    rates = []
    for outputs in (host, device):
        stats = SpeculationStats()
        for output in outputs:
            stats.add(output.speculation)
        rates.append(stats.acceptance_length)
        assert stats.on_device == (0 if outputs is host else stats.rounds + stats.plain_steps)
    assert abs(rates[0] - rates[1]) < 0.15 * rates[0], rates


def test_requests_that_the_host_runs(folder: Path, prompts: list[list[int]]) -> None:
    with LLM(folder, speculative=SpeculativeConfig("dspark", width="fixed")) as llm:
        penalized = SamplingParams(frequency_penalty=0.3, seed=1, max_tokens=20, ignore_eos=True)
        output = llm.generate([prompts[0]], penalized)[0]
        assert output.speculation.on_device == 0
        assert output.speculation.rounds > 0


def test_rounds_are_cheaper_than_their_steps(folder: Path) -> None:
    """Whole, as the host sees them one behind the other; and no host time shows between them."""
    with Engine.open(folder) as engine:
        table = measure_costs(engine, [300], 40)
        assert table.round_s is not None
        assert table.draft_s is not None
        (waited,), (verify,), (whole,) = table.draft_s, table.verify_s, table.round_s
        assert all(
            of_round < waited + of_step for of_round, of_step in zip(whole[1:], verify, strict=True)
        ), table
        executor = engine.executor
        assert isinstance(executor, CudaExecutor)
        pages = list(range(1024 // engine.config.state.page_tokens))
        most = most_drafted(engine.config)
        for width in (None, 0, most):
            settings = RoundSettings(
                "forced", steady_width(width, most), most, forced=(0.0,) * most
            )
            step = StepInput([5], 300, 0, pages, Sampling(temperature=1.0), True)
            given = RoundInput(step, settings, 10**6, 1024)
            times, records = Timer(executor).rounds(given, 100)
            assert {record.drafted for record in records} == {width or 0}
            on_gpu = median(times) / 1e6
            seen = whole[0 if width is None else 1 + width]
            assert seen < 1.2 * on_gpu + 30e-6, (width, seen, on_gpu)


def test_a_benchmark_of_rounds(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["engine", str(folder), "--rounds", "--contexts", "300", "--runs", "64"]
    arguments += ["--accept-profile", "0.9,0.8,0.7", "--width", "fixed", "--json", str(out)]
    result = CliRunner().invoke(bench.make_app(), arguments)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    # Of drafts accepted with 0.9, 0.8, 0.7, 0.7, ...: 1 + 0.9 + 0.72 + ... of a standard error 0.3.
    share, expected = 1.0, 1.0
    for chance in (0.9, 0.8, *[0.7] * 5):
        share *= chance
        expected += share
    assert abs(row["tokens_per_round"] - expected) < 1.2, (row, expected)
    assert row["widths"][0]["outside_us"] > 0
