"""Consecutive expert layers of Flint -> flint_layers, where the target has a kernel for the run.

A layer is norm_qkv_rope + sink_attention + output projection + norm_router_shared + flint_moe, as
the fusions before leave it. One launch for many layers waits for no launch in between, and what
layers hand on need not be seen by anyone else. A layer alone, and one whose weights are not NVFP4,
stays as it is.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from inkrt.builder.projection import Projection, projection_of
from inkrt.builder.rewrite import (
    VIEW_OPS,
    are_users_after,
    arguments,
    behind_views,
    calls,
    insert_call,
    insert_getitem,
    is_call,
    is_reshape,
)
from inkrt.builder.tactics import call_args, find_tactics
from inkrt.builder.trace import StepGraph

_NAME = "flint_layers"
_STEP = ("position", "num_tokens", "slot")
_CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True, slots=True)
class _Chain:
    """The calls of one layer; each reads what the one before gives.

    Attributes:
        qkv: takes the residual stream and what is to be added to it.
        attention: of the qkv's queries, keys and values.
        out: projection of its result.
        router: behind that.
        moe: the result is to be added to the residual stream next.
        residual: the stream that the router gives.
    """

    qkv: Node
    attention: Node
    out: Projection
    router: Node
    moe: Node
    residual: Node


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer that a run may consist of.

    Attributes:
        chain: its calls.
        tensors: what it adds to the lists of tensors, by argument.
        page_table: None for a ring.
        window: of its attention.
        rope_theta: of its attention.
        common: the other arguments, which all layers of a run share, by name.
    """

    chain: _Chain
    tensors: dict[str, Node]
    page_table: Node | None
    window: int
    rope_theta: float
    common: dict[str, Any]


def fuse_flint_layers(graph: StepGraph, target: str) -> StepGraph:
    """Fuse every run of two or more layers that the target has a kernel for."""
    for run in list(_runs(graph)):
        args, last = _arguments(run), run[-1].chain
        is_read_behind = are_users_after(last.residual, last.moe)
        if is_read_behind and find_tactics(_NAME, target, call_args(args)):
            _fuse(run, args)
    return graph


def _runs(graph: StepGraph) -> Iterator[list[_Layer]]:
    """The longest runs of at least two layers, in order."""
    run: list[_Layer] = []
    for node in calls(graph.module.graph, "flint_moe"):
        chain = _chain_of(node)
        layer = _layer_of(chain) if chain is not None else None
        if layer is not None and run and _continues(run, layer):
            run.append(layer)
            continue
        if len(run) > 1:
            yield run
        run = [] if layer is None else [layer]
    if len(run) > 1:
        yield run


def _chain_of(node: Node) -> _Chain | None:
    """The calls that end in a `flint_moe`, if nothing else reads what they hand on."""
    moe = arguments(node)
    router = _source(moe["x"], "norm_router_shared", 1)
    out = projection_of(arguments(router)["delta"]) if router is not None else None
    if router is None or out is None:
        return None
    attention: Node = behind_views(out.x)
    if not is_call(attention, "sink_attention") or not is_reshape(out.x, attention):
        return None
    heads = arguments(attention)
    qkv = _source(heads["q"], "norm_qkv_rope", 1)
    residual = next((user for user in router.users if _is_output(user, router, 0)), None)
    if qkv is None or residual is None:
        return None
    is_whole = (
        _is_output(moe["logits"], router, 2)
        and _is_output(moe["shared"], router, 3)
        and _is_output(arguments(router)["x"], qkv, 0)
        and _is_output(heads["k"], qkv, 2)
        and _is_output(heads["v"], qkv, 3)
    )
    inside = (qkv, attention, out.node, router)
    is_private = all(_readers(call, residual) <= {*inside, node} for call in inside)
    chain = _Chain(qkv, attention, out, router, node, residual)
    return chain if is_whole and is_private else None


def _source(value: Any, name: str, index: int) -> Node | None:
    """The call of `name` whose output `index` is `value`."""
    if not isinstance(value, Node) or value.target is not operator.getitem:
        return None
    node = value.args[0]
    assert isinstance(node, Node)
    return node if is_call(node, name) and value.args[1] == index else None


def _is_output(value: Node, source: Node, index: int) -> bool:
    return value.target is operator.getitem and value.args == (source, index)


