"""perf/stamps.py without a GPU: what it compiles, and what it makes of stamps."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "perf"))

import stamped_source  # noqa: E402
import stamps  # noqa: E402

from inkrt.builder.tactics import find_tactics  # noqa: E402
from inkrt.plugins.tactic import KernelLaunch, Pointer, Scratch, TensorArg  # noqa: E402
from inkrt.runtime.plan import TensorParam  # noqa: E402

ENTRY = 'extern "C" __global__ void'


def test_a_source_keeps_one_kernel_which_has_a_parameter_more() -> None:
    text = f"""{ENTRY} __launch_bounds__(WARPS * 32)
    first(const int* a, float b) {{
  if (b > f(1)) {{ *a; }}
}}
{ENTRY} other(int c) {{
  g(c);
}}
int rest;
"""
    stamped = stamped_source.stamped_source(text, "first")
    assert "first(const int* a, float b, unsigned long long* ink_stamps) { InkBlock" in stamped
    assert "if (b > f(1)) { *a; }\n}\n" in stamped
    assert stamped.endswith("int rest;\n")
    assert "other" not in stamped
    with pytest.raises(ValueError, match="no kernel third"):
        stamped_source.stamped_source(text, "third")


def test_every_kernel_can_be_stamped() -> None:
    """All sources have their kernels written such that the script finds them."""
    sources = [path for path in (ROOT / "plugins").glob("**/*.cu") if path.name != "advance.cu"]
    assert len(sources) > 40
    for path in sources:
        text, _ = stamped_source.whole_source(path)
        entries = {found[1] for found in stamped_source._KERNEL.finditer(text)}
        assert len(entries) >= 1, path
        for entry in entries:
            assert stamped_source.stamped_source(text, entry).count("InkBlock ink_block;") == 1


def test_a_stamped_kernel_compiles() -> None:
    pytest.importorskip("cuda.core", reason="NVRTC through cuda.core is not installed")
    args = {"residual": TensorArg((1, 256), torch.bfloat16), "dtype": torch.bfloat16}
    args["update"] = args["residual"]
    (tactic,) = find_tactics("residual_add", "sm_90a", args)  # type: ignore[arg-type]
    (kernel,) = tactic.kernels
    params = len(kernel.params)
    assert stamped_source.compile_stamped(kernel.source, kernel.entry, kernel.defines, params)


def test_sources_that_are_included_lose_their_kernels(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/a.cu").write_text(f'#include "../b.cu"\n#include "a.cuh"\n{ENTRY} a() {{\n}}\n')
    (tmp_path / "b.cu").write_text(f"int b;\n{ENTRY} b() {{\n}}\nint c;\n")
    text, folders = stamped_source.whole_source(tmp_path / "a/a.cu")
    assert [folder.resolve() for folder in folders] == [tmp_path / "a", tmp_path]
    stamped = stamped_source.stamped_source(text, "a")
    begin, end = '#include "stamps.cuh"\n#line 1\nint b;\n', " InkBlock ink_block;\n}\n"
    kernel = f"{ENTRY} a(, unsigned long long* ink_stamps) {{"
    assert stamped.split() == f'{begin}int c;\n#include "a.cuh"\n{kernel}{end}'.split()


def test_a_kernel_that_includes_another_compiles() -> None:
    """Stamps of `sample` would read a parameter of `next_row`."""
    pytest.importorskip("cuda.core", reason="NVRTC through cuda.core is not installed")
    sys.path.append(str(ROOT / "perf/kernels"))
    from draft_checks import calls

    (call,) = (call for call in calls("draft_head") if call.case.name == "wide, rnn, all filters")
    kernel = next(kernel for kernel in call.tactic.kernels if kernel.entry == "next_row")
    params = len(kernel.params)
    assert stamped_source.compile_stamped(kernel.source, kernel.entry, kernel.defines, params)


def test_a_variant_has_scratch_of_its_own() -> None:
    """For each launch, shared by its kernels; other things are the engine's, or there are none."""
    own, new = Scratch("error", 4, 0), Scratch("exchange", 64, 0xFF)
    source = KernelLaunch(
        source=ROOT / "a.cu", entry="a", defines=(), grid=(1, 1, 1), block=(1, 1, 1),
        params=(Pointer("x"), new, own), smem_bytes=0,
    )  # fmt: skip
    known = {Pointer("x"): TensorParam(3), own: TensorParam(4)}
    params = stamps.params_of(7, source, known, "words")
    assert params == (TensorParam(3), stamps.OwnScratch(7, new), TensorParam(4))
    assert stamps.params_of(7, source, known, "words") == params
    lacking = {own: TensorParam(4)}
    with pytest.raises(SystemExit, match=r"words needs .*'x'.* the engine's"):
        stamps.params_of(7, source, lacking, "words")


@pytest.mark.parametrize("tick", [32, 1024])
def test_figures_of_a_timeline(tick: int) -> None:
    """A chain of launches of two blocks on two multiprocessors, by fine and by coarse timers."""
    replay = []
    offsets = np.array([7_000, 900_000])
    for number in range(40):
        end = 2_000 * (number + 1)
        # Starts 500 ns before the launch before ends, waits till 600 behind that.
        ns = np.array([[-500, 600, -450, 1_900], [-300, 700, -250, 2_000]]) + end - 2_000
        rows = np.zeros((2, stamps.WORDS), np.int64)
        rows[:, : stamps.EVENTS] = (ns + 10**7) // tick * tick
        rows[:, stamps.EVENTS : 2 * stamps.EVENTS] = 2 * (ns + 10**7) + offsets[:, None]
        rows[:, -1] = [1, 2]
        replay.append(rows)
    figures = dict(
        zip(stamps.COLUMNS, np.median(stamps.figures_of(replay)[1:-1, 6:], axis=0), strict=True)
    )
    expected = {
        "early": 0.3, "spread": 0.1, "wake": 0.7, "work": 1.3, "price": 2.0, "trigger": -0.25,
        "beside": 0,
    }  # fmt: skip
    for name, us in expected.items():
        assert figures[name] == pytest.approx(us, abs=0.05), name


def test_variants_name_what_they_change() -> None:
    assert stamps.parse("a.M=1,a.smem=2,b.tactic=c") == {
        "a": {"M": "1", "smem": "2"},
        "b": {"tactic": "c"},
    }
    with pytest.raises(SystemExit, match="is no NAME"):
        stamps.parse("a=1")
