"""Compiling kernels with NVRTC, alone and side by side."""

import os
from pathlib import Path

import pytest

from inkrt.builder.compile import Compiler, compile_cubin
from inkrt.errors import BuildError
from inkrt.plugins.tactic import KernelLaunch

pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")


def kernel(folder: Path, number: int, text: str = "out[threadIdx.x] = N;") -> KernelLaunch:
    source = folder / "k.cu"
    source.write_text(f'extern "C" __global__ void k(int* out) {{ {text} }}\n')
    return KernelLaunch(source, "k", (("N", number),), (1, 1, 1), (32, 1, 1), ())


def test_side_by_side_gives_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    kernels = [kernel(tmp_path, number % 6) for number in range(12)]
    one, other = Compiler("sm_90a"), Compiler("sm_90a")
    one.compile_all(kernels)
    names = [other.compile(item) for item in kernels]
    assert one.cubins == other.cubins
    assert len(one.cubins) == 6
    assert [one.compile(item) for item in kernels] == names
    one.compile_all([])


def test_what_was_started_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def counted(source: Path, defines: tuple[tuple[str, int], ...], target: str) -> bytes:
        compiled.append(defines)
        return compile_cubin(source, defines, target)

    monkeypatch.setattr("inkrt.builder.compile.compile_cubin", counted)
    kernels = [kernel(tmp_path, number) for number in range(3)]
    one, other = Compiler("sm_90a"), Compiler("sm_90a")
    one.start(kernels[:2])
    one.start(kernels)
    assert one.cubins == {}, "only what a plan asks for is part of an engine"
    names = [one.compile(item) for item in (kernels[2], kernels[0])]
    one.stop()
    one.start(kernels)  # goes on
    names.append(one.compile(kernels[1]))
    assert len(compiled) == 3
    assert names == [other.compile(kernels[number]) for number in (2, 0, 1)]
    assert list(one.cubins) == names


def test_an_error_among_them_is_told(tmp_path: Path) -> None:
    good = kernel(tmp_path, 1)
    bad = KernelLaunch(tmp_path / "bad.cu", "k", (), (1, 1, 1), (32, 1, 1), ())
    bad.source.write_text("nonsense\n")
    with pytest.raises(BuildError, match=r"bad\.cu does not compile for sm_90a"):
        Compiler("sm_90a").compile_all([good, bad])