def _readers(node: Node, residual: Node) -> set[Node]:
    """The calls that read a node's outputs or views of them, but for `residual`."""
    readers: set[Node] = set()
    for user in node.users:
        is_looked_through = user.target is operator.getitem or user.target in VIEW_OPS
        if user is not residual:
            readers |= _readers(user, residual) if is_looked_through else {user}
    return readers


def _layer_of(chain: _Chain) -> _Layer | None:
    """The layer that a chain computes, if `flint_layers` can do so too."""
    qkv, attention, router, moe = (
        arguments(node) for node in (chain.qkv, chain.attention, chain.router, chain.moe)
    )
    tensors = {
        "input_norm": qkv["norm_weight"],
        **_matrix("qkv", qkv),
        "q_norm": qkv["q_norm"],
        "k_norm": qkv["k_norm"],
        "sinks": attention["sinks"],
        "k_cache": qkv["k_cache"],
        "v_cache": qkv["v_cache"],
        **chain.out.weight_arguments("o"),
        "mlp_norm": router["norm_weight"],
        "router": router["router"],
        **_matrix("shared_gate_up", router),
        **_matrix("gate_up", moe),
        **_matrix("down", moe),
        **_matrix("shared_down", moe),
    }
    where = (*_CACHES, *_STEP, "page_table")
    is_fit = (
        all(tensor is not None for tensor in tensors.values())
        and qkv["delta"] is not None
        and qkv["delta"].meta["val"].dtype == qkv["x"].meta["val"].dtype
        and qkv["eps"] == router["eps"]
        and (qkv["page_table"] is None) == (attention["window"] > 0)
        and all(qkv[name] is attention[name] for name in where)
        and all(set(qkv[name].users) == {chain.qkv, chain.attention} for name in _CACHES)
        and not (chain.out.partial or moe["partial"])
        and moe["rank"] is None
    )
    common = {
        **{name: qkv[name] for name in _STEP},
        "eps": qkv["eps"],
        "scale": attention["scale"],
        "top_k": moe["top_k"],
    }
    layer = _Layer(
        chain, tensors, qkv["page_table"], attention["window"], qkv["rope_theta"], common
    )
    return layer if is_fit else None


def _matrix(name: str, args: dict[str, Any]) -> dict[str, Any]:
    names = (f"{name}{suffix}" for suffix in ("", "_scales", "_global_scale"))
    return {part: args[part] for part in names}


def _continues(run: list[_Layer], layer: _Layer) -> bool:
    """Whether `layer` starts where a run ends and can share a launch with it."""
    last, qkv = run[-1], layer.chain.qkv
    tables = {other.page_table for other in (*run, layer)} - {None}
    return (
        arguments(qkv)["x"] is last.chain.residual
        and arguments(qkv)["delta"] is last.chain.moe
        and list(last.chain.residual.users) == [qkv]
        and list(last.chain.moe.users) == [qkv]
        and last.common == layer.common
        and len(tables) <= 1
        and all(_is_alike(name, x, layer.tensors[name]) for name, x in last.tensors.items())
    )


def _is_alike(name: str, one: Node, other: Node) -> bool:
    """Whether two layers' tensors may stand in one list."""
    a, b = one.meta["val"], other.meta["val"]
    first = 2 if name in _CACHES else 0  # rings and pages stand side by side
    return bool(a.shape[first:] == b.shape[first:] and a.dtype == b.dtype)


def _arguments(run: list[_Layer]) -> dict[str, Any]:
    """Arguments of the call that does what a run does."""
    qkv = arguments(run[0].chain.qkv)
    tables = (layer.page_table for layer in run if layer.page_table is not None)
    return {
        "x": qkv["x"],
        "delta": qkv["delta"],
        **{name: [layer.tensors[name] for layer in run] for name in run[0].tensors},
        "page_table": next(tables, None),
        "windows": [layer.window for layer in run],
        "rope_thetas": [layer.rope_theta for layer in run],
        **run[0].common,
    }


def _fuse(run: list[_Layer], args: dict[str, Any]) -> None:
    last = run[-1].chain
    # Whatever a layer reads is there when the last one ends.
    fused = insert_call(last.moe, _NAME, args, run[0].chain.qkv)
    last.residual.replace_all_uses_with(insert_getitem(fused, 0))
    last.moe.replace_all_uses_with(insert_getitem(fused, 1))
    # The old layers begin with operators that write state, which dead code elimination keeps.
    replaced = {layer.chain.qkv for layer in run}
    fused.graph.eliminate_dead_code(
        is_impure_node=lambda node: node not in replaced and node.is_impure()
    )
