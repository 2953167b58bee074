"""When a step may write its keys and values before its attention runs.

Definitions write behind the attention, which is right for any step. Fused operators write in front
of it. This is legal where nothing but the attention and the write touches the caches, and where the
step's own positions share no row with a position that its queries look back to.
"""

from typing import Any

from torch.fx import Node

from inkrt.builder.rewrite import arguments, is_call, shape_of


def may_write_first(attention: dict[str, Any]) -> bool:
    """Whether the rows that a step writes are out of its own queries' sight.

    Args:
        attention: arguments of an attention operator with a window, by name.
    """
    if attention["page_table"] is not None:
        return True  # pages hold every position
    num_tokens, ring = shape_of(attention["q"])[0], shape_of(attention["k_cache"])[1]
    return bool(num_tokens + attention["window"] - 1 <= ring)


def write_of(node: Node) -> Node | None:
    """The write of an attention's keys and values, if nothing else touches their caches."""
    attention = arguments(node)
    writes = [user for user in attention["k_cache"].users if user is not node]
    if len(writes) != 1 or not is_call(writes[0], "kv_write") or not node < writes[0]:
        return None
    (write,) = writes
    is_same = all(value is attention[name] for name, value in arguments(write).items())
    return write if is_same and set(attention["v_cache"].users) == {node, write} else None


def is_written_first(attention: Node) -> bool:
    """Whether no write of keys and values to its caches stands behind an attention."""
    args = arguments(attention)
    users = {*args["k_cache"].users, *args["v_cache"].users}
    return not any(is_call(user, "kv_write") and attention < user for user in users)
