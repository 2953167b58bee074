"""The code of rounds as engines have it."""

from pathlib import Path

import pytest
from cubin import missing_functions, resources

from inkrt.builder.compile import PLUGIN_FOLDER, compile_cubin
from inkrt.errors import BuildError
from inkrt.plugins.tactic import GPU_TARGETS

pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")

SOURCE = PLUGIN_FOLDER / "round/round.cu"


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_only_the_driver_is_missing(target: str) -> None:
    code = compile_cubin(SOURCE, (), target)
    assert missing_functions(code) == {"cudaGraphSetConditional"}
    found = resources(code)
    assert found["stack"] == 0
    assert found["registers"] <= 64
    assert compile_cubin(SOURCE, (), target) == code


def test_what_the_driver_does_not_have_is_an_error(tmp_path: Path) -> None:
    # So the compiler knows the function above as one that needs no linking.
    text = (PLUGIN_FOLDER / "round/graph.cuh").read_text()
    name = "cudaGraphSetConditional"
    assert name in text
    source = tmp_path / "other.cu"
    body = 'extern "C" __global__ void k(u64 handle) { set_conditional(handle, 1); }\n'
    source.write_text(text.replace(name, f"{name}Not") + body)
    with pytest.raises(BuildError, match=f"Unresolved extern function '{name}Not'"):
        compile_cubin(source, (), "sm_90a")
