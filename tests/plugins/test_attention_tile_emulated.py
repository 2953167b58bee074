"""Attention of steps of more than 8 tokens on the CPU, thread by thread, against float64."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from w4a16_backend import empty, run  # noqa: E402

from inkrt.plugins import kv_layout  # noqa: E402
from inkrt.plugins.attention_sm90.tactics import Call, tile_tactic  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")

FULL = Call(100, 1, 2, 128, 0, 0, 0.09)
SLIDING = replace(FULL, window=70, ring_rows=192)
SLOT, SLOTS = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def expected(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor, call: Call,
    position: int,
) -> NDArray[np.float64]:  # fmt: skip
    """Float64 attention of q [n, H, 128] over keys and values [position + n, KV, 128]."""
    q, keys, values = (x.double() for x in (q, keys, values))
    keys = keys.repeat_interleave(call.heads_per_kv, dim=1)
    values = values.repeat_interleave(call.heads_per_kv, dim=1)
    scores = torch.einsum("thd,khd->htk", q, keys) * call.scale
    distance = position + torch.arange(len(q))[:, None] - torch.arange(len(keys))
    is_seen = (distance >= 0) & ((distance < call.window) if call.window else True)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    sink = sinks.double()[:, None, None].expand(-1, len(q), 1)
    p = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("htk,khd->thd", p, values).numpy()


@pytest.mark.parametrize(
    ("call", "position", "count", "reverse"),
    [
        (FULL, 0, 9, False),
        (FULL, 0, 100, True),
        (FULL, 61, 67, False),  # over a page's end, a token block of three tokens
        (FULL, 128, 64, True),  # whole pages
        (FULL, 600, 20, False),  # more pages than twice the stages
        (FULL, 600, 20, True),
        (SLIDING, 0, 100, False),
        (SLIDING, 150, 100, True),  # through the ring's end
        (SLIDING, 1000, 37, False),
        (replace(FULL, num_kv_heads=2, heads_per_kv=3, num_tokens=16), 5, 10, False),
    ],
)
def test_rows(folder: Path, call: Call, position: int, count: int, reverse: bool) -> None:
    generator = torch.Generator().manual_seed(position + count)
    heads, kv_heads, length = call.num_heads, call.num_kv_heads, position + count

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    keys, values = normal(length, kv_heads, 128), normal(length, kv_heads, 128)
    q, sinks = 2 * normal(call.num_tokens, heads, 128), torch.linspace(-1, 3, heads)
    # Only what the rows see is there; the rest is NaN.
    oldest = max(position - call.window + 1, 0) if call.window else 0
    seen = torch.arange(oldest, length)
    if call.ring_rows:
        size, table = (SLOTS, call.ring_rows), np.array([SLOT], np.int32)
        where = (torch.full_like(seen, SLOT), seen % call.ring_rows)
    else:
        pages = -(-length // 64)
        table = np.random.default_rng(3).permutation(pages + 2)[:pages].astype(np.int32)
        size, where = (pages + 2, 64), (torch.from_numpy(table).long()[seen // 64], seen % 64)
    caches = []
    for rows in (keys, values):
        cache = torch.full((*size, kv_heads, 128), torch.nan).bfloat16()
        cache[where] = rows[seen]
        caches.append(kv_layout.pack(cache).view(torch.int16).numpy())
    q[count:] = torch.nan
    backend = Emulator(folder, reverse=reverse)
    arrays = {
        "q": q.view(torch.int16).numpy(), "sinks": sinks.numpy(), "k_cache": caches[0],
        "v_cache": caches[1], "slot": table, "page_table": table,
        "position": np.array([position], np.int32), "num_tokens": np.array([count], np.int32),
    }  # fmt: skip
    arguments = {name: backend.upload(array) for name, array in arrays.items()}
    out = empty(backend, call.num_tokens * heads * 256)
    scratch = run(backend, tile_tactic(call), arguments, [out])
    assert not backend.download(scratch["error"]).any()
    got = torch.from_numpy(backend.download(out)).view(torch.bfloat16).view(-1, heads, 128)
    assert (got[count:] == 0).all()
    want = expected(q[:count], keys, values, sinks, call, position)
    for h in range(heads):
        error = got[:count, h].double().numpy() - want[:, h]
        assert np.linalg.norm(error) <= 5e-3 * np.linalg.norm(want[:, h])
