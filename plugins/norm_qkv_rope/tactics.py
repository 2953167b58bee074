"""How `norm_qkv_rope` runs on a GPU: the w4a16 qkv kernel."""

from inkrt.plugins.tactic import (
    CallArgs,
    Output,
    Pointer,
    Scratch,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.w4a16.parts import is_supported, matrix_names
from inkrt.plugins.w4a16.shapes import HEAD, Dims
from inkrt.plugins.w4a16.tactics import qkv, qkv_blocks


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for heads of 128 values; keys and values go to the cache, not to the outputs."""
    x, cache = tensor_arg(args, "x"), tensor_arg(args, "k_cache")
    head_dim = tensor_arg(args, "q_norm").shape[0]
    if not is_supported(target, x) or head_dim != HEAD:
        return []
    num_tokens, hidden = x.shape
    *_, kv_heads, _ = cache.shape
    is_bf16 = args["qkv_scales"] is None
    packed_rows = tensor_arg(args, "qkv").shape[0]
    dims = Dims(
        hidden=hidden,
        heads=packed_rows // HEAD - 2 * kv_heads,
        kv_heads=kv_heads,
        bf16=is_bf16,
    )
    theta = number_arg(args, "rope_theta")
    is_paged = args["page_table"] is not None
    has_delta = args["delta"] is not None
    names = {
        **matrix_names("codes", "scales", "global_scale", "qkv", is_bf16=is_bf16),
        "delta": Pointer("delta" if has_delta else "x"),
        "where": Pointer("page_table" if is_paged else "slot"),
        "q": Output(1),
        "residual": Output(0),
        "error": Scratch("error", 4, fill=0),
    }
    return [
        qkv(
            dims,
            num_tokens,
            eps=number_arg(args, "eps"),
            rope_theta=theta if theta > 0 else None,
            ring_rows=0 if is_paged else cache.shape[1],
            has_delta=has_delta,
            blocks=blocks,
            names=names,
        )
        for blocks in qkv_blocks(dims, num_tokens)
    ]
