"""What the w4a16 kernels are checked on: the calls of each kernel for given sizes."""

from typing import Any

from inkrt.plugins.tactic import Tactic
from inkrt.plugins.w4a16 import tactics
from inkrt.plugins.w4a16.shapes import MAX_SMEM, Dims, qkv_bytes, qkv_tiles

EPS = 1e-6
THETA = 10000.0
MOST = 8  # the widest step
HEAD_CASES: tuple[dict[str, Any], ...] = (
    {"logits": True, "greedy": True, "norm": True},
    {"logits": False, "greedy": True, "norm": False},
    {"logits": True, "greedy": False, "norm": True},
)
MOE_CASES: tuple[dict[str, Any], ...] = (
    {"has_delta": True},
    {"has_delta": False},
)


def qkv_cases(dims: Dims) -> list[dict[str, Any]]:
    """Paged without positions for several numbers of blocks; rings with positions."""
    heads = dims.heads + 2 * dims.kv_heads
    numbers: list[int | None] = [None]
    for number in (max(heads, MOST), 4 * heads, 132):
        staged = 0 if dims.bf16 else qkv_tiles(dims, number)
        if number <= min(132, 8 * heads) and qkv_bytes(dims, number, MOST, staged) <= MAX_SMEM:
            numbers.append(number)
    paged = {"ring": 0, "theta": None, "position": 124, "valid": MOST}
    ring = {"ring": 192, "theta": THETA}
    return [
        *({"blocks": number, **paged} for number in numbers),
        {"blocks": numbers[-1], **ring, "position": 250_000, "valid": MOST},
        {"blocks": None, **ring, "position": 60, "valid": 3},
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
                blocks=blocks,
            )
            for case in qkv_cases(dims)
            for blocks in (case["blocks"], *tactics.qkv_blocks(dims, tokens))
        ),
        *(tactics.linear(dims, tokens, **case) for case in linear_cases(dims)),
        *(tactics.moe(dims, tokens, eps=EPS, **case) for case in MOE_CASES),
        tactics.dense_mlp(dims, tokens, eps=EPS),
        *(
            tactics.lm_head(dims, tokens, eps=EPS, depth=depth, **case)
            for case in HEAD_CASES
            for depth in tactics.head_depths(dims)
        ),
    ]
