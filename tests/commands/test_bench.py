"""What ink-bench makes of times: prices that add up, kinds of launches, rows, the timing cache.

A plan of four layers by hand; a timer that answers what a GPU would.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace

from inkrt.builder.timing_cache import read_timing_cache
from inkrt.builder.tune import Candidate
from inkrt.commands import bench_ops
from inkrt.commands.bench_ops import Bench, CacheWriter, chain_of, engine_folder, kinds_of
from inkrt.commands.bench_step import (
    LaunchPrice,
    launch_bytes,
    price_launches,
    price_rows,
    step_input_of,
)
from inkrt.errors import ConfigError, InkError
from inkrt.runtime.engine_file import (
    EngineConfig,
    MemoryTable,
    ModelInfo,
    StateLayout,
    StateSpec,
    StepSpec,
)
from inkrt.runtime.executor import StepInput
from inkrt.runtime.executor.cuda_timing import FLUSH_BYTES, Chain
from inkrt.runtime.executor.peers import RankSlice
from inkrt.runtime.plan import (
    Const,
    IntParam,
    Kernel,
    Launch,
    PeersParam,
    Plan,
    Ref,
    Refs,
    Space,
    TableParam,
    TensorParam,
    TensorSpec,
)  # fmt: skip

PAGES, PAGE, SLOTS, HEADS = 8, 64, 2, 4
STEP = StepSpec("verify2", 2, 2)
CONFIG = EngineConfig(
    format="", format_version=2, inkrt_version="0",
    model=ModelInfo("x", "bfloat16", 4, 8, 100, 100, ()),
    target="sm_90a", tp_size=1, max_seq_len=PAGES * PAGE, steps=(STEP,),
    state=StateLayout(SLOTS, PAGE, PAGES, 4, (
        StateSpec("cache0", "paged", (PAGES, PAGE, HEADS, 16), "bfloat16"),
        StateSpec("cache1", "ring", (SLOTS, 128, HEADS, 16), "bfloat16"),
        StateSpec("cache2", "paged", (PAGES, PAGE, HEADS, 16), "bfloat16"),
        StateSpec("unused", "paged", (PAGES, PAGE, HEADS, 16), "float32"),
    )),
    memory=MemoryTable(0, 0, 0, 0, 0, 0), build={}, rebuild_command="ink-build C -o E",
    plugins={}, checkpoint_fingerprint="", files={},
)  # fmt: skip


def make_plan() -> Plan:
    """Three layers of write, read and product; then a launch with a table."""
    tensors: list[TensorSpec] = []

    def tensor(name: str, space: Space, storage: str = "") -> int:
        tensors.append(TensorSpec(name, "uint8", (4,), (1,), space, storage, 256 * len(tensors)))
        return len(tensors) - 1

    def kernel(entry: str, *params: TensorParam | TableParam | IntParam) -> Kernel:
        return Kernel(entry, entry, (1, 1, 1), (32, 1, 1), 1, 0, True, False, params)

    launches = []
    stream = tensor("stream", "arena")
    position = tensor("position", "input", "position")
    for n in range(3):
        cache, weight = tensor("c", "state", f"cache{n}"), tensor("w", "weight", f"weight{n}")
        scratch, written = tensor("s.1", "scratch"), tensor("a", "arena")
        read, out = tensor("b", "arena"), tensor("o", "arena")
        p = [TensorParam(i) for i in range(len(tensors))]
        write = (p[stream], p[cache], p[position], p[written], IntParam(n % 2))
        launches += [
            Launch("write", "t", {"x": Ref(stream), "cache": Ref(cache)}, (written,),
                   f"layers.{n}.attn", 100,
                   (kernel("write", *write),)),
            Launch("read", "t", {"x": Ref(written), "cache": Refs((cache,))}, (read,),
                   f"layers.{n}.attn", 200, (kernel("read", p[written], p[cache], p[read]),)),
            Launch("product", "t", {"x": Ref(read), "w": Ref(weight), "eps": Const(1.0)}, (out,),
                   f"layers.{n}.mlp", 1000,
                   (kernel("product", p[read], p[weight], p[scratch], p[out]),)),
        ]  # fmt: skip
        stream = out
    table = kernel("last", TableParam((3, 9)), TensorParam(stream))
    launches.append(Launch("last", "t", {"w": Refs((3, 9))}, (), "", 5, (table,)))
    return Plan("verify2", 2, 2, tuple(tensors), tuple(launches), 4096, {}, {})


PLAN = make_plan()
COSTS = [7.5, 3.0, 11.0, 4.0, 3.5, 12.0, 4.0, 5.0, 10.0, 40.0]
INPUT = step_input_of(CONFIG, STEP, 100)


class FakeTimer:
    """A step takes 2 us and COSTS; a launch of a chain what its tactic's name says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, StepInput, int, list[Chain], int]] = []
        self.cubins: dict[str, bytes] = {}

    def load(self, cubins: Mapping[str, bytes]) -> None:
        self.cubins |= cubins

    def step(
        self, step: str, step_input: StepInput, num_runs: int, *, until: int | None = None
    ) -> list[float]:
        assert (step, step_input) == ("verify2", INPUT)
        us = 2 + sum(COSTS[:until])
        return [us + noise for noise in (900.0, *[0.0] * (num_runs - 2), 0.25)]

    def chains(
        self, step: str, step_input: StepInput, first: int, chains: Sequence[Chain], num_runs: int
    ) -> list[list[float]]:
        self.calls.append((step, step_input, first, list(chains), num_runs))
        return [
            [float(chain.plan.launches[0].tactic.removeprefix("t") or 6), 9.0, 1.0]
            for chain in chains
        ]


