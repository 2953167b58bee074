"""Times of launches on the GPU, and engines built by them, whose bits are those of the first."""

import json
from statistics import median

import numpy as np
import pytest
from test_flint_layers_on_gpu import CONFIG

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.builder.timing_cache import Timing, TimingCache, read_timing_cache
from inkrt.builder.tune import Tuner
from inkrt.commands.bench_ops import Bench, CacheWriter, kinds_of
from inkrt.commands.bench_routing import step_routing
from inkrt.commands.bench_step import launch_bytes, price_launches, price_rows, step_input_of
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_code
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.cuda_timing import Timer

pytestmark = pytest.mark.gpu
CONTEXT = 700


@pytest.fixture(scope="module")
def folder(gpu, tmp_path_factory):
    """Has an engine of first tactics, in which steps of one token are `flint_layers`."""
    path = tmp_path_factory.mktemp("tactics")
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_experts": 40}))
    build(path, "first", TimingCache())
    return path


def build(folder, name, cache):
    """Lines of progress."""
    lines, path = [], folder / f"{name}.json"
    path.write_bytes(cache.encode())
    options = BuildOptions(target="sm_90a", weights="dummy", max_verify_tokens=3)
    build_engine(folder, folder / name, options, lines.append, timing_cache=path)
    return lines


def logits(folder):
    """Of 60 tokens one at a time behind 20 steps of three, which wrap nothing but fill pages."""
    with Engine.open(folder) as engine, engine.session() as session:
        rows = [
            session.step([3 * n, 3 * n + 1, 3 * n + 2], Sampling()).logits.copy() for n in range(20)
        ]
        rows += [session.step([37 * n % 1000], Sampling()).logits.copy() for n in range(60)]
    return np.concatenate(rows)


def preferring(folder, number):
    """A cache by which the tactic `number` of every call is the fastest."""
    cache, tuner = TimingCache(), Tuner("sm_90a")
    for plan in read_code(folder / "first", 0).plans.values():
        for kind in kinds_of(plan):
            found = tuner.candidates(plan, kind.launches[:1])
            for index, one in enumerate(found):
                us = 1.0 if index == number % len(found) else 2.0
                timing = Timing(one.tactic, one.kernels, us, 1, 0, "", "")
                cache.add("NVIDIA H200", kind.launches[0].op, one.kernels, timing)
    return cache


@pytest.mark.parametrize("number", [1, 2, -1])
def test_every_tactic_has_the_same_bits(folder, number):
    lines = build(folder, f"tactic{number}", preferring(folder, number))
    assert any(line.endswith(" by the timing cache") for line in lines)
    plans = [read_code(folder / name, 0).plans for name in ("first", f"tactic{number}")]
    first, other = ([x.tactic for p in plan.values() for x in p.launches] for plan in plans)
    assert first != other
    expected = logits(folder / "first")
    assert len(np.unique(expected)) > 1000
    np.testing.assert_array_equal(logits(folder / f"tactic{number}"), expected)


def test_times_are_taken_and_built_by(folder):
    path = folder / "times.json"
    writer = CacheWriter(path, "abc")
    with Engine.open(folder / "first") as engine:
        bench = Bench(engine.executor, engine.config, CONTEXT, 50, writer)
        rows = [row for step in engine.config.steps for row in bench.step(step)]
    writer.write()
    assert all(0.3 < row["median_us"] < 1000 and row["n"] >= 50 for row in rows)
    # Weights come from memory, not from the L2; 5 % for clocks.
    assert all(row["part_of_bandwidth"] < 1.05 for row in rows)
    assert {row["op"] for row in rows} >= {"flint_layers", "flint_moe", "sink_attention"}
    lines = build(folder, "tuned", read_timing_cache(path))
    assert any(line.endswith(" by the timing cache") for line in lines)
    plans = read_code(folder / "tuned", 0).plans.values()
    chosen = {(launch.op, launch.tactic) for plan in plans for launch in plan.launches}
    assert chosen <= {(row["op"], row["tactic"]) for row in rows if row["is_fastest"]}


def test_experts_are_counted_from_what_is_on_the_gpu(folder):
    with Engine.open(folder / "first") as engine:
        timer, config = Timer(engine.executor), engine.config
        for step in config.steps:
            plan, inputs = engine.executor.plan(step.name), step_input_of(config, step, CONTEXT)
            routing = step_routing(timer, plan, inputs)
            indices = [n for n, launch in enumerate(plan.launches) if launch.op == "flint_moe"]
            assert list(routing) == indices
            assert routing == step_routing(timer, plan, inputs)
            for index, of_launch in routing.items():
                assert 6 < of_launch.distinct <= min(40, 6 * step.num_tokens)
                # Independent choices of three tokens are 15.4 of 40; of a chunk, all.
                assert of_launch.distinct == pytest.approx(of_launch.independent, abs=5)
                # Nothing but activations and what all tokens read is left without the experts.
                own = of_launch.distinct * of_launch.expert_bytes
                assert of_launch.bytes_of(plan.launches[index]) >= own


def test_prices_add_up(folder):
    with Engine.open(folder / "first") as engine:
        timer, config = Timer(engine.executor), engine.config
        for step in config.steps:
            plan, inputs = engine.executor.plan(step.name), step_input_of(config, step, CONTEXT)
            whole = median(timer.step(step.name, inputs, 40))
            num_bytes = launch_bytes(config, plan, CONTEXT)
            rows = price_rows(price_launches(timer, plan, inputs, 40, whole, num_bytes))
            assert sum(row["us"] for row in rows) == pytest.approx(whole)
            # A launch costs something, but for noise, of which a step has some percent.
            least = min(rows, key=lambda row: row["us"])
            assert least["us"] > -0.03 * whole, (least["op"], least["us"], whole)
            assert rows[0]["op"] == ("flint_layers" if step.num_tokens == 1 else "flint_moe")
