"""The launch of a run of layers and the attention kernel divide keys alike, as bits need it."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "cuda_on_cpu"
PLUGINS = HERE.parents[2] / "plugins"
COMPILER = shutil.which("g++")
SIZES = {"HEADS": 32, "KV_HEADS": 4, "BLOCKS": 132, "SUM_COPIES": 4}
ATTENTION = {
    "ATTN_TOKENS": 1, "ATTN_GROUP": 1, "ATTN_KV_HEADS": 4, "ATTN_HEADS_PER_KV": 8,
    "ATTN_MIN_PAGES": 1, "ATTN_STAGES": 6, "ATTN_RELATIVE": 0,
}  # fmt: skip
POSITIONS = [
    *range(0, 1400, 7), *range(500, 530), *range(8128, 8200), 8510, 8511, 8512, 8575, 8576, 8577,
    99_999, 100_000, 262_142, 262_143,
]  # fmt: skip

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.slow,
]


def owners(folder: Path, defines: dict[str, int]) -> list[list[int]]:
    """[position, page, block, warpgroup] of kv head 0, sorted."""
    assert COMPILER is not None
    program = folder / "pages"
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    includes = [f"-I{HERE}", f"-I{PLUGINS}", f"-I{PLUGINS / 'attention_sm90'}"]
    command = [COMPILER, "-std=c++20", "-O1", "-w", *macros, *includes, HERE / "pages.cpp", "-o"]
    subprocess.run([*command, program], check=True, timeout=120)
    text = "\n".join(map(str, POSITIONS))
    done = subprocess.run(
        [program], input=text, capture_output=True, text=True, check=True, timeout=60
    )
    return sorted([int(word) for word in line.split()] for line in done.stdout.splitlines())


@pytest.mark.parametrize("window", [513, 64, 1, 1024, 0])
def test_pages_have_the_owners_that_the_attention_kernel_gives_them(
    tmp_path: Path, window: int
) -> None:
    ours = owners(tmp_path, {**SIZES, "FLINT_LAYERS": 1, "WINDOW": window})
    kind = {
        "ATTN_WINDOW": window,
        "ATTN_RING_ROWS": 64 * 18 if window else 0,
        "ATTN_CLUSTER": 8 if window else 1,
        "ATTN_CLUSTERS": 1 if window else 33,
    }
    assert ours == owners(tmp_path, {**ATTENTION, **kind, "FLINT_LAYERS": 0})
    # And every page that the row sees has exactly one.
    seen = [
        (position, page)
        for position in sorted(set(POSITIONS))
        for page in range(max(position - window + 1, 0) // 64 if window else 0, position // 64 + 1)
        for _ in range(POSITIONS.count(position))
    ]
    assert [(position, page) for position, page, _, _ in ours] == seen
