"""The memory that a build promises is what the runtime then takes on a GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_build import CONFIG, build_small, fake_compiler

from inkrt.builder.build import GPU_PREFILL_CHUNK
from inkrt.runtime.code_check import require_code
from inkrt.runtime.engine_file import read_code
from inkrt.runtime.executor.cuda_memory import DeviceMemory
from inkrt.runtime.plan import DTYPE_BYTES

# Of the allocation that the table leaves out: inputs, the error word, padding of each region.
LITTLE = 64 * 1024


def test_the_table_is_what_the_runtime_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(monkeypatch)
    config = build_small(tmp_path, "engine")
    allocated: list[int] = []

    def allocate(size: int) -> tuple[int, int]:
        allocated.append(size)
        return 0, 1 << 40

    driver = SimpleNamespace(
        cuMemGetInfo=lambda: (0, 1 << 40, 1 << 40),
        cuMemAlloc=allocate,
        cuMemsetD8Async=lambda *_: (0,),
        cuMemcpyHtoDAsync=lambda *_: (0,),
        cuMemcpyDtoDAsync=lambda *_: (0,),
        cuStreamSynchronize=lambda *_: (0,),
    )
    code = read_code(tmp_path / "engine", 0)
    require_code(tmp_path / "engine", config, 0, code)
    memory = DeviceMemory(driver, tmp_path / "engine", config, code, 0)
    table, buffers = config.memory, config.state.buffers
    sizes = {"paged": 0, "ring": 0}
    for buffer in buffers:
        sizes[buffer.kind] += memory.region(f"state/{buffer.name}").size
    assert sizes == {"paged": table.paged_state, "ring": table.ring_state}
    assert table.weights == sum(memory.region(f"weight/{name}").size for name in code.template_of)
    assert table.arena == memory.region("arena").size
    assert table.total <= allocated[0] < table.total + LITTLE
    # What a prefill step needs is in it: rows of a whole chunk, and rings that hold one.
    chunk = max(step.num_tokens for step in config.steps)
    assert chunk == GPU_PREFILL_CHUNK
    assert table.arena > chunk * CONFIG["hidden_size"] * DTYPE_BYTES["bfloat16"]
    rings = [buffer.shape[1] for buffer in buffers if buffer.kind == "ring"]
    assert rings
    assert min(rings) >= 512 + chunk  # a row sees 512 others
