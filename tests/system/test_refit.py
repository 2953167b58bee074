"""Other weights for an open engine: tokens of a fresh build; what is unfit changes nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import BuildError, EngineFormatError, EngineMismatchError, RequestError
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

NUM_LAYERS = 2
OPTIONS = BuildOptions(
    max_seq_len=64, max_verify_tokens=1, prefill_chunk=16, spec="none", towers="none", tp_size=2
)


def checkpoint(folder: Path, seed: int) -> Path:
    write_checkpoint(folder, seed=seed, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = NUM_LAYERS
    text["layer_types"] = text["layer_types"][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [checkpoint(folder / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def folders(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("engines")
    for source in checkpoints:
        build_engine(source, folder / source.name, OPTIONS)
    return [folder / source.name for source in checkpoints]


def logits(engine: Engine) -> NDArray[np.float32]:
    """Of a prompt of two chunks and four steps."""
    with engine.session() as session:
        rows = [session.prefill(list(range(3, 24)), Sampling()).logits]
        rows += [session.step([token], Sampling()).logits for token in (5, 6, 7, 8)]
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[NDArray[np.float32]]:
    found = []
    for folder in folders:
        with Engine.open(folder) as engine:
            found.append(logits(engine))
    assert not np.array_equal(*found)
    return found


@pytest.fixture
def engine(folders: list[Path]) -> Iterator[Engine]:
    with Engine.open(folders[0]) as opened:
        yield opened


def test_bits_are_those_of_a_fresh_build(
    engine: Engine, folders: list[Path], expected: list[NDArray[np.float32]]
) -> None:
    for place in (1, 0, 1):
        engine.refit(folders[place])
        assert np.array_equal(logits(engine), expected[place])


def test_a_checkpoint_is_built_as_the_engine_was(
    engine: Engine, checkpoints: list[Path], folders: list[Path],
    expected: list[NDArray[np.float32]],
) -> None:  # fmt: skip
    engine.refit(checkpoints[1])
    assert np.array_equal(logits(engine), expected[1])
    assert sorted(path.name for path in folders[0].parent.iterdir()) == ["1", "2"]


def test_what_is_unfit_changes_nothing(
    engine: Engine, folders: list[Path], expected: list[NDArray[np.float32]], tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match="is not there; give a checkpoint"):
        engine.refit(tmp_path / "none")
    with engine.session(), pytest.raises(RequestError, match="1 sessions are open, whose state"):
        engine.refit(folders[1])
    damaged = shutil.copytree(folders[1], tmp_path / "damaged")
    (weights,) = damaged.glob("rank1*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(EngineFormatError, match="truncated copy"):
        engine.refit(damaged)
    # The last rank's weights are read when the first one's are there.
    tensors = load_file(next(folders[1].glob("rank1*.safetensors")))
    name = sorted(tensors)[0]
    tensors[name] = tensors[name][:-1]
    save_file(tensors, weights)
    config = json.loads((damaged / "config.json").read_text())
    config["files"][weights.name]["size"] = weights.stat().st_size
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFormatError, match=rf"weight {name} of rank 1 is torch\.float32"):
        engine.refit(damaged)
    assert np.array_equal(logits(engine), expected[0])


def test_another_engine_is_refused(
    engine: Engine, checkpoints: list[Path], expected: list[NDArray[np.float32]], tmp_path: Path
) -> None:
    other = BuildOptions(**{**engine.config.build, "max_seq_len": 128})
    build_engine(checkpoints[1], tmp_path / "other", other)
    with pytest.raises(EngineMismatchError, match=r"alone: max_seq_len, .* differ;"):
        engine.refit(tmp_path / "other")
    assert np.array_equal(logits(engine), expected[0])


@pytest.mark.slow
def test_a_checkpoint_that_does_not_build_is_told_in_its_own_words(
    engine: Engine, checkpoints: list[Path], expected: list[NDArray[np.float32]], tmp_path: Path
) -> None:
    damaged = shutil.copytree(checkpoints[1], tmp_path / "damaged")
    shard = sorted(damaged.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(BuildError, match=rf"does not build as engine .* was built: .*{shard.name}"):
        engine.refit(damaged)
    assert np.array_equal(logits(engine), expected[0])
    assert [path.name for path in engine.folder.parent.iterdir() if "refit" in path.name] == []
