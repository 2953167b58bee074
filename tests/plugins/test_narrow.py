"""A row has the same bytes in steps of 1 to 8 rows, on one thread and on two.

Sums are tested on rows whose products cancel: what is left is the rounding noise of the order of
additions, which bfloat16 would hide behind any other sum.
"""

from collections.abc import Callable, Iterator

import pytest
import test_flint_row_invariance as flint
import test_fused_row_invariance as fused
import test_row_invariance as plain
import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import elementwise, linear_rows, row_by_row
from inkrt.plugins.registry import MAX_VERIFY_TOKENS, Arguments, plugins

ROWS = MAX_VERIFY_TOKENS
SIZES = (1, 7, 31, 33, 64, 256, 1000, 4096)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def _assert_rows_alike(function: Callable[..., Tensor], *rows: Tensor) -> None:
    """Every window of rows gives what its rows give alone."""
    alone = torch.cat([function(*(x[i : i + 1].clone() for x in rows)) for i in range(ROWS)])
    for width in range(1, ROWS + 1):
        for begin in {0, ROWS - width}:
            window = slice(begin, begin + width)
            assert _same_bytes(function(*(x[window] for x in rows)), alone[window]), (width, begin)


def _cancelling(
    dtype: torch.dtype, g: torch.Generator, a: tuple[int, ...], b: tuple[int, ...], size: int
) -> tuple[Tensor, Tensor]:
    """[*a, size] and [*b, size] of which every row of one is almost orthogonal to the other's."""
    order = torch.randperm(size, generator=g)
    both = []
    for shape, sign in ((a, 1), (b, -1)):
        half = normal(g, dtype, *shape, size // 2)
        rest = normal(g, dtype, *shape, size % 2, scale=1e-6)
        both.append(torch.cat([half, sign * half, rest], dim=-1)[..., order].contiguous())
    return both[0], both[1]


def test_cancelling_rows_show_the_order_of_additions():
    x, weight = _cancelling(torch.float32, torch.Generator().manual_seed(1), (8,), (9,), 1000)
    backwards = x.flip(-1) @ weight.flip(-1).T
    assert (backwards != x @ weight.T).float().mean() > 0.5
    assert backwards.abs().max() < 1e-3


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_linear(size: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(size)
    for num_outputs in (1, 7, 33, 64, 257):
        x, weight = _cancelling(dtype, g, (ROWS,), (num_outputs,), size)
        _assert_rows_alike(lambda rows, weight=weight: linear_rows(rows, weight), x)
    # As the bias of attention: several rows per token, a weight that is not contiguous.
    x, weight = _cancelling(dtype, g, (ROWS, 6), (33,), size)
    weight = weight.T.contiguous().T
    _assert_rows_alike(lambda rows: linear_rows(rows, weight), x)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_batched_products(size: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(size)
    for num_heads, num_outputs in ((1, 33), (3, 64)):
        p, v = _cancelling(dtype, g, (ROWS, num_heads, 1), (ROWS, num_heads, num_outputs), size)
        _assert_rows_alike(lambda p, v: row_by_row(torch.matmul, p, v.transpose(2, 3)), p, v)


@pytest.mark.parametrize("size", [*SIZES, 32768 + 64])
def test_elements(size: int):
    x = normal(torch.Generator().manual_seed(size), torch.float32, ROWS, size, scale=3.0)
    for function in (torch.sigmoid, torch.tanh, torch.exp, torch.exp2, torch.cos, torch.sin):
        _assert_rows_alike(lambda rows, function=function: elementwise(function, rows), x)
    _assert_rows_alike(lambda rows: elementwise(torch.log, rows), x.abs() + 1)


@pytest.mark.parametrize("size", [*SIZES, 32768 - 1])
def test_what_torch_guarantees_for_rows(size: int):
    """The two assumptions that the module docstring of `plugins.narrow` states."""
    x = normal(torch.Generator().manual_seed(size), torch.float32, ROWS, 3, size)
    _assert_rows_alike(lambda rows: rows.square().mean(-1), x)
    _assert_rows_alike(lambda rows: rows.sum(-1), x)
    _assert_rows_alike(lambda rows: torch.linalg.vector_norm(rows, dim=-1), x)
    _assert_rows_alike(lambda rows: torch.softmax(rows, dim=-1), x)
    _assert_rows_alike(lambda rows: torch.rsqrt(rows.square() + 1e-6), x)
    _assert_rows_alike(lambda rows: 3 / rows.square().sqrt(), x)


def _experts(dtype: torch.dtype, g: torch.Generator) -> fused.Setup:
    """Sizes at which all rows are evaluated at once, and products that cancel."""
    x, gate_up = _cancelling(dtype, g, (ROWS,), (5, 2 * 64), 256)
    fixed: Arguments = {
        "gate_up": gate_up * 2**20,
        "down": normal(g, dtype, 5, 256, 64, scale=0.1),
        "rank": None,
        "gate_softcap": 4.0,
        "up_softcap": 25.0,
        "router_weight": normal(g, torch.float32, 5, 256),
        "router_bias": normal(g, torch.float32, 5, scale=0.1),
        "top_k": 3,
        "route_scale": 8.0,
        "partial": False,
        **dict.fromkeys(
            f"{w}_{x}" for w in ("gate_up", "down") for x in ("scales", "global_scale")
        ),
    }
    return fixed, {"x": x}, (0,)


def _setups(dtype: torch.dtype) -> Iterator[tuple[str, fused.Setup]]:
    for name, make in fused.SETUPS.items():
        yield name, make(dtype, torch.Generator().manual_seed(51))
    for name, make_flint in flint.SETUPS.items():
        draw = flint._Draw(dtype, torch.Generator().manual_seed(52), quantized=False)
        yield name, make_flint(draw)
    yield "moe/whole vectors", _experts(dtype, torch.Generator().manual_seed(53))


@DTYPES
def test_fused_operators(dtype: torch.dtype):
    for name, setup in _setups(dtype):
        alone = fused._run(name, setup, [1] * ROWS)
        for width in range(2, ROWS + 1):
            splits = [width] * (ROWS // width) + [ROWS % width] * (ROWS % width > 0)
            for got, expected in zip(fused._run(name, setup, splits), alone, strict=True):
                assert all(map(_same_bytes, got, expected)), (name, width)


@DTYPES
@pytest.mark.parametrize("width", range(1, ROWS + 1))
def test_plain_operators(width: int, dtype: torch.dtype):
    for name in plain.STEPS:
        plain.test_step_equals_single_rows(name, width, dtype)


@DTYPES
@pytest.mark.parametrize("width", range(1, ROWS + 1))
def test_attention(width: int, dtype: torch.dtype):
    # Around the edges of a window and of the blocks of keys that rows share.
    for position, window in ((0, 6), (3, 6), (29, 33), (60, 0), (130, 0), (61, 64), (90, 128)):
        g = torch.Generator().manual_seed(position)
        arguments = plain._attention(width, dtype, g, position, window, page_tokens=25)
        alone = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        attention = plugins()["relative_attention"]
        together = attention.op(**arguments)
        for i in range(width):
            step = plain._row(alone, plain.ATTENTION_ROWS, i)
            assert _same_bytes(together[i : i + 1], attention.op(**step)), (position, window, i)
            plain._write(step)
