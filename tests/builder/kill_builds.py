"""Kills builds at moments that leave other files on the disk, and lets each go on; run as a script.

    python kill_builds.py CHECKPOINT FOLDER PREPARED COUNT

PREPARED is a pickled `Prepared`: tracing takes long and writes nothing. A moment is a line of
progress or a call that writes, syncs or renames. For COUNT moments, 0 for all, FOLDER gets a folder
with the moment's number, in which a build is a forked process that stops there and is killed, and
another one ends. Prints, as JSON, for every moment its number, its name, the names in its folder
after the kill, the inodes of weight files that were finished then, and the lines of the second.
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_model import FILE_BYTES, OPTIONS

from inkrt.builder import build, pack
from inkrt.builder.writer import JOURNAL_NAME

WATCHED = ("fsync", "pwrite", "rename")


def main() -> None:
    """Kill a build at every moment that is asked for."""
    checkpoint, folder, pickled = (Path(argument) for argument in sys.argv[1:4])
    count = int(sys.argv[4])
    prepared = pickle.loads(pickled.read_bytes())
    build.prepare = lambda *_: prepared
    pack.MAX_FILE_BYTES = FILE_BYTES
    total = count_moments(checkpoint, folder / "uninterrupted")
    step = 1 if count == 0 else max(total // count, 1)
    print(json.dumps([kill_at(number, checkpoint, folder) for number in range(0, total, step)]))  # noqa: T201


def kill_at(number: int, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Start a build, kill it at this moment, and let another one end."""
    own = folder / str(number)
    own.mkdir()

    def stand_still(moment: str) -> None:
        os.write(writing, f"{moment}\n".encode())
        time.sleep(600)

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        watch(number, stand_still)
        build.build_engine(checkpoint, own / "engine", OPTIONS, watched_line, workers=2)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        moment = pipe.readline().rstrip("\n")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    left = sorted(path.name for path in own.iterdir())
    journals = [path for name in left if (path := own / name / JOURNAL_NAME).exists()]
    finished = json.loads(journals[0].read_bytes())["files"] if journals else {}
    inodes = {name: (journals[0].parent / name).stat().st_ino for name in finished}
    lines: list[str] = []
    if not (own / "engine").exists():
        build.build_engine(checkpoint, own / "engine", OPTIONS, lines.append, workers=2)
    return {"number": number, "moment": moment, "left": left, "finished": inodes, "lines": lines}


def count_moments(checkpoint: Path, folder: Path) -> int:
    """Moments of a build that nobody kills."""
    folder.mkdir()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        watch(-1, lambda _moment: None)
        build.build_engine(checkpoint, folder / "engine", OPTIONS, watched_line, workers=2)
        os.write(writing, str(counter.count).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        total = int(pipe.read())
    os.waitpid(pid, 0)
    return total


class Counter:
    """Counts moments, of all threads, and tells one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.wanted = -1
        self.reach: Callable[[str], None] = lambda _moment: None
        self._lock = threading.Lock()

    def add(self, moment: str) -> None:
        """A moment has come."""
        with self._lock:
            number, self.count = self.count, self.count + 1
        if number == self.wanted:
            self.reach(moment)


counter = Counter()


def watch(number: int, reach: Callable[[str], None]) -> None:
    """Have `reach` called after the moment of this number, with its name."""
    counter.wanted, counter.reach = number, reach
    for name in WATCHED:
        setattr(os, name, watched(name, getattr(os, name)))


def watched_line(line: str) -> None:
    """A moment that is a line of progress."""
    counter.add(f"line {line}")


def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with a moment behind it."""

    def and_count(*arguments: Any, **named: Any) -> Any:
        result = call(*arguments, **named)
        first = arguments[0]
        path = Path(f"/proc/self/fd/{first}").readlink() if isinstance(first, int) else Path(first)
        counter.add(f"{name} {path.name}")
        return result

    return and_count


if __name__ == "__main__":
    main()
