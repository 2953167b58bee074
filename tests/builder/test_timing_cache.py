"""The timing cache: its file, what a time belongs to, and tactics that are chosen by it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inkrt.builder import timing_cache
from inkrt.builder.tactics import TacticChooser
from inkrt.builder.timing_cache import (
    SHIPPED,
    KernelDigests,
    Timing,
    TimingCache,
    describe_call,
    looped_back,
    read_timing_cache,
    source_files,
)
from inkrt.errors import ConfigError
from inkrt.plugins.tactic import Int32, KernelLaunch, Packing, Pointer, Tactic, TensorArg

H200 = "NVIDIA H200"
TARGET = "sm_90a"


def timing(tactic: str, kernels: str, us: float, *, date: str = "2026-01-02") -> Timing:
    return Timing(tactic, kernels, us, 60, 1024, "abc", date)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of a kernel: a.cu -> b.cuh -> common/c.cuh, and one that nobody includes."""
    (tmp_path / "op").mkdir()
    (tmp_path / "common").mkdir()
    (tmp_path / "op" / "a.cu").write_text('#include "b.cuh"\n#include <cuda.h>\nint a;\n')
    (tmp_path / "op" / "b.cuh").write_text('// words\n  # include "common/c.cuh"\n')
    (tmp_path / "common" / "c.cuh").write_text('#include "d.cuh"\n#include "gone.cuh"\n')
    (tmp_path / "common" / "d.cuh").write_text('#include "c.cuh"\n')
    (tmp_path / "op" / "other.cuh").write_text("int other;\n")
    monkeypatch.setattr(timing_cache, "PLUGIN_FOLDER", tmp_path)
    return tmp_path


def tactic(folder: Path, name: str = "plain", *, grid: int = 4, value: int = 7) -> Tactic:
    kernel = KernelLaunch(
        folder / "op" / "a.cu", "a", (("N", 3),), (grid, 1, 1), (32, 1, 1),
        (Pointer("x"), Int32(value)),
    )  # fmt: skip
    return Tactic(name, (kernel,), 9, 0)


def test_sources_are_followed(folder: Path) -> None:
    names = [str(path.relative_to(folder)) for path in source_files(folder / "op" / "a.cu")]
    assert names == ["op/a.cu", "op/b.cuh", "common/c.cuh", "common/d.cuh"]


def test_digest_changes_with_all_that_runs(folder: Path) -> None:
    plain = tactic(folder)
    (kernel,) = plain.kernels
    digest = KernelDigests(TARGET).of_tactic(plain)
    assert len(digest) == 16
    assert KernelDigests(TARGET).of_tactic(replace(plain, name="other", bytes=1)) == digest
    packing = Packing(("x",), "layout", lambda x: x, lambda _: 1)
    others = [
        replace(plain, kernels=(kernel, kernel)),
        replace(plain, packings=(packing,)),
        tactic(folder, grid=5),
        tactic(folder, value=8),
        *(
            replace(plain, kernels=(replace(kernel, **change),))  # type: ignore[arg-type]
            for change in (
                {"entry": "b"}, {"defines": (("N", 4),)}, {"block": (64, 1, 1)}, {"cluster": 2},
                {"smem_bytes": 8}, {"pdl": False}, {"cooperative": True}, {"params": ()},
            )
        ),
    ]  # fmt: skip
    digests = [KernelDigests(TARGET).of_tactic(other) for other in others]
    digests.append(KernelDigests("sm_100a").of_tactic(plain))
    assert len({digest, *digests}) == len(others) + 2
    (folder / "op" / "other.cuh").write_text("int changed;\n")
    assert KernelDigests(TARGET).of_tactic(plain) == digest
    for name in ("op/a.cu", "op/b.cuh", "common/d.cuh"):
        before = KernelDigests(TARGET).of_tactic(plain)
        with (folder / name).open("a") as file:
            file.write("// changed\n")
        assert KernelDigests(TARGET).of_tactic(plain) != before


