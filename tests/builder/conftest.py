"""Checkpoints and engines of a three-layer tiny model, made once per worker and never changed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_model import OPTIONS, Refuse, write_small

from inkrt.builder import build
from inkrt.builder.build import Prepared, build_engine, prepare
from inkrt.builder.checkpoint import Checkpoint
from inkrt.errors import InkError


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As its publisher would ship it, in BF16."""
    return write_small(tmp_path_factory.mktemp("small") / "checkpoint")


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its engine with OPTIONS."""
    folder = tmp_path_factory.mktemp("small") / "engine"
    build_engine(checkpoint, folder, OPTIONS)
    return folder


@pytest.fixture(scope="session")
def prepared(checkpoint: Path) -> Prepared:
    """Its traced and lowered steps with OPTIONS."""
    return prepare(Checkpoint(checkpoint), OPTIONS)


@pytest.fixture
def refuse(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Damages a copy of the checkpoint and gives the error that it is refused with, if it is.

    The copy is `tmp_path / "copy"`. Nothing is traced: a refusal must come before, because tracing
    a large model takes a while.
    """

    class Traced(BaseException):
        pass

    def trace(*_: object) -> None:
        raise Traced

    def damage_and_prepare(damage: Callable[[Path], object]) -> InkError | None:
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkpoint, folder)
        damage(folder)
        try:
            prepare(Checkpoint(folder), OPTIONS)
        except InkError as error:
            return error
        except Traced:
            return None
        raise AssertionError("nothing was traced")

    monkeypatch.setattr(build, "tower_steps", trace)  # the first traces of a build
    return damage_and_prepare
