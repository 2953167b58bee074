"""Builds with MTP heads: what is built in, told and left out, and what is refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_model import OPTIONS, edit_config, edit_tensors

from inkrt.builder.build import build_engine, prepare
from inkrt.builder.checkpoint import Checkpoint
from inkrt.builder.choose_drafter import choose_drafter
from inkrt.builder.options import BuildOptions
from inkrt.engines.catalog import find_definition
from inkrt.engines.tiny import inkling
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tiny.drafter import TinyDrafter
from inkrt.errors import CheckpointError, ConfigError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import DraftSpec
from inkrt.runtime.executor import Sampling

VERIFY = dataclasses.replace(OPTIONS, max_verify_tokens=3)
BLOCK = "model.mtp.layers.1.transformer_block."


def write(folder: Path, **arguments: Any) -> Path:
    """A checkpoint of three layers: two dense, and one with experts and full attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inkling, "NUM_LAYERS", 3)
        write_checkpoint(folder, model="inkling", **arguments)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mtp") / "checkpoint")


def choose(folder: Path, options: BuildOptions, lines: list[str]) -> Any:
    target = Checkpoint(folder)
    definition = find_definition(target.config)
    model = definition.parse_config(target.config)
    return choose_drafter(target, definition, model, options, None, lines.append)


@pytest.mark.parametrize("spec", ["auto", "mtp"])
@pytest.mark.parametrize(("widest", "num_depths"), [(2, 1), (3, 2), (4, 3), (8, 3)])
def test_as_many_depths_as_can_be_verified(
    checkpoint: Path, spec: Any, widest: int, num_depths: int
) -> None:
    lines: list[str] = []
    options = dataclasses.replace(OPTIONS, max_verify_tokens=widest, spec=spec)
    found = choose(checkpoint, options, lines)
    assert found.spec == DraftSpec("mtp", num_depths, None, has_confidence=False)
    windows = "0, 2" if num_depths == 3 else "0"
    assert lines == [
        f"drafter: mtp, {num_depths} of 3 depths, window in depths {windows}",
        *found.decisions,
    ]
    assert not found.decisions
    assert len(found.sources) == num_depths * 20


def test_a_build_gets_the_heads(checkpoint: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    built = build_engine(checkpoint, tmp_path / "engine", VERIFY, lines.append)
    assert built.draft == DraftSpec("mtp", 2, None, has_confidence=False)
    assert built.build["spec"] == "mtp"
    assert "--spec mtp" in built.rebuild_command
    assert built.checkpoint_fingerprint == Checkpoint(checkpoint).fingerprint
    assert not any("unknown tensor" in line for line in lines)
    third = [name for name in Checkpoint(checkpoint).names if ".mtp.layers.2." in name]
    towers = 2 + 2 * inkling.NUM_VISION_LAYERS
    told = f"left out {len(third) + towers} tensors of parts that this version does not build"
    assert told in lines
    kinds = {spec.name: spec.kind for spec in built.state.buffers}
    assert kinds["drafter.depths.0.layer.attn.k_cache"] == "ring"
    assert kinds["drafter.depths.1.layer.attn.v_cache"] == "paged"
    assert kinds["drafter.depths.1.before"] == "ring"


def test_dummy_weights_draft(checkpoint: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(VERIFY, weights="dummy")
    build_engine(checkpoint, tmp_path / "engine", options)
    with Engine.open(tmp_path / "engine") as engine, engine.session() as session:
        session.prefill(range(30), Sampling())
        output = session.draft(3, Sampling(1.0), coupled=False, wants_logits=True)
    assert output.logits.shape == (2, 490)
    assert output.confidences is None


def test_a_build_without_them(checkpoint: Path) -> None:
    for options, told in (
        (dataclasses.replace(VERIFY, spec="none"), []),
        (
            OPTIONS,
            ["drafter: none: MTP heads need a verify step; give --max-verify-tokens of at least 2"],
        ),
    ):
        lines: list[str] = []
        assert choose(checkpoint, options, lines) is None
        assert lines == told


def test_heads_that_transformers_did_not_save(tmp_path: Path) -> None:
    folder, lines = write(tmp_path / "checkpoint", layout="transformers"), list[str]()
    message = (
        "config.json names 3 MTP depths, but the checkpoint has none of their tensors "
        "(transformers does not save them); add their file"
    )
    assert choose(folder, VERIFY, lines) is None
    assert lines == [f"drafter: none: {message}"]
    with pytest.raises(ConfigError) as caught:
        choose(folder, dataclasses.replace(VERIFY, spec="mtp"), lines)
    assert str(caught.value) == f"{message}; or leave out --spec mtp"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{BLOCK}attn.wr_du.weight"), f"{BLOCK}attn.wr_du.weight"),
        (
            lambda t: t.update({f"{BLOCK}mlp.w2_md.weight": t[f"{BLOCK}mlp.w2_md.weight"][:-1]}),
            f"{BLOCK}mlp.w2_md.weight",
        ),
    ],
)
def test_damaged_heads(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Any], object], message: str
) -> None:
    folder = write(tmp_path / "checkpoint")
    edit_tensors(folder, damage)
    with pytest.raises(CheckpointError, match="to build without the drafter: --spec none") as error:
        choose(folder, VERIFY, [])
    assert message in str(error.value)
    # A depth that is not built in may lack anything.
    assert choose(folder, dataclasses.replace(VERIFY, max_verify_tokens=2), []) is not None


def test_unknown_tensors_of_heads_are_told(tmp_path: Path) -> None:
    folder, lines = write(tmp_path / "checkpoint"), list[str]()
    edit_tensors(
        folder, lambda t: t.update({f"{BLOCK}extra": t[f"{BLOCK}mlp.global_scale"].clone()})
    )
    assert choose(folder, VERIFY, lines) is not None
    assert lines[1:] == [f"drafter: unknown tensor {BLOCK}extra is left out"]


def test_models_without_heads(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    edit_config(folder, lambda config: config.pop("mtp_config"))
    asked = dataclasses.replace(VERIFY, spec="mtp")
    with pytest.raises(ConfigError, match=r"has no MTP heads \(its config.json names none\)"):
        choose(folder, asked, [])
    write_checkpoint(tmp_path / "flint", model="flint")
    with pytest.raises(ConfigError, match="has no MTP heads"):
        choose(tmp_path / "flint", asked, [])


def test_what_cannot_be_combined(checkpoint: Path, tmp_path: Path) -> None:
    asked = dataclasses.replace(VERIFY, spec="mtp")
    with pytest.raises(ConfigError, match="MTP heads come with the model's own checkpoint"):
        prepare(Checkpoint(checkpoint), asked, draft_checkpoint=tmp_path)
    with pytest.raises(ConfigError, match=r"bundles no drafter .* name one with --draft-"):
        prepare(Checkpoint(checkpoint), dataclasses.replace(VERIFY, spec="dspark"))
    with pytest.raises(ConfigError, match=r"drafter \(mtp\) cannot be built for target sm_90a"):
        prepare(Checkpoint(checkpoint), dataclasses.replace(VERIFY, target="sm_90a"))
    folder = write(tmp_path / "dspark", drafter=TinyDrafter("deepspec"))
    with pytest.raises(ConfigError, match=r"a drafter \(dspark\) cannot be built into engines of"):
        prepare(Checkpoint(folder), VERIFY, draft_checkpoint=folder / "drafter")