def test_file_is_a_line_for_every_time_in_one_order(tmp_path: Path) -> None:
    entries = [
        (H200, "linear", "x=bfloat16[1,64]", timing("b", "22", 2.5)),
        (H200, "linear", "x=bfloat16[1,64]", timing("a", "11", 3.25)),
        (H200, "embedding", "x", timing("gather", "33", 1.0)),
        ("NVIDIA B200", "linear", "x=bfloat16[1,64]", timing("a", "11", 9.0)),
    ]
    cache, backwards = TimingCache(), TimingCache()
    for entry in entries:
        cache.add(*entry)
    for entry in reversed(entries):
        backwards.add(*entry)
    raw = cache.encode()
    assert raw == backwards.encode()
    values = json.loads(raw)
    assert [
        (call["op"], [t["tactic"] for t in call["times"]]) for call in values["devices"][H200]
    ] == [
        ("embedding", ["gather"]),
        ("linear", ["a", "b"]),
    ]
    assert sum('"median_us":' in line for line in raw.decode().splitlines()) == len(entries)
    assert all(line.count('"median_us":') <= 1 for line in raw.decode().splitlines())
    path = tmp_path / "cache.json"
    path.write_bytes(raw)
    again = read_timing_cache(path)
    assert again.encode() == raw
    assert again.devices == ["NVIDIA B200", H200]
    assert again.median_us(H200, "linear", "11") == 3.25
    assert again.median_us("NVIDIA B200", "linear", "11") == 9.0
    assert again.median_us(H200, "embedding", "11") is None


def test_a_time_replaces_that_of_the_same_tactic_and_no_other() -> None:
    cache = TimingCache()
    cache.add(H200, "op", "call", timing("a", "before the sources changed", 1.0))
    cache.add(H200, "op", "call", timing("b", "22", 2.0))
    cache.add(H200, "op", "another call", timing("a", "55", 5.0))
    assert cache.median_us(H200, "op", "before the sources changed") == 1.0
    cache.add(H200, "op", "call", timing("a", "11", 4.0))
    expected = {"before the sources changed": None, "11": 4.0, "22": 2.0, "55": 5.0}
    assert {key: cache.median_us(H200, "op", key) for key in expected} == expected


def test_calls_that_run_the_same_share_the_latest_time() -> None:
    cache = TimingCache()
    for call, us, date in (("1 page", 3.0, "2026-01-02"), ("2 pages", 5.0, "2026-01-03")):
        cache.add(H200, "op", call, timing("a", "11", us, date=date))
    assert cache.median_us(H200, "op", "11") == 5.0
    cache.add(H200, "op", "3 pages", timing("a", "11", 4.0, date="2026-01-03"))
    assert cache.median_us(H200, "op", "11") == 4.0


