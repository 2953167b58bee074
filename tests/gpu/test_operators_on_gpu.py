"""Every tactic of every case of every operator against the oracles, on the GPU.

    python -m pytest tests/gpu/test_operators_on_gpu.py -m gpu -n 0 [-k allreduce_conv_mix]

Cases whose shapes no kernel takes are left out.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(ROOT / "tests/plugins")]

from tactic_run import arguments_of, check_case, check_rows, tactics_of  # noqa: E402

from inkrt.errors import BuildError  # noqa: E402
from inkrt.plugins.registry import Case, Plugin, plugins  # noqa: E402

pytestmark = pytest.mark.gpu


def has_tactics(plugin: Plugin, case: Case) -> bool:
    """Whether a kernel takes the case."""
    try:
        return bool(tactics_of(plugin, arguments_of(plugin, case)))
    except BuildError:
        return False


CASES = [
    pytest.param(plugin, case, id=f"{plugin.name}/{case.name}")
    for plugin in plugins().values()
    for case in plugin.cases()
    if has_tactics(plugin, case)
]


@pytest.fixture(scope="module")
def device(gpu, tmp_path_factory):
    from w4a16_gpu import TARGET, Gpu

    if not TARGET.startswith(gpu):
        pytest.skip(f"the tactics are those of {TARGET}, this GPU is {gpu}")
    return Gpu(tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize(("plugin", "case"), CASES)
def test_tactics_are_near_the_oracle(device, plugin, case):
    assert check_case(device, plugin, case)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("allreduce_conv_mix", "three_slices_many_sources"),
        ("qkv_post", "ring_of_pages"),
        ("qkv_post", "over_a_page"),
        ("short_conv", "of fours across the ring's end"),
    ],
)
def test_rows_do_not_depend_on_the_width(device, name, case):
    plugin = plugins()[name]
    (found,) = (one for one in plugin.cases() if one.name == case)
    arguments = arguments_of(plugin, found)
    rows = int(arguments["num_tokens"])
    for number in range(len(tactics_of(plugin, arguments))):
        for widths in ([1] * rows, [3, rows - 3], [rows - 1, 1]):
            check_rows(device, plugin, arguments, number, widths)
