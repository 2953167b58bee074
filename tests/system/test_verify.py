"""`ink-verify` passes a trained engine that differs by rounding and fails small defects."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inkrt.commands.verify import make_app
from inkrt.runtime.engine import Engine

Change = Callable[[Engine], None]


def verify(engine: Path, checkpoint: Path, options: str) -> Result:
    return CliRunner().invoke(make_app(), [str(engine), str(checkpoint), *options.split()])


def verify_changed(
    monkeypatch: pytest.MonkeyPatch, change: Change, engine: Path, checkpoint: Path, options: str
) -> Result:
    """With an engine that computes something else than its checkpoint says."""
    open_engine = Engine.open

    def open_changed(folder: Path) -> Engine:
        opened = open_engine(folder)
        change(opened)
        return opened

    monkeypatch.setattr(Engine, "open", open_changed)
    return verify(engine, checkpoint, options)


def arguments_of(engine: Engine, op: str) -> Iterator[dict[str, Any]]:
    """Of all launches of an operator."""
    for bound in engine.executor._bound.values():
        for launch in bound.plan.launches:
            if launch.op == op:
                yield from bound._arguments[id(launch)]


def shorten_windows(engine: Engine) -> None:
    changed = 0
    for arguments in arguments_of(engine, "relative_attention"):
        if arguments["window"]:
            arguments["window"] -= 1
            changed += 1
    assert changed


def change_route_scale(engine: Engine) -> None:
    for arguments in arguments_of(engine, "moe"):
        assert arguments["route_scale"] == 2.0
        arguments["route_scale"] = 2.04


def change_weights(name: str) -> Change:
    return lambda engine: engine.executor._ranks[0].weights[name].mul_(1.1)


@pytest.mark.slow
def test_rounding_that_chooses_another_expert_passes(
    nano_engine: Path, nano_checkpoint: Path
) -> None:
    """A prompt in which one row is 0.145 off, beyond the bound of 0.01."""
    options = "--lengths 448 --chunks 64 --decode 50 --seed 8"
    result = verify(nano_engine, nano_checkpoint, options)
    assert result.exit_code == 0, result.output
    found = re.search(r"parity holds; 51 rows: worst relative error (\S+),", result.output)
    assert found
    assert float(found[1]) > 0.05
    assert "; 51 rows that differ are as near to float32 as transformers" in result.output


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(shorten_windows, id="window", marks=pytest.mark.slow),
        pytest.param(change_route_scale, id="route scale", marks=pytest.mark.slow),
        pytest.param(change_weights("layers.4.mlp.down"), id="experts", marks=pytest.mark.slow),
        pytest.param(change_weights("layers.11.attn.wo"), id="attention", marks=pytest.mark.slow),
    ],
)
def test_small_defects_fail(
    nano_engine: Path, nano_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    """All of them leave 94 % of the most likely tokens as they are."""
    options = "--lengths 130 --chunks 64 --decode 50"
    result = verify_changed(monkeypatch, change, nano_engine, nano_checkpoint, options)
    assert result.exit_code == 1, result.output
    assert "parity failed; 51 rows" in result.output
    assert "51 rows that differ are further from float32 than transformers" in result.output
