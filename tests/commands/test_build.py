"""ink-build makes an engine that the other commands can use; its options are BuildOptions."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from inkrt.builder.options import BuildOptions
from inkrt.commands import build, inspect, run
from inkrt.engines.tiny import __main__ as tiny
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine_file import read_config
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams

# Two steps only, so that the build is quick.
FLAGS = [
    "--max-verify-tokens",
    "1",
    "--prefill_chunk",
    "16",
    "--max-seq-len",
    "128",
    "--dtype",
    "float32",
]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build.make_app(), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "checkpoint"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    path = checkpoint.parent / "engine"
    result = invoke(checkpoint, "-o", path, *FLAGS)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "step decode: " in result.stderr
    return path


def test_options_reach_the_engine(engine: Path) -> None:
    config = read_config(engine)
    expected = BuildOptions(
        max_verify_tokens=1, prefill_chunk=16, max_seq_len=128, dtype="float32", spec="none"
    )
    assert config.build == dataclasses.asdict(expected)
    assert [step.name for step in config.steps] == ["decode", "prefill16"]


def test_other_commands_use_the_engine(engine: Path) -> None:
    verified = CliRunner().invoke(inspect.make_app(), ["verify", str(engine)])
    assert verified.exit_code == 0, verified.output
    arguments = ["--raw", "-p", "The keeper", "--max-tokens", "4", "--temperature", "0"]
    result = CliRunner().invoke(run.make_app(), [str(engine), *arguments])
    with LLM(engine) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        (output,) = llm.generate(["The keeper"], params)
    assert len(output.outputs[0].token_ids) == 4
    assert result.stdout.rstrip("\n") == output.outputs[0].text.rstrip("\n")


def test_costs_of_a_dry_run_are_refused(checkpoint: Path) -> None:
    result = invoke(checkpoint, "--dry-run", "--costs")
    assert result.exit_code == 2
    assert "--costs measures an engine" in " ".join(result.stderr.replace("│", " ").split())


def test_dry_run_tells_the_memory_and_writes_nothing(checkpoint: Path, engine: Path) -> None:
    before = sorted(checkpoint.parent.rglob("*"))
    result = invoke(checkpoint, "--dry-run", "--quiet", *FLAGS)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    (total,) = (line.split() for line in result.stdout.splitlines() if line.startswith("total"))
    assert total[:2] == ["total", f"{read_config(engine).memory.total:,}"]
    assert sorted(checkpoint.parent.rglob("*")) == before


def test_dry_run_needs_a_config_only(checkpoint: Path, engine: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    result = invoke(tmp_path, "--dry-run", *FLAGS)
    assert result.exit_code == 0, result.output
    assert "no tensors are there: sizes are those of config.json" in result.stderr
    config = read_config(engine)
    assert f"total {config.memory.total:,} " in " ".join(result.stdout.split())
    lines = result.stdout.splitlines()
    table = lines[lines.index("") + 1 :]
    assert table[0].split()[-8:] == ["tp", "1", "tp", "2", "tp", "4", "tp", "8"]
    # Four heads of keys and values, of 8 float32 numbers each, in two layers with full attention.
    (position,) = (line for line in table if line.startswith("a position of context"))
    assert position.split()[4:] == ["512", "B", "256", "B", "128", "B", "-"]
    (h100,) = (line for line in table if line.strip().startswith("NVIDIA H100"))
    held = config.memory.total - config.memory.paged_state
    left = (81_559 * 2**20 - 2**30 - held) // 512
    assert h100.split()[2] == f"{left:,}"
    assert table[-1].startswith("tp 8: tp size 8 does not divide ")


def test_every_build_option_is_a_flag() -> None:
    text = invoke("--help").stdout
    for field in dataclasses.fields(BuildOptions):
        assert f"--{field.name.replace('_', '-')} " in text
        assert field.metadata["help"].split()[0] in text


def test_errors(checkpoint: Path, tmp_path: Path) -> None:
    refused = invoke(checkpoint, "-o", tmp_path / "x", "--tp-size", "3")
    assert refused.exit_code == 1
    assert refused.stderr == "error: tp size 3 is not supported; choose one of 1, 2, 4, 8\n"
    assert invoke(checkpoint, "-o", tmp_path / "x", "--dtype", "fp8").exit_code == 2
    assert invoke(checkpoint).exit_code == 2
    missing = invoke(tmp_path / "missing", "-o", tmp_path / "x")
    assert missing.exit_code == 1
    assert missing.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_is_told_and_can_be_left_out(tmp_path: Path) -> None:
    command = ["python -m inkrt.engines.tiny", str(tmp_path / "x"), "--drafter", "speculators"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*command, "--head", "gated", "--trimmed"])
        assert tiny.main() == 0
    drafter = ["--draft-checkpoint", str(tmp_path / "x" / "drafter")]
    result = invoke(tmp_path / "x", "--dry-run", *FLAGS, *drafter)
    assert result.exit_code == 0, result.output
    assert "drafter: dspark in the layout speculators, 3 layers, 7 drafts, head gated" in (
        result.stderr
    )
    result = invoke(tmp_path / "x", "--dry-run", *FLAGS, *drafter, "--spec", "none")
    assert result.exit_code == 1
    assert result.stderr.endswith("is not used with --spec none; leave out one of them\n")


def test_a_bad_timing_cache_is_told_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text('{"format": "ink-engine"}')
    out = tmp_path / "engine"
    result = invoke(checkpoint, "-o", out, "--target", "sm_90a", "--timing-cache", times)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"error: {times} is no timing cache (no format 'ink-timing-cache'); "
        f"make one with: ink-bench ops ENGINE --tune --timing-cache {times}"
    )
    assert not out.exists()
    result = invoke(checkpoint, "-o", out, *FLAGS, "--timing-cache", times)
    assert result.exit_code == 1
    assert "a timing cache is for GPU targets" in result.stderr.splitlines()[-1]
