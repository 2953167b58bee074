"""Publishing an engine folder: all of it or nothing.

Files are written and synced in a hidden folder beside the target, which is renamed at the end. A
build locks its hidden folder while it lives. One that is killed leaves it behind unlocked; the next
build of the same target removes it. (Process ids would not do: containers all have the same.)
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from inkrt.errors import BuildError, CapacityError
from inkrt.runtime.engine_file import FileEntry, sha256_of


@contextlib.contextmanager
def staged_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder to write into, renamed to `target` when the block ends without an error.

    Args:
        target: must not exist.
        needed_bytes: refuse at once if the disk has less.

    Raises:
        BuildError: `target` exists, its parent does not, or writing failed.
        CapacityError: the disk is full or too small.
    """
    target = check_target(target)
    _remove_abandoned(target)
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise CapacityError(
            f"{target.parent} has {free:,} bytes free, the engine needs {needed_bytes:,}; "
            f"free some space or choose another output folder"
        )
    staging = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    lock = None
    try:
        staging.mkdir()
        lock = _try_lock(staging)
        yield staging
        _sync(staging)
        staging.rename(target)
        _sync(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"the disk is full: writing {target} failed and was undone; the engine needs "
                f"{needed_bytes:,} bytes"
            ) from None
        raise BuildError(f"writing {target} failed and was undone ({error})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check_target(target: Path) -> Path:
    """The absolute path of an engine folder to make.

    Raises:
        BuildError: it exists or its parent does not.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link at target)
    if target.exists() or target.is_symlink():
        raise BuildError(f"{target} exists; remove it or choose another output folder")
    if not target.parent.is_dir():
        raise BuildError(f"{target.parent} is not a folder; create it first")
    return target


def write_file(path: Path, content: bytes) -> None:
    """Write and sync one file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file in the folder."""
    return {
        path.name: FileEntry(path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
    }


def _remove_abandoned(target: Path) -> None:
    """Remove what earlier builds of the same target left behind when they were killed."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.tmp-[0-9a-f]{{8}}")
    for folder in target.parent.iterdir():
        if pattern.fullmatch(folder.name) and (lock := _try_lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or this process ends.

    Returns:
        None if another process holds it, or cannot be asked on this file system.
    """
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