class FakeExecutor:
    device_name = gpu_name = "NVIDIA H200"
    rank_slice: RankSlice | None = None

    def plan(self, step: str) -> Plan:
        assert step == "verify2"
        return PLAN


def test_prices_add_up_to_the_step() -> None:
    whole = 2 + sum(COSTS) + 0.5
    prices = price_launches(FakeTimer(), PLAN, INPUT, 9, whole, [0] * len(PLAN.launches))
    assert [price.us for price in prices] == [2 + COSTS[0], *COSTS[1:-1], COSTS[-1] + 0.5]
    assert [price.launch for price in prices] == list(PLAN.launches)
    rows = price_rows(prices)
    assert sum(row["us"] for row in rows) == pytest.approx(whole, abs=1e-9)
    assert [(row["op"], row["count"]) for row in rows] == [
        ("last", 1), ("product", 3), ("write", 3), ("read", 3),
    ]  # fmt: skip
    assert rows[1]["us_of_modules"] == {f"layers.{n}.mlp": COSTS[3 * n + 2] for n in range(3)}
    for row in rows:
        assert sum(row["us_of_modules"].values()) == pytest.approx(row["us"])


def test_launches_of_one_module_keep_their_sum() -> None:
    twice = PLAN.launches[2], PLAN.launches[2]
    prices = [LaunchPrice(*row, 910) for row in zip(twice, (3.0, 4.0), strict=True)]
    (row,) = price_rows(prices)
    assert row["us_of_modules"] == {"layers.0.mlp": 7.0}
    assert row["floor_us"] == pytest.approx(2 * 910 / 4.55e6)


def test_older_positions_are_counted_once_where_they_are_read() -> None:
    per_token = HEADS * 16 * 2
    assert launch_bytes(CONFIG, PLAN, 0) == [launch.bytes for launch in PLAN.launches]
    got = launch_bytes(CONFIG, PLAN, 100)
    expected = [launch.bytes for launch in PLAN.launches]
    for layer in (0, 2):  # the second one's cache is a ring, and one buffer nobody uses
        expected[3 * layer + 1] += 100 * per_token
    assert got == expected


def test_kinds_have_their_own_weights_and_the_first_ones_activations() -> None:
    kinds = kinds_of(PLAN)
    # The second layer's write differs in a number.
    assert [(kind.launches[0].op, kind.first, kind.count) for kind in kinds] == [
        ("write", 0, 2), ("read", 1, 3), ("product", 2, 3), ("write", 3, 1), ("last", 9, 1),
    ]  # fmt: skip
    first = PLAN.launches[2]
    assert kinds[2].launches[0] == first
    for moved, index in zip(kinds[2].launches, (2, 5, 8), strict=True):
        own = PLAN.launches[index]
        assert moved.outputs == first.outputs
        assert moved.args == {**own.args, "x": first.args["x"]}
        (a,), (b,), (c,) = moved.kernels, own.kernels, first.kernels
        assert a.params == (c.params[0], b.params[1], b.params[2], c.params[3])
    assert kinds[1].launches[2].args["cache"] == PLAN.launches[7].args["cache"]
    assert kinds[4].launches[0] == PLAN.launches[9]


