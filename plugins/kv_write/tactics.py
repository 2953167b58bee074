"""How `kv_write` runs on a GPU: a copy into the layout that attention reads."""

from pathlib import Path

from inkrt.plugins.kv_layout import PAGE_TOKENS, has_layout
from inkrt.plugins.short_conv.tactics import STEP
from inkrt.plugins.tactic import CallArgs, Pointer, Tactic, tensor_arg
from inkrt.plugins.vector import blocks_for, bytes_of, count, has_kernels, launch


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """bf16 heads that have a layout, in pages of 64 positions or rings of whole pages."""
    k, v, cache = (tensor_arg(args, name) for name in ("k", "v", "k_cache"))
    is_paged = args["page_table"] is not None
    _, rows, kv_heads, head = cache.shape
    is_page = rows == PAGE_TOKENS if is_paged else rows % PAGE_TOKENS == 0
    if not has_kernels(target, k, v, cache) or not has_layout(head) or not is_page:
        return []
    kernel = launch(
        Path(__file__).parent / "kv_write.cu",
        "kv_write",
        (("KV_HEADS", kv_heads), ("HEAD", head), ("KV_RING", 0 if is_paged else rows)),
        (
            *(Pointer(name) for name in ("k", "v", "k_cache", "v_cache")),
            Pointer("page_table" if is_paged else "slot"),
            *STEP,
        ),
        blocks=blocks_for(count(k) // 4),
    )
    return [Tactic("four_a_thread", (kernel,), 2 * bytes_of(args, "k", "v"), 0)]
