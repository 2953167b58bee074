"""Builds with a drafter: what is built in, told and left out, and which targets refuse one."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from small_model import OPTIONS, edit_config, edit_tensors, write_small
from test_drafter import Make, damaged, find

from inkrt.builder.build import build_engine, prepare
from inkrt.builder.checkpoint import Checkpoint
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tiny.drafter import DrafterLayout, TinyDrafter
from inkrt.errors import ConfigError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import DraftSpec, read_config
from inkrt.runtime.executor import Sampling


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Tiny checkpoints with a drafter, made once for equal arguments."""

    @cache
    def write(*arguments: object) -> Path:
        folder = tmp_path_factory.mktemp("drafter") / "checkpoint"
        drafter = TinyDrafter(*arguments)  # type: ignore[arg-type]
        return write_small(folder, dtype="bfloat16", drafter=drafter)

    return write


def test_a_build_without_the_drafter_tells_what_it_leaves_out(make: Make, tmp_path: Path) -> None:
    checkpoint, lines = make("embedded"), list[str]()
    none = dataclasses.replace(OPTIONS, spec="none")
    build_engine(checkpoint, tmp_path / "engine", none, lines.append)
    assert not any("unknown tensor" in line for line in lines)
    bundled = [name for name in Checkpoint(checkpoint).names if name.startswith("dspark.")]
    vision = [name for name in Checkpoint(checkpoint).names if name.startswith("model.visual.")]
    count = len(bundled) + len(vision)
    told = f"left out {count} tensors of parts that this version does not build"
    assert told in lines
    # The same in a tree that only the settings say is a drafter's.
    moved = damaged(make, tmp_path / "moved")
    edit_tensors(
        moved, lambda t: [t.update({x.replace("dspark.", "mtp."): t.pop(x)}) for x in bundled]
    )
    lines.clear()
    build_engine(moved, tmp_path / "engine2", none, lines.append)
    assert told in lines
    assert not any("unknown tensor" in line for line in lines)
    config = read_config(tmp_path / "engine")
    assert config.draft is None
    assert config.build["spec"] == "none"
    assert config.checkpoint_fingerprint == Checkpoint(checkpoint).fingerprint


def test_a_build_gets_the_drafter(make: Make, tmp_path: Path) -> None:
    checkpoint, lines = make("embedded"), list[str]()
    bundled = build_engine(checkpoint, tmp_path / "bundled", OPTIONS, lines.append)
    assert bundled.draft == DraftSpec("dspark", 7, "rnn", True)
    assert not any("unknown tensor" in line for line in lines)
    assert not bundled.rebuild_command.endswith("DRAFTER")

    other = make("specforge")
    built = build_engine(
        other, tmp_path / "with", OPTIONS, lines.append, draft_checkpoint=other / "drafter"
    )
    found = find(other, other / "drafter")
    assert found is not None
    assert built.checkpoint_fingerprint == found.checkpoint.fingerprint
    assert built.build["spec"] == "dspark"
    assert "--spec dspark" in built.rebuild_command
    assert built.rebuild_command.endswith(" --draft-checkpoint DRAFTER")
    assert not any("unknown tensor" in line for line in lines)


@pytest.mark.parametrize(
    "layout", [pytest.param("embedded", marks=pytest.mark.slow), "deepspec", "speculators"]
)
def test_trimmed_drafts_of_an_engine(make: Make, tmp_path: Path, layout: DrafterLayout) -> None:
    """Every layout gives the same drafts, of tokens that can be drafted; dummy weights run too."""
    options = dataclasses.replace(OPTIONS, dtype="float32")
    drafted = []
    for of, weights in (("specforge", "real"), (layout, "real"), (layout, "dummy")):
        checkpoint = make(of, "rnn", True)
        folder = None if of == "embedded" else checkpoint / "drafter"
        target = tmp_path / f"{of}-{weights}"
        chosen = dataclasses.replace(options, weights=weights)
        build_engine(checkpoint, target, chosen, draft_checkpoint=folder)
        with Engine.open(target) as engine, engine.session() as session:
            session.prefill(range(30), Sampling())
            drafts = session.draft(3, Sampling(1.0), coupled=False, wants_logits=True)
        assert np.isfinite(drafts.logits).sum(-1).tolist() == [327] * 7
        if weights == "real":
            assert not any(token % 3 == 1 for token in drafts.tokens)
            drafted.append(drafts)
    np.testing.assert_array_equal(drafted[0].tokens, drafted[1].tokens)


def test_models_without_taps_refuse_a_drafter(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    drafter = TinyDrafter("speculators")
    write_checkpoint(checkpoint, seed=1, dtype="float32", model="flint", drafter=drafter)
    with pytest.raises(ConfigError, match=r"a drafter \(dspark\) cannot be built into engines of"):
        prepare(Checkpoint(checkpoint), OPTIONS, draft_checkpoint=checkpoint / "drafter")


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_sizes_that_ranks_cannot_share_are_named(
    make: Make, tmp_path: Path, target: Literal["cpu", "sm_90a"]
) -> None:
    checkpoint = damaged(make, tmp_path / "narrow")
    edit_config(checkpoint, lambda config: config.update({"dspark_intermediate_size": 57}))
    options = dataclasses.replace(OPTIONS, target=target, tp_size=2, spec="dspark", weights="dummy")
    with pytest.raises(
        ConfigError,
        match=r"tp size 2 does not divide intermediate_size = 57 of the drafter; .*--spec none",
    ):
        prepare(Checkpoint(checkpoint), options)
