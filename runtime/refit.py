"""Other weights for an open engine: what must stay the same, and where they come from.

A checkpoint is built with the engine's own options, by ink-build in a process of its own, so that
packing exists once and the runtime stays free of torch. What it writes must be the open engine but
for its weights; only then does the executor take them.
"""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import asdict

from inkrt.errors import BuildError, CapacityError, EngineMismatchError
from inkrt.runtime.engine_file import (
    CONFIG_NAME,
    TOKENIZER_FILES,
    EngineConfig,
    FileEntry,
    read_code,
    read_config,
    require_files,
)

# What a folder may have otherwise: the weights, and what tells who made them when.
_FREE_FIELDS = ("checkpoint_fingerprint", "files", "inkrt_version")


def is_engine(folder: Path) -> bool:
    """Whether a folder is an engine's rather than a checkpoint's, which have a config.json, too."""
    return any(folder.glob("rank*.engine"))


@contextmanager
def built(
    checkpoint: Path, engine: Path, config: EngineConfig, draft_checkpoint: Path | None
) -> Iterator[Path]:
    """Build a checkpoint as an engine was built; the folder is gone at the end.

    It stands beside the engine's, where there is room for one.

    Args:
        checkpoint: folder or GGUF file.
        engine: folder of the open engine.
        config: of the open engine.
        draft_checkpoint: as for ink-build.

    Raises:
        BuildError: ink-build refuses the checkpoint; the message is its own.
        CapacityError: there is no room for it.
    """
    try:
        staged = tempfile.TemporaryDirectory(prefix=f".{engine.name}.refit-", dir=engine.parent)
    except OSError as error:
        raise CapacityError(
            f"a refit builds beside the engine, and {engine.parent} cannot be written to: {error}"
        ) from None
    with staged as folder:
        target = Path(folder) / "engine"
        places = {"CHECKPOINT": str(checkpoint), "ENGINE": str(target)}
        if draft_checkpoint is not None:
            places["DRAFTER"] = str(draft_checkpoint)
        command = [places.get(word, word) for word in shlex.split(config.rebuild_command)[1:]]
        if "DRAFTER" in command:
            raise BuildError(
                f"engine {engine} was built with a drafter of its own checkpoint; give "
                f"draft_checkpoint"
            )
        done = subprocess.run(
            [sys.executable, "-m", "inkrt.commands.build", *command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise BuildError(
                f"{checkpoint} does not build as engine {engine} was built: "
                + lines[-1].removeprefix("error: ")
            )
        yield target


def require_alike(folder: Path, engine: Path, config: EngineConfig) -> EngineConfig:
    """Check that an engine folder differs from an open engine in its weights only.

    Args:
        folder: whose weights are wanted.
        engine: folder of the open engine.
        config: of the open engine.

    Returns:
        The configuration of `folder`.

    Raises:
        EngineMismatchError: it differs in more.
        EngineFormatError: it is damaged.
    """
    theirs = read_config(folder)
    require_files(folder, theirs)
    other = asdict(theirs)
    differing = [
        name
        for name, value in asdict(config).items()
        if name not in _FREE_FIELDS and value != other[name]
    ]
    differing += [
        name
        for name in TOKENIZER_FILES
        if _hash_of(config.files.get(name)) != _hash_of(theirs.files.get(name))
    ]
    if not differing:
        ranks = range(config.tp_size)
        is_alike = all(read_code(folder, r) == read_code(engine, r) for r in ranks)
        differing = [] if is_alike else ["plans"]
    if differing:
        raise EngineMismatchError(
            f"{folder} is another engine than {engine}, not its weights alone: "
            f"{', '.join(differing)} differ; open it as an engine of its own"
        )
    return theirs


def require_folder(folder: Path) -> None:
    """Check that a path is there at all.

    Raises:
        BuildError: it is not.
    """
    if not folder.exists():
        raise BuildError(
            f"{folder} is not there; give a checkpoint, or an engine folder with a {CONFIG_NAME}"
        )


def _hash_of(entry: FileEntry | None) -> str | None:
    return None if entry is None else entry.sha256