GOOD = {
    "format": "ink-timing-cache",
    "format_version": 1,
    "devices": {H200: [{"op": "x", "call": "", "times": [
        {"tactic": "a", "kernels": "1", "median_us": 1.5, "n": 9, "context": 0, "commit": "c",
         "date": "d"},
    ]}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read timing cache FILE (No such file or directory)"),
        ("", "timing cache FILE is damaged (Input data was truncated)"),
        (json.dumps(GOOD)[:-9], "timing cache FILE is damaged (Input data was truncated)"),
        ("[1, 2]", "FILE is no timing cache (no format 'ink-timing-cache')"),
        (json.dumps({"model_type": "flint"}), "FILE is no timing cache (no format "),
        (json.dumps(GOOD | {"format_version": 2}), "FILE has version 2, this inkrt reads 1"),
        (json.dumps(GOOD | {"devices": [1]}), "FILE is damaged (Expected `object`, got `array`"),
        (json.dumps(GOOD | {"more": 1}), "FILE is damaged (Object contains unknown field `more`"),
        (json.dumps(GOOD).replace("1.5", '"1.5"'), "FILE is damaged (Expected `float`, got `str`"),
    ],
    ids=range(9),
)
def test_files_that_are_none_are_told_in_one_line(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_timing_cache(path)
    told = str(caught.value)
    assert message.replace("FILE", str(path)) in told
    assert told.endswith(f"make one with: ink-bench ops ENGINE --tune --timing-cache {path}")
    assert "\n" not in told


def test_a_good_file_and_the_packages_own_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(GOOD))
    assert read_timing_cache(path).median_us(H200, "x", "1") == 1.5
    assert read_timing_cache(SHIPPED).encode() == SHIPPED.read_bytes()


def test_the_fastest_known_tactic_is_chosen(folder: Path) -> None:
    tactics = [tactic(folder, name, grid=grid) for grid, name in enumerate("abcd", start=1)]
    digests = [KernelDigests(TARGET).of_tactic(x) for x in tactics]

    def chosen(times: dict[int, float], *, device: str = H200, op: str = "op") -> str:
        cache = TimingCache()
        for number, us in times.items():
            cache.add(device, op, "call", timing(tactics[number].name, digests[number], us))
        return TacticChooser(TARGET, cache).choose("op", tactics).name

    assert chosen({}) == "a"
    assert chosen({0: 3.0, 1: 2.0, 2: 1.0, 3: 4.0}) == "c"
    assert chosen({0: 1.0, 1: 2.0}) == "a"
    assert chosen({3: 9.0}) == "d"  # the only one that is known
    assert chosen({1: 2.0, 2: 2.0}) == "b"
    assert chosen({0: 3.0, 1: 2.0}, device="NVIDIA B200") == "a"
    assert chosen({0: 3.0, 1: 2.0}, op="another") == "a"


def test_names_that_no_tactic_has_and_changed_sources_are_not_used(folder: Path) -> None:
    tactics = [tactic(folder, name, grid=grid) for grid, name in enumerate("ab", start=1)]
    cache = TimingCache()
    cache.add(H200, "op", "call", timing("gone", "0123456789abcdef", 0.1))
    cache.add(H200, "op", "call", timing("b", KernelDigests(TARGET).of_tactic(tactics[1]), 1.0))
    assert TacticChooser(TARGET, cache).choose("op", tactics).name == "b"
    (folder / "op" / "b.cuh").write_text("// changed\n")
    assert TacticChooser(TARGET, cache).choose("op", tactics).name == "a"


def test_the_log_counts_choices_once_each(folder: Path) -> None:
    pairs = [[tactic(folder, f"{n}{name}", grid=10 * n + g) for g, name in enumerate("ab")]
             for n in range(1, 4)]  # fmt: skip
    cache = TimingCache()
    cache.add(H200, "op", "", timing("1b", KernelDigests(TARGET).of_tactic(pairs[0][1]), 1.0))
    chooser = TacticChooser(TARGET, cache)
    for _ in range(5):
        chooser.choose("op", pairs[0])
    assert chooser.summary() == "tactics: 1 choices, 1 by the timing cache"
    for candidates in (pairs[1], pairs[2], pairs[2][:1]):
        chooser.choose("op", candidates)
    assert chooser.summary() == (
        "tactics: 3 choices, 1 by the timing cache, 2 unknown to it and left at the first "
        "(asked for NVIDIA H200; it has times of: NVIDIA H200)"
    )
    assert "asked for no device; it has times of: none" in (
        (other := TacticChooser("sm_100a")).choose("op", pairs[0]) and other.summary()
    )


def test_times_of_real_ranks_come_before_those_of_a_slice(folder: Path) -> None:
    tactics = [tactic(folder, name, grid=grid) for grid, name in enumerate("abc", start=1)]
    digests = [KernelDigests(TARGET).of_tactic(one) for one in tactics]
    cache = TimingCache()
    for number, us in enumerate((3.0, 2.0, 1.0)):
        cache.add(looped_back(H200), "op", "call", timing("abc"[number], digests[number], us))
    chooser = TacticChooser(TARGET, read_again(cache, folder))
    assert chooser.choose("op", tactics).name == "c"
    assert chooser.summary() == (
        "tactics: 1 choices, 1 by the timing cache (1 by times of collectives looped back, without "
        "the way to others)"
    )
    for number, us in enumerate((3.0, 2.0, 2.5)):  # slower all, and in another order
        cache.add(H200, "op", "call", timing("abc"[number], digests[number], us))
    chooser = TacticChooser(TARGET, read_again(cache, folder))
    assert chooser.choose("op", tactics).name == "b"
    assert chooser.summary() == "tactics: 1 choices, 1 by the timing cache"


def read_again(cache: TimingCache, folder: Path) -> TimingCache:
    (folder / "times.json").write_bytes(cache.encode())
    return read_timing_cache(folder / "times.json")


def test_calls_are_described_in_a_line() -> None:
    def row(width: int) -> TensorArg:
        return TensorArg((1, width), torch.bfloat16)

    args = {"x": row(4), "eps": 1e-6, "w": [row(2)] * 3, "dtype": torch.float32, "none": None}
    assert describe_call(args) == (
        "x=bfloat16[1,4] eps=1e-06 w=3*bfloat16[1,2] dtype=float32 none=None"
    )
    one, other = (
        describe_call({"k": [row(a), row(b), row(2)], "windows": [0, 5, 0]})
        for a, b in ((2, 3), (3, 2))
    )
    assert one.startswith("k=2*bfloat16[1,2]+1*bfloat16[1,3]#")
    assert one != other
