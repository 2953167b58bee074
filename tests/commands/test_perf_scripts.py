"""Scripts of perf/: tables of what others measure, errors of ratios, and steps by name."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[2] / "perf"))

import inkling2
import inkling2_mini
import stamps
from acceptance_compare import compare, ratio_with_error
from test_bench import CONFIG, STEP

from inkrt.engines.catalog import find_definition
from inkrt.engines.dspark.layouts import read_bundled
from inkrt.runtime.engine_file import DraftSpec, StepSpec


@pytest.mark.parametrize(
    ("tp_size", "layers", "positions", "commands", "workloads"),
    [
        (4, 48, 102_400, 2, ["decode at 8192", "verify4 at 8192", "verify8 at 8192",
                             "decode at 100000"]),
        (4, 48, 262_144, 4, ["decode at 8192", "verify4 at 8192", "verify8 at 8192",
                             "decode at 100000", "decode at 262143", "verify8 at 262136"]),
        (2, 36, 16_384, 1, ["decode at 8192", "verify4 at 8192", "verify8 at 8192"]),
    ],
)  # fmt: skip
def test_one_command_makes_the_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int, layers: int, positions: int,
    commands: int, workloads: list[str],
) -> None:  # fmt: skip
    asked: list[str] = []

    def bench(_: object, command: str, *, cut_runs: int) -> dict[str, Any]:
        assert cut_runs == 10
        asked.append(command)
        words = command.split()
        steps = words[words.index("--steps") + 1].split(",")
        context = int(words[words.index("--contexts") + 1])
        modules = {"layers.0.attn": 40.0 * layers, "layers.1.mlp": 20.0 * layers, "lm_head": 99.0}
        launches = [
            {"op": "x", "tactic": "t", "count": 2, "us": 1.0, "floor_us": 1.0,
             "us_of_modules": modules}
        ]  # fmt: skip
        row = {"context": context, "median_us": 2000.0, "bytes": 9, "floor_us": 3.0}
        return {
            "device": "H200",
            "rows": [{**row, "step": step, "launches": launches} for step in steps],
        }

    monkeypatch.setattr(inkling2, "bench", bench)
    config = {"tp_size": tp_size, "model": {"num_layers": layers}, "max_seq_len": positions}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "rows.json"
    other = {"workload": "a kernel by itself", "value": 1}
    out.write_text(json.dumps([other]))
    for _ in range(2):  # the second time in place of the first
        arguments = ["x", str(tmp_path), "--commit", "abc", "--profile", "-o", str(out)]
        monkeypatch.setattr(sys, "argv", arguments)
        assert inkling2.main() == 0
    first, *rows = json.loads(out.read_text())
    assert first == other
    tail = ", a layer" if tp_size == 2 else ", rank slice 0/4, collectives looped back"
    tail = " on two GPUs" + tail if tp_size == 2 else tail
    assert [row["workload"] for row in rows] == [name + tail for name in workloads]
    assert len(asked) == 2 * commands
    assert {row["value"] for row in rows} == {60.0 if tp_size == 2 else 2.0}
    assert rows[0]["must"] == (60.0 if tp_size == 2 else 1.75)
    assert all(row["command"].endswith("--profile --profile-runs 10") for row in rows)


@pytest.mark.parametrize(
    ("script", "model_type", "layers", "nvfp4"),
    [(inkling2, "inkling2", 48, 40), (inkling2_mini, "inkling2_loop", 24, 20)],
)
def test_a_configuration_is_that_of_the_full_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Any, model_type: str, layers: int,
    nvfp4: int,
) -> None:  # fmt: skip
    arguments = ["x", "--write-config", str(tmp_path), "--drafter"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert script.main() == 0
    values = json.loads((tmp_path / "config.json").read_text())
    definition = find_definition(values)
    config = definition.parse_config(values)
    default = definition.parse_config({"model_type": model_type, "dtype": "bfloat16"})
    assert config.stored_experts == ("nvfp4",) * nvfp4 + ("mxfp8",) * (layers - nvfp4)
    assert (
        dataclasses.replace(config, stored_experts=default.stored_experts, experts=default.experts)
        == default
    )
    drafter = read_bundled(values, None, definition.draft_target(config), "config.json").config
    assert drafter.block_size == 7


def test_the_error_of_a_ratio_is_that_of_many_samples() -> None:
    generator = np.random.default_rng(3)

    def sample() -> list[tuple[float, float]]:
        rounds = generator.integers(1, 9, 200)
        tokens = rounds * generator.normal(3, 0.5, 200) + generator.normal(0, 1, 200)
        return list(zip(tokens.tolist(), rounds.tolist(), strict=True))

    estimates = [ratio_with_error(sample()) for _ in range(400)]
    ratios = np.array([ratio for ratio, _ in estimates])
    assert abs(ratios.mean() - 3) < 0.01
    assert np.mean([error for _, error in estimates]) == pytest.approx(ratios.std(), rel=0.1)
    assert ratio_with_error([(5.0, 2.0)]) == (2.5, 0.0)
    assert ratio_with_error([(0.0, 0.0)]) == (0.0, 0.0)


def result(device: str, length: float, error: float | None) -> dict[str, Any]:
    made: dict[str, Any] = {"checkpoint": "c", "workload": "w", "device": device}
    made["acceptance_length"] = {"fixed, text, T=0": length, "never": 0.0}
    if error is not None:
        made["acceptance_error"] = {"fixed, text, T=0": error, "never": 0.0}
    return made


def test_acceptance_is_compared_within_its_noise() -> None:
    cpu = result("CPU", 2.0, 0.04)
    lines, is_near = compare(cpu, result("H200", 2.1, 0.03))
    assert is_near
    assert lines[1].split()[-1] == "2.00"  # 0.1 over 0.05
    assert lines[-1] == "all within 4 standard errors"
    lines, is_near = compare(cpu, result("H200", 1.7, 0.03))
    assert not is_near
    assert lines[-1].startswith("NOT")
    # Without errors of its own, it has those of the other.
    lines, _ = compare(result("CPU", 2.0, None), result("H200", 2.1, 0.05))
    assert lines[1].split()[-1] == "1.41"
    with pytest.raises(SystemExit, match="neither result has standard errors"):
        compare(result("CPU", 2.0, None), result("H200", 2.1, None))
    with pytest.raises(SystemExit, match="another checkpoint"):
        compare(cpu, {**cpu, "checkpoint": "d"})


def test_the_draft_step_can_be_stamped() -> None:
    drafter = DraftSpec("dspark", 7, "rnn", has_confidence=True)
    config = replace(CONFIG, draft=drafter)
    assert stamps.step_of(config, "verify2") == STEP
    assert stamps.step_of(config, "draft") == StepSpec("draft", 1, 7)
    for without, names in ((config, "verify2, draft"), (CONFIG, "verify2")):
        with pytest.raises(SystemExit) as stopped:
            stamps.step_of(without, "verify3")
        assert str(stopped.value) == f"the engine has no step 'verify3'; it has {names}"
