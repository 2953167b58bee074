"""Tactics of `relative_attention`: the kernels of tactics.py with a bias, sinks and a gate."""

from dataclasses import replace

from inkrt.plugins.attention_sm90.bank import RELATIVE_STATES, Relative
from inkrt.plugins.attention_sm90.tactics import (
    HEAD_DIM,
    MAX_HEADS_PER_KV,
    Call,
    fast_tactic,
    read_call,
    simple_tactic,
    splits,
    tile_tactic,
)
from inkrt.plugins.attention_sm90.window import fits_window_kernel, window_tactics
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import GPU_TARGETS, HOPPER, CallArgs, Tactic, tensor_arg


def relative_attention_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Candidates for a `relative_attention` call, best guess first.

    Kernels with tensor cores take head dim 128, 16 relative states, sinks and a first key of 0, for
    up to eight tokens also a gate and at most eight q heads per kv head. `attention_simple.cu`
    takes the rest. All expect the step's own rows in the cache.

    Args:
        target: e.g. "sm_90a".
        args: of the call, by parameter name.

    Returns:
        An empty list where `sink_attention_tactics` gives one, and for a call without num_tokens.
    """
    call = read_relative_call(args)
    if target not in GPU_TARGETS or call is None:
        return []
    relative = call.relative
    assert relative is not None
    has_tiles = (
        call.head_dim == HEAD_DIM
        and relative.states == RELATIVE_STATES
        and relative.has_sinks
        and relative.first_key == 0
    )
    if has_tiles and call.num_tokens > MAX_VERIFY_TOKENS:
        return [tile_tactic(call)]
    is_narrow = has_tiles and relative.is_gated and call.num_tokens <= MAX_VERIFY_TOKENS
    if is_narrow and fits_window_kernel(call):
        return window_tactics(call)
    is_fast = is_narrow and target == HOPPER and call.heads_per_kv <= MAX_HEADS_PER_KV
    return (
        [fast_tactic(call, split) for split in splits(call)] if is_fast else [simple_tactic(call)]
    )


def read_relative_call(args: CallArgs) -> Call | None:
    """Shapes of a `relative_attention` call, or None where no kernel here can serve it."""
    call = read_call(args)
    if call is None or args["num_tokens"] is None:
        return None
    first_key = args.get("first_key", 0)
    assert isinstance(first_key, int)
    states, extent = tensor_arg(args, "bank").shape
    relative = Relative(
        states,
        extent,
        has_sinks=args["sinks"] is not None,
        is_gated=args.get("gate") is not None,
        first_key=first_key,
    )
    return replace(call, relative=relative)
