"""PTX of the kernels of a round: what they read early, and that their sums are those of Python."""

import re

import pytest

from inkrt.builder.compile import PLUGIN_FOLDER

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")

from ptx import compile_ptx, touched_before_wait

PARAMS = {
    "choose_width": ["state", "drafts", "confidences", "num_drafts", "tokens", "num_tokens"],
    "commit_round": ["state", "drawn", "tokens", "position", "ring", "error"],
}


@pytest.fixture(scope="module")
def ptx() -> str:
    return compile_ptx(PLUGIN_FOLDER / "round/round.cu", ())


@pytest.mark.parametrize(
    ("entry", "early"),
    [("choose_width", {"state"}), ("commit_round", {"state", "tokens", "position"})],
)
def test_what_a_step_writes_is_not_touched_before_the_wait(
    ptx: str, entry: str, early: set[str]
) -> None:
    touched = touched_before_wait(ptx, entry)
    assert {PARAMS[entry][number] for number in touched} == early


def test_no_product_is_fused_with_a_sum(ptx: str) -> None:
    # The compiler may do so with plain operators; what says how it rounds stays as it is.
    operations = set(re.findall(r"\b(?:add|sub|mul|div|fma|mad)\S*\.f64", ptx))
    assert operations == {"add.rn.f64", "mul.rn.f64", "div.rn.f64"}
