"""Kills a build at every moment that leaves other files on the disk; run as a script.

    python kill_builds.py CHECKPOINT ENGINE PREPARED

PREPARED is a pickled `Prepared`: tracing takes long and writes nothing. A moment is a line of
progress or a call of fsync. Every build is a forked process that stops at its moment and is killed
there. Prints, as JSON, for every moment its name and what was in the engine's parent folder
afterwards.
"""

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

from small_model import OPTIONS

from inkrt.builder import build


def main() -> None:
    """Kill builds, each a moment later, until one has published its folder."""
    checkpoint, engine, pickled = (Path(argument) for argument in sys.argv[1:])
    prepared = pickle.loads(pickled.read_bytes())
    build.prepare = lambda *_: prepared
    moments: list[tuple[str, list[str]]] = []
    while not engine.exists():
        moment = kill_at(len(moments), checkpoint, engine)
        moments.append((moment, sorted(path.name for path in engine.parent.iterdir())))
    sys.stdout.write(json.dumps(moments))


def kill_at(number: int, checkpoint: Path, engine: Path) -> str:
    """Start a build and kill it at this moment; gives its name."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        build_until(number, checkpoint, engine, writing)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        moment = pipe.readline().rstrip("\n")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return moment


def build_until(number: int, checkpoint: Path, engine: Path, writing: int) -> None:
    """Build, and stand still at this moment after telling its name."""
    count = 0
    fsync = os.fsync

    def reach(moment: str) -> None:
        nonlocal count
        if count == number:
            os.write(writing, f"{moment}\n".encode())
            time.sleep(600)
        count += 1

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        reach(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")

    os.fsync = watched_fsync  # type: ignore[assignment]
    build.build_engine(checkpoint, engine, OPTIONS, reach)


if __name__ == "__main__":
    main()
