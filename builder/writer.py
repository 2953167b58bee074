"""Publishing an engine folder: all of it or nothing, and not twice what is done.

Files are written and synced in a hidden folder beside the target, which is renamed at the end. A
build locks its hidden folder while it lives. One that is killed leaves it behind unlocked; the next
build of the same target goes on with it, if it would write the same, or removes it. (Process ids
would not do: containers all have the same.) A journal in the folder names its key, which stands for
all that the files depend on, and the files that are finished with their hashes.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from inkrt.errors import BuildError, CapacityError
from inkrt.runtime.engine_file import FileEntry, sha256_of

JOURNAL_NAME = "journal.json"
_UNFINISHED = ".unfinished"


class Journal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a journal.

    Attributes:
        key: what the files depend on.
        files: that are finished, by name.
    """

    key: str
    files: dict[str, FileEntry]


@dataclass(slots=True)
class Staging:
    """A hidden folder that becomes an engine folder.

    Attributes:
        key: what its files depend on.
        finished: files that need not be written again, by name.
    """

    folder: Path
    key: str
    finished: dict[str, FileEntry] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def finished_bytes(self) -> int:
        """Size of the finished files."""
        return sum(entry.size for entry in self.finished.values())

    def unfinished(self, name: str) -> Path:
        """Where to write a file until it is finished."""
        return self.folder / f"{name}{_UNFINISHED}"

    def finish(self, name: str, entry: FileEntry) -> None:
        """Note that a file is written and synced; threads may call this.

        Raises:
            OSError: writing the journal failed.
        """
        with self._lock:
            self.unfinished(name).rename(self.folder / name)
            files = self.finished | {name: entry}
            journal = self.unfinished(JOURNAL_NAME)
            write_file(journal, msgspec.json.encode(Journal(self.key, files)))
            journal.rename(self.folder / JOURNAL_NAME)
            self.finished = files

    def remove_unfinished(self) -> None:
        """Remove all that no journal names."""
        for path in self.folder.iterdir():
            if path.name not in self.finished and path.name != JOURNAL_NAME:
                path.unlink()


@contextlib.contextmanager
def staged_folder(
    target: Path,
    needed_bytes: int,
    key: str = "",
    progress: Callable[[str], None] = lambda _line: None,
) -> Iterator[Staging]:
    """A folder to write into, renamed to `target` when the block ends without an error.

    Args:
        target: must not exist.
        needed_bytes: of the engine; refuse at once if the disk has less.
        key: of what is written; a build with another key does not go on with it.
        progress: told about files that are there already.

    Raises:
        BuildError: `target` exists, its parent does not, or writing failed.
        CapacityError: the disk is full or too small.
    """
    target = check_target(target)
    staging, lock = _adopt(target, key, progress)
    if staging is None:
        staging = Staging(target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}", key)
    try:
        _require_space(target, needed_bytes, staging)
        if lock is None:
            staging.folder.mkdir()
            lock = _try_lock(staging.folder)
            if lock is None:
                progress(f"{staging.folder} cannot be locked: if this build stops, remove it")
        yield staging
        (staging.folder / JOURNAL_NAME).unlink(missing_ok=True)
        _sync(staging.folder)
        staging.folder.rename(target)
        staging.finished = {}
        _sync(target.parent)
    except OSError as error:
        raise _failure(error, target, needed_bytes, staging) from error
    except BaseException as error:
        if not isinstance(error, (KeyboardInterrupt, CapacityError)):
            staging.finished = {}
        raise
    finally:
        with contextlib.suppress(OSError):
            if staging.finished:
                staging.remove_unfinished()
        if not staging.finished:
            shutil.rmtree(staging.folder, ignore_errors=True)
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


def file_entries(staging: Staging) -> dict[str, FileEntry]:
    """Size and hash of every file in the folder but the journal."""
    return {
        path.name: staging.finished.get(path.name)
        or FileEntry(path.stat().st_size, sha256_of(path))
        for path in sorted(staging.folder.iterdir())
        if path.name != JOURNAL_NAME
    }


def _require_space(target: Path, needed_bytes: int, staging: Staging) -> None:
    free = shutil.disk_usage(target.parent).free
    missing = needed_bytes - staging.finished_bytes
    if free < missing:
        more = " more" if staging.finished else ""
        raise CapacityError(
            f"{target.parent} has {free:,} bytes free, the engine needs {missing:,}{more}; "
            f"free some space or choose another output folder"
        )


def _failure(
    error: OSError, target: Path, needed_bytes: int, staging: Staging
) -> BuildError | CapacityError:
    """What to tell about an error of writing."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = f"the disk is full: writing {target} failed" if is_full else f"writing {target} failed"
    kind = CapacityError if is_full else BuildError
    why = "" if is_full else f" ({error})"
    if not staging.finished:
        needs = f"; the engine needs {needed_bytes:,} bytes" if is_full else ""
        return kind(f"{what} and was undone{why}{needs}")
    missing = needed_bytes - staging.finished_bytes
    return kind(
        f"{what}{why}; {len(staging.finished)} finished weight files are kept, the rest needs "
        f"{missing:,} bytes: make room and run the same command to go on, or remove "
        f"{staging.folder}"
    )


def _adopt(
    target: Path, key: str, progress: Callable[[str], None]
) -> tuple[Staging | None, int | None]:
    """The folder and lock of a killed build that can be gone on with; removes all others."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.tmp-[0-9a-f]{{8}}")
    found: tuple[Staging | None, int | None] = (None, None)
    for folder in sorted(target.parent.iterdir()):
        if not pattern.fullmatch(folder.name) or (lock := _try_lock(folder)) is None:
            continue
        files = _finished_files(folder, key, progress) if found[0] is None else {}
        if files:
            found = (Staging(folder, key, files), lock)
            found[0].remove_unfinished()
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    return found


def _finished_files(
    folder: Path, key: str, progress: Callable[[str], None]
) -> dict[str, FileEntry]:
    """Files of a folder that a journal with this key names and whose hashes are right."""
    try:
        journal = msgspec.json.decode((folder / JOURNAL_NAME).read_bytes(), type=Journal)
    except (OSError, msgspec.DecodeError):
        return {}
    if journal.key != key:
        progress(f"{folder} is of another build and is removed")
        return {}

    def is_sound(name: str) -> bool:
        path, entry = folder / name, journal.files[name]
        try:
            return path.stat().st_size == entry.size and sha256_of(path) == entry.sha256
        except OSError:
            return False

    progress(f"going on with {folder}: checking {len(journal.files)} finished weight files")
    with ThreadPoolExecutor() as pool:
        sound = list(pool.map(is_sound, journal.files))
    files = dict(zip(journal.files, sound, strict=True))
    for name in (name for name, is_one in files.items() if not is_one):
        progress(f"{name} is damaged and is written again")
    return {name: journal.files[name] for name, is_one in files.items() if is_one}


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
