"""Checkpoints and engines of a three-layer tiny model, made once per worker and never changed."""

from pathlib import Path

import pytest
from small_model import OPTIONS, write_small

from inkrt.builder.build import build_engine


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
