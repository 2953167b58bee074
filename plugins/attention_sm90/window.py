"""Tactics of `relative_attention` with a window in narrow steps: attention_window.cu.

A token and a kv head have eight blocks, whatever T is, so that a step of eight tokens is eight
steps of one beside each other. That takes the fewest phases, but a step of T tokens reads the keys
T times from the L2, and of many kv heads not all blocks run at once.
"""

from pathlib import Path

from inkrt.plugins.attention_sm90.bank import BANK_BY_DISTANCE
from inkrt.plugins.attention_sm90.tactics import HEAD_DIM, MAX_HEADS_PER_KV, Call
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import Float32, KernelLaunch, Output, Param, Scratch, Tactic
from inkrt.plugins.w4a16.shapes import MULTIPROCESSORS

BLOCKS = 8  # of a token and a kv head
_THREADS = 128
_MAX_WINDOW = 1024  # two tiles of 16 keys for each of 32 warps
_MAX_KV_HEADS = 8  # of eight tokens, 512 blocks, two of which share a multiprocessor
_SLOTS = BLOCKS * (32 + 4)  # of 16 bytes, that a block receives


def fits_window_kernel(call: Call) -> bool:
    """Whether the kernel takes the heads and the window of a call in steps of up to 8 tokens."""
    return (
        0 < call.window <= _MAX_WINDOW
        and call.head_dim == HEAD_DIM
        and call.heads_per_kv <= MAX_HEADS_PER_KV
        and call.num_kv_heads <= _MAX_KV_HEADS
        and call.num_tokens <= MAX_VERIFY_TOKENS
    )


def window_tactics(call: Call) -> list[Tactic]:
    """Ways of the blocks to exchange their results, which leave bits alone; best guess first.

    Through memory blocks wait for others that must run, so that all are to have a multiprocessor.
    """
    blocks = BLOCKS * call.num_kv_heads * call.num_tokens
    ways = (False, True) if blocks <= MULTIPROCESSORS else (False,)
    return [_tactic(call, in_memory=in_memory) for in_memory in ways]


def _tactic(call: Call, *, in_memory: bool) -> Tactic:
    assert call.relative is not None
    slots = call.num_tokens * call.num_kv_heads * BLOCKS * _SLOTS
    # Every launch leaves its slots as it finds them.
    partials: tuple[Param, ...] = (Scratch("partials", slots * 16, 0xFF),) if in_memory else ()
    kernel = KernelLaunch(
        source=Path(__file__).parent / "attention_window.cu",
        entry=call.entry("window_"),
        defines=(
            ("ATTN_TOKENS", call.num_tokens),
            ("ATTN_KV_HEADS", call.num_kv_heads),
            ("ATTN_HEADS_PER_KV", call.heads_per_kv),
            ("ATTN_WINDOW", call.window),
            ("ATTN_RING_ROWS", call.ring_rows),
            ("ATTN_EXTENT", call.relative.extent),
            ("ATTN_IN_MEMORY", int(in_memory)),
        ),
        grid=(BLOCKS, call.num_kv_heads, call.num_tokens),
        block=(_THREADS, 1, 1),
        params=(
            *call.inputs, Output(), *partials, Scratch("error", 4, 0), Float32(call.scale),
        ),
        cluster=1 if in_memory else BLOCKS,
        smem_bytes=_smem_bytes(call.window),
    )  # fmt: skip
    name = "window_in_memory" if in_memory else "window_cluster"
    return Tactic(name, (kernel,), call.bytes, call.flops, (BANK_BY_DISTANCE,))


def _smem_bytes(window: int) -> int:
    """`Shared` in attention_window.cu is the same sum, and the kernel asserts it."""
    tiles = -(-window // (16 * 4 * BLOCKS))
    keys = 16 * 4 * tiles
    return keys * 16 + 4 * 4 * 16 + _SLOTS * 16 + 16
