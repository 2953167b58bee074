"""Options about speculation at the command line, where the engine decides what they can do."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inkrt.commands import bench, run
from inkrt.runtime.engine_file import read_config

HOW = ("--draft-tokens=3", "--accept=coupled", "--width=auto", "--width=confidence")


def ink_run(folder: Path, *options: str) -> Result:
    arguments = [str(folder), "-p", "a b a b", "--raw", "--max-tokens", "3", *options]
    return CliRunner().invoke(run.make_app(), arguments)


def ink_bench(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(bench.make_app(), ["engine", str(folder), "--acceptance", *options])


@pytest.mark.parametrize("spec", [[], ["--spec", "auto"]], ids=["default", "auto"])
def test_how_to_draft_is_refused_on_an_engine_without_a_drafter(
    make_engine: Any, spec: list[str]
) -> None:
    plain, narrow = (
        make_engine("float32", num_layers=1, **options)
        for options in ({}, {"max_verify_tokens": 1})
    )
    command = read_config(narrow).rebuild_command.replace("-tokens 1", "-tokens 8")
    assert "--max-verify-tokens 8" in command
    for folder, why in (
        (plain, "has no drafter of its own; add --spec ngram"),
        (narrow, f"has no verify step; rebuild it with: {command}"),
    ):
        assert ink_run(folder, *spec).exit_code == 0  # where nothing is asked for, nothing is said
        for option in HOW:
            result = ink_run(folder, *spec, option)
            line = (
                f"{option.split('=')[0]}: of no use, since engine {folder} {why}, or leave it out"
            )
            assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {line}\n")
            result = ink_bench(folder, *spec, option)
            line = f"nobody drafts: engine {folder} {why}"
            assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {line}\n")
    assert ink_run(plain, "--spec", "ngram", "--draft-tokens=3", "--width=auto").exit_code == 0


def test_who_drafts_is_refused_by_name(make_engine: Any) -> None:
    folder = make_engine("float32", num_layers=1)
    for command in (ink_run, ink_bench):
        result = command(folder, "--spec", "dspark")
        assert result.exit_code == 1
        assert result.stderr.startswith(
            "error: this engine has no drafter of its own; choose --spec=ngram, or rebuild it from"
        )
        result = command(folder, "--spec", "ngram", "--draft-tokens", "0")
        assert (result.exit_code, result.stderr) == (
            1,
            "error: --draft-tokens is 0, it must be an integer of at least 1, or None\n",
        )
        result = command(folder, "--spec", "ngram", "--width", "confidence")
        assert result.stderr == (
            "error: drafts of ngram come without confidences here; choose --width=fixed or "
            "--width=cost\n"
        )
