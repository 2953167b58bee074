"""How `qkv_post` runs on a GPU: a few lanes for every head of every token."""

from pathlib import Path

import torch

from inkrt.plugins.kv_layout import PAGE_TOKENS
from inkrt.plugins.short_conv.tactics import STEP, TAPS, is_wide, ring_defines, ring_write
from inkrt.plugins.tactic import (
    CallArgs,
    Float32,
    Int32,
    KernelLaunch,
    Output,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.vector import HEAD_WIDTHS, THREADS, bytes_of, has_kernels, launch

_WARPS = THREADS // 32
_REL_WIDTHS = (4, 8, *HEAD_WIDTHS)


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for bf16 heads of 16 to 128 values, four taps and pages of 64 positions."""
    rows = [tensor_arg(args, name) for name in ("q", "k", "v", "rel")]
    cache, state = tensor_arg(args, "k_cache"), tensor_arg(args, "k_conv_state")
    heads, head = tensor_arg(args, "q_scale").shape
    rel_width = tensor_arg(args, "rel_scale").shape[1]
    kv_heads, num_rows = cache.shape[2], rows[0].shape[0]
    is_dynamic = args["k_dynamic"] is not None
    scales = [tensor_arg(args, name) for name in ("q_scale", "rel_scale")]
    weights = [tensor_arg(args, name) for name in ("k_conv_weight", "v_conv_weight")]
    own = [tensor_arg(args, name) for name in ("k_dynamic", "v_dynamic")] if is_dynamic else []
    weight_dtype = torch.bfloat16 if is_dynamic else torch.float32
    fits = (
        has_kernels(target, *rows, *scales, *own, cache, state)
        and all(weight.dtype == weight_dtype for weight in weights)
        and weights[0].shape[0 if is_dynamic else 1] == TAPS
        and head in HEAD_WIDTHS
        and rel_width in _REL_WIDTHS
    )
    is_paged = args["page_table"] is not None
    # A step's rows are to stand in the cache all at once: attention reads them there.
    is_page = cache.shape[1] == PAGE_TOKENS if is_paged else (
        cache.shape[1] % PAGE_TOKENS == 0 and num_rows <= cache.shape[1]
    )  # fmt: skip
    if not fits or not is_page:
        return []
    log_n_floor = int(number_arg(args, "log_n_floor"))
    kernel = launch(
        Path(__file__).parent / "qkv_post.cu",
        "qkv_post",
        (
            ("HEADS", heads),
            ("KV_HEADS", kv_heads),
            ("HEAD", head),
            ("REL", rel_width),
            ("DYNAMIC", int(is_dynamic)),
            ("KV_RING", 0 if is_paged else cache.shape[1]),
            ("LOG_N_FLOOR", log_n_floor),
            *ring_defines(num_rows, state),
        ),
        (
            *(Pointer(name) for name in ("q", "k", "v", "rel", "q_scale", "rel_scale")),
            Pointer("k_conv_weight"),
            Pointer("v_conv_weight"),
            Pointer("k_dynamic" if is_dynamic else "k"),
            Pointer("v_dynamic" if is_dynamic else "v"),
            *(Pointer(name) for name in ("k_conv_state", "v_conv_state", "k_cache", "v_cache")),
            Pointer("page_table" if is_paged else "slot"),
            *STEP,
            *(Output(index) for index in range(4)),
            Int32(num_rows),
            *(Float32(number_arg(args, name)) for name in ("qk_threshold", "rel_threshold")),
            *(Float32(number_arg(args, name)) for name in ("log_alpha", "eps")),
        ),
        blocks=_blocks(num_rows, heads, kv_heads, head, rel_width),
    )
    kernels: list[KernelLaunch] = [kernel]
    if not is_wide(num_rows, state):
        kernels += [ring_write(name, f"{name}_conv_state", state) for name in ("k", "v")]
    read = bytes_of(args, "q", "rel", "q_scale", "rel_scale", "k_dynamic", "v_dynamic")
    read += bytes_of(args, "k_conv_weight", "v_conv_weight", "k", "v")
    written = bytes_of(args, "q", "rel") + 3 * bytes_of(args, "k", "v")
    return [Tactic("head_a_job", tuple(kernels), read + written, 0)]


def _blocks(num_rows: int, heads: int, kv_heads: int, head: int, rel_width: int) -> int:
    """Blocks for all jobs; those of a warp are of one kind."""
    jobs, rel_jobs = 128 // head, 128 // rel_width
    warps = 2 * -(-num_rows * kv_heads // jobs)
    warps += -(-num_rows * heads // jobs) + -(-num_rows * heads // rel_jobs)
    return -(-warps // _WARPS)
