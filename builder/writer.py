"""Publishing an engine folder: all of it or nothing.

Files are written and synced in a hidden folder beside the target, which is renamed at the end. A
build that dies leaves that folder behind under its process id; the next build removes it.
"""

import contextlib
import errno
import os
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
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link at target)
    if target.exists() or target.is_symlink():
        raise BuildError(f"{target} exists; remove it or choose another output folder")
    if not target.parent.is_dir():
        raise BuildError(f"{target.parent} is not a folder; create it first")
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise CapacityError(
            f"{target.parent} has {free:,} bytes free, the engine needs {needed_bytes:,}; "
            f"free some space or choose another output folder"
        )
    _remove_abandoned(target)
    staging = target.parent / f".{target.name}.tmp-{os.getpid()}"
    try:
        staging.mkdir()
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
    prefix = f".{target.name}.tmp-"
    for folder in target.parent.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix)
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
