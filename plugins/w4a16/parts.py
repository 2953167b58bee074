"""What the operators' tactics share: which calls fit, names of matrices, halves of the experts.

`tactics.moe` describes the expert block as a whole; its first kernel serves `norm_router_shared`
and the others `flint_moe`, which meet at the router's logits.
"""

from dataclasses import replace

import torch

from inkrt.plugins.tactic import GPU_TARGETS, Param, Pointer, Tactic, TensorArg
from inkrt.plugins.w4a16 import tile_tactics
from inkrt.plugins.w4a16.shapes import MAX_TOKENS, Dims
from inkrt.plugins.w4a16.tactics import Names, moe


def is_supported(target: str, x: TensorArg) -> bool:
    """Whether the kernels take activations [T, K] on a target."""
    return target in GPU_TARGETS and x.dtype == torch.bfloat16


def matrix_names(
    codes: str, scales: str, scale: str, argument: str, *, is_bf16: bool
) -> dict[str, Param]:
    """Parameters of one matrix: the kernel's three names to an operator's arguments.

    A bf16 matrix has no scales; its kernel reads no global scale and gets any address.
    """
    if is_bf16:
        return {codes: Pointer(argument), scale: Pointer(argument)}
    return {
        codes: Pointer(argument),
        scales: Pointer(f"{argument}_scales"),
        scale: Pointer(f"{argument}_global_scale"),
    }


def router(dims: Dims, num_tokens: int, *, eps: float, has_delta: bool, names: Names) -> Tactic:
    """Residual add, norm, router logits and the shared expert's activation.

    Args:
        dims: sizes; top_k and width do not matter.
        num_tokens: T.
        eps: of the norm.
        has_delta: whether `delta` is added.
        names: see `moe`; residual, z, logits and shared_hidden are outputs.
    """
    if num_tokens > MAX_TOKENS:
        return tile_tactics.router(dims, num_tokens, eps=eps, has_delta=has_delta, names=names)
    whole = moe(replace(dims, width=256), num_tokens, eps=eps, has_delta=has_delta, names=names)
    rows = dims.experts + 2 * dims.shared_width
    size = rows * dims.hidden
    return Tactic(
        "w4a16_router",
        whole.kernels[:1],
        2 * dims.experts * dims.hidden
        + 2 * dims.shared_width * dims.hidden * dims.chunk_bytes // 4096,
        2 * num_tokens * size,
        whole.packings[:1],
    )


def experts(dims: Dims, num_tokens: int, *, names: Names) -> Tactic:
    """Top-k, routed experts, the shared expert's down-projection, and their sum.

    Args:
        dims: sizes.
        num_tokens: T.
        names: see `moe`; z, logits and shared_hidden are arguments, out is an output.
    """
    if num_tokens > MAX_TOKENS:
        return tile_tactics.experts(dims, num_tokens, names=names)
    whole = moe(dims, num_tokens, eps=1e-6, names=names)
    before = router(dims, num_tokens, eps=1e-6, has_delta=True, names=names)
    return Tactic(
        "w4a16_experts",
        whole.kernels[1:],
        whole.bytes - before.bytes,
        whole.flops - before.flops,
        whole.packings[1:],
    )
