"""What rounds cost: measured where a device runs them, kept, and given to the policy."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from fake_rounds import BLOCK, DraftingExecutor, drafting_config

from inkrt.commands.bench_speculation import measure_costs, steady_width
from inkrt.errors import ConfigError, EngineFormatError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import EngineConfig, FileEntry, StateLayout
from inkrt.runtime.executor.round_queue import RoundInput
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.costs import COSTS_NAME, CostTable, most_drafted
from inkrt.runtime.spec.width import CostAware, CostsByContext, RoundCosts

LONG = {
    "max_seq_len": 1024,
    "state": StateLayout(3, 4, 768, 13, ()),
    "files": {"rank0.engine": FileEntry(1, "abc")},
}


@pytest.fixture
def config() -> EngineConfig:
    return drafting_config(**LONG)


def fake_engine(config: EngineConfig, *, on_device: bool) -> Engine:
    return Engine(Path("engine"), config, DraftingExecutor(config, on_device=on_device))


@pytest.mark.parametrize("has_confidence", [True, False])
def test_rounds_of_every_width_are_timed_where_the_device_runs_them(has_confidence: bool) -> None:
    config = drafting_config(has_confidence, **LONG)
    engine = fake_engine(config, on_device=True)
    executor = engine.executor
    assert isinstance(executor, DraftingExecutor)
    begun: list[tuple[RoundInput, int]] = []
    begin = executor.device.begin_rounds

    def note(given: RoundInput) -> None:
        begun.append((given, executor.device.num_run))
        begin(given)

    executor.device.begin_rounds = note  # type: ignore[method-assign]
    table = measure_costs(engine, [64, 500], 4)
    assert table.contexts == (64, 500)
    assert table.round_s is not None
    assert [len(row) for row in table.round_s] == [BLOCK + 2] * 2
    # 7 rounds of each kind, one of which may have run behind the last.
    counts = [after - before for (_, before), (_, after) in pairwise(begun)]
    assert set(counts) <= {7, 8}
    assert len(begun) == 2 * (BLOCK + 2)
    assert {given.settings.rule for given, _ in begun} == {"forced"}
    # One position a round: the context hardly grows.
    assert max(given.step.position for given, _ in begun[: BLOCK + 2]) < 64 + 7 * (BLOCK + 3) + 1
    assert engine.states.num_free_slots == 3


def test_the_host_alone_has_no_rounds_to_time(config: EngineConfig) -> None:
    assert measure_costs(fake_engine(config, on_device=False), [64], 2).round_s is None


def test_a_context_leaves_room_for_what_is_measured(config: EngineConfig) -> None:
    """23 plain steps, of which 5 more may be ahead, and 9 kinds of rounds with two at the end."""
    needed = 23 + 5 + 9 * 23 + 2 * 8
    assert measure_costs(fake_engine(config, on_device=True), [1024 - needed], 20).contexts
    with pytest.raises(ConfigError, match=f"{needed} positions behind it are measured in"):
        measure_costs(fake_engine(config, on_device=True), [1025 - needed], 20)


@pytest.mark.parametrize("width", [None, *range(BLOCK + 1)])
@pytest.mark.parametrize("confidences", [None, [0.0] * BLOCK, [1.0] * BLOCK])
def test_a_steady_width(width: int | None, confidences: list[float] | None) -> None:
    policy = steady_width(width, BLOCK)
    for _ in range(60):
        is_plain = policy.skip(5) > 0
        assert is_plain == (width is None)
        if not is_plain:
            assert policy.choose(confidences, BLOCK, 5) == width
            policy.observe(width or 0, 0)


def make_table(config: EngineConfig, **changes: object) -> CostTable:
    fields = {
        "engine": "abc", "device": "x", "contexts": (10, 100), "decode_s": (1.0, 2.0),
        "verify_s": tuple(tuple(base + n for n in range(8)) for base in (1.0, 2.0)),
        "draft_s": (0.25, 0.5),
        "round_s": tuple(tuple(base + n for n in range(9)) for base in (9.0, 19.0)),
    }  # fmt: skip
    return CostTable(**{**fields, **changes})  # type: ignore[arg-type]


def test_costs_by_context(config: EngineConfig) -> None:
    table = make_table(config)
    host, device = table.costs(3, with_draft_step=True), table.device_costs(3)
    assert device is not None
    assert host == CostsByContext(
        (10, 100),
        (
            RoundCosts(1.0, [1.25, 2.25, 3.25, 4.25]),
            RoundCosts(2.0, [2.5, 3.5, 4.5, 5.5]),
        ),
    )
    assert device(9) == device(10) == RoundCosts(9.0, (10.0, 11.0, 12.0, 13.0))
    assert device(11) == device(100) == device(5000) == RoundCosts(19.0, (20.0, 21.0, 22.0, 23.0))
    assert make_table(config, round_s=None).device_costs(3) is None


def test_the_policy_gets_both(config: EngineConfig, tmp_path: Path) -> None:
    def policy(table: CostTable, method: str = "dspark") -> CostAware:
        table.write(tmp_path)
        chosen = SpeculativeConfig(method, width="cost", num_draft_tokens=3)  # type: ignore[arg-type]
        speculation = chosen.resolve(tmp_path, config)
        assert speculation is not None
        made = speculation.make_policy()
        assert isinstance(made, CostAware)
        return made

    table = make_table(config)
    assert policy(table).on_device == table.device_costs(3)
    assert policy(table).costs == table.costs(3, with_draft_step=True)
    # Before rounds were measured, the steps have to do; n-grams are for the host.
    old = make_table(config, round_s=None)
    assert policy(old).on_device == policy(old).costs
    assert policy(table, "ngram").on_device is None


def test_a_table_of_an_older_version_is_read(config: EngineConfig, tmp_path: Path) -> None:
    content = msgspec.json.decode(make_table(config).encode())
    del content["round_s"]
    (tmp_path / COSTS_NAME).write_bytes(msgspec.json.encode(content))
    assert CostTable.read(tmp_path, config) == make_table(config, round_s=None)


@pytest.mark.parametrize(
    ("round_s", "words"),
    [
        (((1.0,) * 8, (1.0,) * 8), "rounds of 7 widths, not of 8"),
        (((1.0,) * 9, (1.0,) * 8), "rows of different lengths"),
        (((1.0,) * 9,), "rows of different lengths"),
        (((0.0,) * 9,) * 2, "times that are not above 0"),
    ],
)
def test_damaged_rounds(config: EngineConfig, tmp_path: Path, round_s: object, words: str) -> None:
    path = tmp_path / COSTS_NAME
    path.write_bytes(make_table(config, round_s=round_s).encode())
    with pytest.raises(EngineFormatError, match=words):
        CostTable.read(tmp_path, config)


def test_rounds_are_as_wide_as_drafts_and_steps(config: EngineConfig) -> None:
    assert most_drafted(config) == 7
    assert most_drafted(msgspec.structs.replace(config, draft=None)) == 0
    assert most_drafted(msgspec.structs.replace(config, steps=config.steps[:4])) == 3
