"""What the w4a16 kernels are checked on: the calls of each kernel for given sizes."""

from typing import Any

from inkrt.plugins.tactic import Tactic
from inkrt.plugins.w4a16 import tactics
from inkrt.plugins.w4a16.shapes import MAX_SMEM, Dims, qkv_bytes

EPS = 1e-6
THETA = 10000.0
MOST = 8  # the widest step
HEAD_CASES: tuple[dict[str, Any], ...] = (
    {"logits": True, "greedy": True, "norm": True},
    {"logits": False, "greedy": True, "norm": False},
    {"logits": True, "greedy": False, "norm": True},
)


def qkv_cases(dims: Dims) -> list[dict[str, Any]]:
    """Paged without positions in every cluster size that fits; rings with positions."""
    heads = dims.heads + 2 * dims.kv_heads
    clusters = [
        size
        for size in (1, 2, 3, 4, 8)
        if heads * size >= MOST and qkv_bytes(dims, size) <= MAX_SMEM
    ]
    paged = {"ring": 0, "theta": None, "position": 124, "valid": MOST}
    ring = {"ring": 192, "theta": THETA}
    return [
        *({"cluster": size, **paged} for size in clusters),
        {"cluster": clusters[-1], **ring, "position": 250_000, "valid": MOST},
        {"cluster": clusters[0], **ring, "position": 60, "valid": 3},
    ]


def linear_cases(dims: Dims) -> list[dict[str, Any]]:
    """The o projection, and a last tile that is not full."""
    return [
        {"rows": dims.hidden, "width": dims.heads * 128},
        {"rows": 72, "width": dims.dense_width},
    ]


def all_tactics(dims: Dims, tokens: int) -> list[Tactic]:
    """What the checks of these sizes launch for a T."""
    return [
        tactics.embed(dims, tokens),
        *(
            tactics.qkv(
                dims,
                tokens,
                eps=EPS,
                rope_theta=case["theta"],
                ring_rows=case["ring"],
                cluster=case["cluster"],
            )
            for case in qkv_cases(dims)
        ),
        *(tactics.linear(dims, tokens, **case) for case in linear_cases(dims)),
        *(tactics.moe(dims, tokens, eps=EPS, has_delta=delta) for delta in (True, False)),
        tactics.dense_mlp(dims, tokens, eps=EPS),
        *(tactics.lm_head(dims, tokens, eps=EPS, **case) for case in HEAD_CASES),
    ]
