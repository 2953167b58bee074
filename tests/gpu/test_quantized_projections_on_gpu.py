"""The trained Inkling-2 with quantized attention projections: the GPU against the CPU."""

import numpy as np
import pytest
from both_targets import check_rows_alike
from nano_engines import nano_prompts, open_nano

from inkrt.commands.launch_parity import compare_launches

pytestmark = pytest.mark.gpu

# Products in another order. From the first router on rounding decides between experts that are as
# good as each other, more often than with plain projections: one such row of 50 is 5e-2 of all.
NEAR, TYPICAL = 2e-2, 6e-2


@pytest.fixture(scope="module", params=["mxfp8", "nvfp4"])
def engines(gpu, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("nano")
    options = {"max_batch_size": 2, "spec": "none", "projections": request.param}
    with open_nano(folder, max_seq_len=1024, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens():
    """Of the longest text."""
    return max(nano_prompts(900), key=len)


@pytest.mark.parametrize("before", [0, 63, 300])
@pytest.mark.parametrize("width", [1, 3, 8, 50])
def test_every_launch_is_near_the_cpu(engines, tokens, before, width):
    distances = compare_launches(
        engines["cpu"],
        engines["sm_90a"],
        tokens[before : before + width],
        before=tokens[:before],
    )
    assert any(d.op == "linear_group_quantized" for d in distances)
    first_moe = next(d.launch for d in distances if d.op == "moe")
    in_front = [d for d in distances if d.launch < first_moe]
    far = [d for d in in_front if d.relative_error > NEAR]
    assert not far, far
    errors = [d.relative_error for d in distances]
    assert np.median(errors) <= TYPICAL, [f"{d.op} {d.relative_error:.1e}" for d in distances]


def test_rows_do_not_depend_on_the_width(engines, tokens):
    check_rows_alike(engines["sm_90a"], tokens[:300])
