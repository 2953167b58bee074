"""As test_before_wait.py, of the kernels of a round: what they read early no plan writes."""

import pytest

from inkrt.builder.compile import PLUGIN_FOLDER

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")

from ptx import compile_ptx, touched_before_wait


@pytest.mark.parametrize(
    ("entry", "early"),
    [
        ("choose_width", {"state"}),
        ("commit_round", {"state", "tokens", "position"}),
    ],
)
def test_results_of_a_step_are_not_touched_before_the_wait(entry: str, early: set[str]) -> None:
    params = {
        "choose_width": ["state", "drafts", "confidences", "num_drafts", "tokens", "num_tokens"],
        "commit_round": ["state", "drawn", "tokens", "position", "ring", "error"],
    }[entry]
    ptx = compile_ptx(PLUGIN_FOLDER / "round/round.cu", ())
    assert {params[number] for number in touched_before_wait(ptx, entry)} == early
