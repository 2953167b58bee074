"""A build that is killed, or that the disk stops, goes on or starts anew, with the same bytes."""

import dataclasses
import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_model import FILE_BYTES, OPTIONS, edit_tensors, files_of

from inkrt.builder import build, pack
from inkrt.builder.build import Prepared, build_engine
from inkrt.builder.options import BuildOptions
from inkrt.builder.writer import JOURNAL_NAME
from inkrt.errors import BuildError, CapacityError, InkError
from inkrt.runtime.engine_file import check_files, read_config


@pytest.fixture
def quick(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds that do not trace again, whatever the batch size, and have some weight files."""

    def prepare_quickly(_checkpoint: object, options: BuildOptions, *_: object) -> Prepared:
        own = dataclasses.replace(prepared.options, max_batch_size=options.max_batch_size)
        return dataclasses.replace(prepared, options=own)

    monkeypatch.setattr(build, "prepare", prepare_quickly)
    monkeypatch.setattr(pack, "MAX_FILE_BYTES", FILE_BYTES)


@pytest.fixture
def whole(checkpoint: Path, quick: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that was built without interruption, by one thread."""
    folder = tmp_path_factory.mktemp("whole") / "engine"
    build_engine(checkpoint, folder, OPTIONS, workers=1)
    return folder


class Stop:
    """Makes a call fail from a point on."""

    def __init__(self, code: int, is_time: Callable[[int], bool]) -> None:
        self.code = code
        self.is_time = is_time
        self.pwrite = os.pwrite
        self.fsync = os.fsync
        self.written = 0
        self.synced = 0

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self.is_time(self.written):
            raise OSError(self.code, os.strerror(self.code))
        count = self.pwrite(descriptor, data[: max(len(data) // 2, 1)], offset)  # as a disk may
        self.written += count
        return count

    def sync(self, descriptor: int) -> None:
        self.synced += 1
        if self.is_time(self.synced):
            raise OSError(self.code, os.strerror(self.code))
        self.fsync(descriptor)


def refusal(error: type[InkError], checkpoint: Path, target: Path) -> str:
    with pytest.raises(error) as caught:
        build_engine(checkpoint, target, OPTIONS)
    message = str(caught.value)
    assert "\n" not in message
    return message


def stopped(
    checkpoint: Path, target: Path, monkeypatch: pytest.MonkeyPatch, after_bytes: int
) -> tuple[str, Path]:
    """Let the disk get full; gives the message and the folder that is left."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Stop(errno.ENOSPC, lambda done: done > after_bytes).write)
        message = refusal(CapacityError, checkpoint, target)
    (left,) = target.parent.iterdir()
    return message, left


def weight_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("count", [12, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_build_goes_on(
    checkpoint: Path, prepared: Prepared, whole: Path, tmp_path: Path, count: int
) -> None:
    (tmp_path / "prepared").write_bytes(pickle.dumps(prepared))
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = [str(path) for path in (checkpoint, folder, tmp_path / "prepared", count)]
    result = subprocess.run(
        [sys.executable, "kill_builds.py", *arguments],
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
        text=True,
    )
    moments = json.loads(result.stdout)
    expected = files_of(whole)
    num_weight_files = len(weight_files(whole))
    assert num_weight_files > 3
    num_finished = set()
    for moment in moments:
        name, engine = moment["moment"], folder / str(moment["number"]) / "engine"
        is_published = moment["left"] == ["engine"]
        assert is_published or "engine" not in moment["left"], name
        assert len(moment["left"]) <= 1, name
        assert files_of(engine) == expected, name
        assert [path.name for path in engine.parent.iterdir()] == ["engine"], name
        # What was finished is kept, not written again.
        for file, inode in moment["finished"].items():
            assert (engine / file).stat().st_ino == inode, (name, file)
        is_told = any(line.startswith("going on with ") for line in moment["lines"])
        assert is_told == bool(moment["finished"] and not is_published), name
        num_finished.add(len(moment["finished"]))
    assert files_of(folder / "uninterrupted" / "engine") == expected
    assert check_files(engine, read_config(engine), verify_hashes=True) == []
    if count == 0:
        kinds = {moment["moment"].split()[0] for moment in moments}
        assert kinds == {"line", "fsync", "pwrite", "rename"}
        assert num_finished == set(range(num_weight_files + 1))
    else:
        assert len(moments) >= count
        assert len(num_finished) > 2


@pytest.mark.parametrize("workers", [2, 5])
def test_bytes_do_not_depend_on_workers(
    checkpoint: Path, whole: Path, tmp_path: Path, workers: int
) -> None:
    build_engine(checkpoint, tmp_path / "engine", OPTIONS, workers=workers)
    assert files_of(tmp_path / "engine") == files_of(whole)


def test_a_full_disk_stops_a_build_that_then_goes_on(
    checkpoint: Path,
    whole: Path,
    prepared: Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "engine"
    message, left = stopped(checkpoint, target, monkeypatch, 2 * FILE_BYTES)
    kept = weight_files(left)
    assert 1 <= len(kept) < len(weight_files(whole))
    assert sorted(path.name for path in left.iterdir()) == sorted([*kept, JOURNAL_NAME])
    kept_bytes = sum((left / name).stat().st_size for name in kept)
    missing = prepared.weight_bytes + 64 * 2**20 - kept_bytes
    assert message == (
        f"the disk is full: writing {target} failed; {len(kept)} finished weight files are kept, "
        f"the rest needs {missing:,} bytes: make room and run the same command to go on, or remove "
        f"{left}"
    )
    lines: list[str] = []
    done: list[tuple[int, int]] = []
    build_engine(
        checkpoint, target, OPTIONS, lines.append, meter=lambda *bytes_: done.append(bytes_)
    )
    assert f"going on with {left}: checking {len(kept)} finished weight files" in lines
    assert files_of(target) == files_of(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    counts, totals = zip(*done, strict=True)
    whole_bytes = sum((whole / name).stat().st_size for name in weight_files(whole))
    assert list(counts) == sorted(counts)
    assert counts[-1] == whole_bytes
    assert set(totals) == {whole_bytes}


@pytest.mark.parametrize("number", range(1, 3))
def test_a_full_disk_leaves_nothing_where_nothing_is_finished(
    checkpoint: Path,
    tmp_path: Path,
    quick: None,
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """While the first weight file or the first journal is synced."""
    stop = Stop(errno.ENOSPC, lambda count: count >= number)
    monkeypatch.setattr(os, "fsync", stop.sync)
    target = tmp_path / "engine"
    needed = prepared.weight_bytes + 64 * 2**20
    assert refusal(CapacityError, checkpoint, target) == (
        f"the disk is full: writing {target} failed and was undone; the engine needs "
        f"{needed:,} bytes"
    )
    assert stop.synced == number
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_the_system_is_told(
    checkpoint: Path, whole: Path, tmp_path: Path, quick: None
) -> None:
    """A file system, or a user's limit, that has no room for a file of this size."""
    target = tmp_path / "engine"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES // 2, before[1]))
    try:
        message = refusal(BuildError, checkpoint, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert message == f"writing {target} failed and was undone ([Errno 27] File too large)"
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_written_again(
    checkpoint: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    _, left = stopped(checkpoint, target, monkeypatch, 3 * FILE_BYTES)
    damaged, *others = weight_files(left)
    assert others
    content = bytearray((left / damaged).read_bytes())
    content[-1] ^= 1
    (left / damaged).write_bytes(content)
    inodes = {name: (left / name).stat().st_ino for name in others}
    lines: list[str] = []
    build_engine(checkpoint, target, OPTIONS, lines.append)
    assert f"{damaged} is damaged and is written again" in lines
    assert {name: (target / name).stat().st_ino for name in others} == inodes
    assert files_of(target) == files_of(whole)


@pytest.mark.parametrize("change", ["checkpoint", "option", "journal"])
def test_another_build_starts_anew(
    checkpoint: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    target, copy = tmp_path / "out" / "engine", tmp_path / "copy"
    target.parent.mkdir()
    shutil.copytree(checkpoint, copy)
    _, left = stopped(copy, target, monkeypatch, 2 * FILE_BYTES)
    options = OPTIONS
    if change == "checkpoint":  # other weights under the same headers
        edit_tensors(copy, lambda _tensors: None)
        _, left = stopped(copy, target, monkeypatch, 2 * FILE_BYTES)
        edit_tensors(copy, lambda tensors: tensors["model.llm.norm.weight"].add_(1))
    elif change == "option":
        options = dataclasses.replace(OPTIONS, max_batch_size=2)
    else:
        (left / JOURNAL_NAME).write_bytes(b"{}")
    lines: list[str] = []
    build_engine(copy, target, options, lines.append)
    assert (f"{left} is of another build and is removed" in lines) == (change != "journal")
    assert not any(line.startswith("going on with ") for line in lines)
    assert [path.name for path in target.parent.iterdir()] == ["engine"]
    build_engine(copy, tmp_path / "fresh", options)
    assert files_of(target) == files_of(tmp_path / "fresh")


def test_an_interrupted_build_keeps_what_is_finished(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    target = tmp_path / "engine"
    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, target, OPTIONS, meter=interrupt)
    (left,) = tmp_path.iterdir()
    assert weight_files(left)
    build_engine(checkpoint, target, OPTIONS)
    assert files_of(target) == files_of(whole)