def test_experts_are_chosen_by_rows_of_a_middle_layer() -> None:
    launches = tuple(replace(x, op="moe" if x.op == "read" else x.op) for x in PLAN.launches)
    (kind,) = (x for x in kinds_of(replace(PLAN, launches=launches)) if x.launches[0].op == "moe")
    assert (kind.first, kind.count) == (4, 3)
    for moved, own in zip(kind.launches, (PLAN.launches[n] for n in (1, 4, 7)), strict=True):
        assert moved.args == {"x": PLAN.launches[4].args["x"], "cache": own.args["cache"]}
        assert moved.outputs == PLAN.launches[4].outputs


def test_a_chain_has_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ops, "MAX_LAYERS", 2)
    kind = kinds_of(PLAN)[2]
    assert (kind.count, len(kind.launches)) == (3, 2)


def test_chains_are_cold_and_long_enough() -> None:
    """Weights come round after more than the L2 holds, or memory is written in between."""

    def chain(num_bytes: int) -> Chain:
        plan = PLAN.__class__("x", 1, 1, (), PLAN.launches[:3], 0, {}, {})
        return chain_of(plan, num_bytes)

    assert chain(FLUSH_BYTES // 3).flush
    assert not chain(FLUSH_BYTES // 3 + 1).flush
    assert chain(0).num_launches == 3 * chain(0).repeats
    assert chain(0).repeats == 8  # 9 us and a flush of 45
    assert chain(2 * 10**9).repeats == 1
    big = chain(50 * 10**6)  # 3 x (3 + 11) us
    assert (big.repeats, big.flush) == (10, False)


def measured(
    tmp_path: Path, candidates: dict[str, list[str]]
) -> tuple[FakeTimer, list[dict[str, object]]]:
    """Rows of a tuning run whose operators have the given tactics."""
    timer, writer = FakeTimer(), CacheWriter(tmp_path / "times.json", "abc123")
    runner = Bench(FakeExecutor(), CONFIG, 100, 30, writer, timer)  # type: ignore[arg-type]

    class Tuner:
        cubins: ClassVar = {"new": b"code"}

        def compile(self, plan: Plan, launches: Sequence[Launch]) -> None:
            assert plan is PLAN
            assert [launch.op for launch in launches] == [
                "write",
                "read",
                "product",
                "write",
                "last",
            ]

        def candidates(self, plan: Plan, launches: Sequence[Launch]) -> list[Candidate]:
            names = candidates.get(launches[0].op, ["t"])
            return [
                Candidate(name, f"{launches[0].op}-{name}", replace(
                    plan, launches=tuple(replace(x, tactic=name) for x in launches)))
                for name in names
            ]  # fmt: skip

    runner._tuner = Tuner()  # type: ignore[assignment]
    rows = list(runner.step(STEP))
    writer.write()
    return timer, rows


def test_engine_alone_is_timed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    timer = FakeTimer()
    runner = Bench(FakeExecutor(), CONFIG, 100, 30, timer=timer)  # type: ignore[arg-type]
    rows = list(runner.step(STEP))
    assert [(row["op"], row["count"], row["tactic"]) for row in rows] == [
        ("write", 2, "t"), ("read", 3, "t"), ("product", 3, "t"), ("write", 1, "t"),
        ("last", 1, "t"),
    ]  # fmt: skip
    assert [first for _, _, first, _, _ in timer.calls] == [0, 1, 2, 3, 9]
    assert {(step, num_runs) for step, _, _, _, num_runs in timer.calls} == {("verify2", 30)}
    assert all(step_input == INPUT for _, step_input, *_ in timer.calls)
    assert [len(chains[0].plan.launches) for *_, chains, _ in timer.calls] == [2, 3, 3, 1, 1]
    assert all(chains[0].plan.tensors == PLAN.tensors for *_, chains, _ in timer.calls)
    row = rows[1]
    assert row["median_us"] == 6.0
    assert row["bytes"] == 200 + 100 * HEADS * 16 * 2
    assert row["part_of_bandwidth"] == pytest.approx(row["bytes"] / 4.55e6 / 6)
    assert (row["cold_by"], row["is_chosen"], row["is_fastest"]) == ("flush", True, True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows)
    assert "read" in lines[2]
    assert "6.00" in lines[2]


def test_tactics_are_timed_side_by_side_and_cached(tmp_path: Path) -> None:
    timer, rows = measured(tmp_path, {"product": ["t", "t4", "t8"]})
    assert timer.cubins == {"new": b"code"}
    products = [row for row in rows if row["op"] == "product"]
    assert [(r["tactic"], r["median_us"], r["is_chosen"], r["is_fastest"]) for r in products] == [
        ("t", 6.0, True, False), ("t4", 4.0, False, True), ("t8", 8.0, False, False),
    ]  # fmt: skip
    (of_product,) = [chains for *_, first, chains, _ in timer.calls if first == 2]
    assert len(of_product) == 3
    cache = read_timing_cache(tmp_path / "times.json")
    expected = {"product-t": 6.0, "product-t4": 4.0, "product-t8": 8.0, "product-t9": None}
    assert {key: cache.median_us("NVIDIA H200", "product", key) for key in expected} == expected
    (entry,) = [
        call for call in json.loads((tmp_path / "times.json").read_text())["devices"]["NVIDIA H200"]
        if call["op"] == "product"
    ]  # fmt: skip
    assert entry["call"] == "x=uint8[4] w=uint8[4] eps=1.0"
    assert {(t["n"], t["context"], t["commit"]) for t in entry["times"]} == {(3, 100, "abc123")}


@pytest.mark.parametrize("part", [None, RankSlice(1, 4)])
def test_times_of_looped_back_exchanges_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: RankSlice | None
) -> None:
    """Those of "write", which has the parameter; on real ranks they are what they are."""
    launches = tuple(
        replace(x, kernels=tuple(
            replace(k, params=(*k.params, PeersParam(64))) for k in x.kernels if x.op == "write"
        ) or x.kernels)
        for x in PLAN.launches
    )  # fmt: skip
    monkeypatch.setattr("test_bench.PLAN", replace(PLAN, launches=launches))
    monkeypatch.setattr(FakeExecutor, "rank_slice", part)
    _, rows = measured(tmp_path, {"write": ["t3", "t2"], "product": ["t8", "t4"]})
    apart = "NVIDIA H200, collectives looped back" if part else "NVIDIA H200"
    assert {row["device"] for row in rows if row["op"] == "write"} == {apart}
    assert {row["device"] for row in rows if row["op"] != "write"} == {"NVIDIA H200"}
    cache = read_timing_cache(tmp_path / "times.json")
    assert cache.median_us(apart, "write", "write-t2") == 2.0
    assert (cache.median_us("NVIDIA H200", "write", "write-t2") is None) == bool(part)
    assert cache.median_us("NVIDIA H200", "product", "product-t4") == 4.0


def test_what_the_fastest_tactics_save_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(tmp_path, {"product": ["t", "t4"]})  # three of them, 6 and 4 us
    told = capsys.readouterr().out.splitlines()
    whole = 6.0 * len(PLAN.launches)
    assert told[-1] == (
        f"verify2: {whole:.1f} us in chains by the engine's tactics, {whole - 6:.1f} by the fastest"
    )


def test_a_second_run_adds_to_the_file(tmp_path: Path) -> None:
    measured(tmp_path, {"product": ["t", "t4"]})
    measured(tmp_path, {"product": ["t3"], "last": ["t2"]})
    cache = read_timing_cache(tmp_path / "times.json")
    for name, us in {"t": 6.0, "t4": 4.0, "t3": 3.0}.items():
        assert cache.median_us("NVIDIA H200", "product", f"product-{name}") == us
    assert cache.median_us("NVIDIA H200", "last", "last-t2") == 2.0


def test_a_file_that_is_no_cache_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no timing cache"):
        CacheWriter(path, "abc")
    assert path.read_text() == "{}"


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(ConfigError, match=r"cannot write .*times.json; name a file in a folder"):
        CacheWriter(folder / "times.json", "abc")  # before anything is timed
    folder.mkdir()
    writer = CacheWriter(folder / "times.json", "abc")
    folder.rmdir()
    with pytest.raises(ConfigError, match=r"cannot write timing cache .*; name another one"):
        writer.write()


def test_an_operator_without_tactics_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tactic of product for sm_90a that fits the engine"):
        measured(tmp_path, {"product": []})


def test_a_models_configuration_becomes_an_engine_for_a_while(tmp_path: Path) -> None:
    with engine_folder(tmp_path) as found:  # whatever is no model's folder is left to Engine.open
        assert found == tmp_path
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "unheard of"}))
    with pytest.raises(InkError, match="unheard of"), engine_folder(model):
        pass
