"""Projections in graphs, whatever the form of their weight; see `plugins.nvfp4` for the forms."""

import operator
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Node

from inkrt.builder.rewrite import arguments, is_call


@dataclass(frozen=True, slots=True)
class Projection:
    """A call of `linear`, `linear_nvfp4` or `linear_mxfp8`.

    Attributes:
        node: the call.
        x: its input.
        weight: weight or codes.
        scales: scales or exponents; None for a plain weight.
        global_scale: of NVFP4, else None.
        partial: whether the result is left in float32.
    """

    node: Node
    x: Node
    weight: Node
    scales: Node | None
    global_scale: Node | None
    partial: bool

    @property
    def form(self) -> Literal["plain", "nvfp4", "mxfp8"]:
        """Of the weight."""
        if self.scales is None:
            return "plain"
        return "mxfp8" if self.global_scale is None else "nvfp4"

    def weight_arguments(self, name: str) -> dict[str, Node | None]:
        """The weight as a fused operator takes it under `name`."""
        prefix = "" if name == "weight" else f"{name}_"
        return {
            name: self.weight,
            f"{prefix}scales": self.scales,
            f"{prefix}global_scale": self.global_scale,
        }


def projection_of(node: Any) -> Projection | None:
    """The projection that `node` is."""
    if is_call(node, "linear"):
        args = arguments(node)
        return Projection(node, args["x"], args["weight"], None, None, args["partial"])
    if is_call(node, "linear_nvfp4"):
        args = arguments(node)
        weight = (args["codes"], args["scales"], args["global_scale"])
        return Projection(node, args["x"], *weight, args["partial"])
    if is_call(node, "linear_mxfp8"):
        args = arguments(node)
        weight = (args["codes"], args["exponents"], None)
        return Projection(node, args["x"], *weight, args["partial"])
    return None


def add_norm_of(z: Any) -> Node | None:
    """The `add_rms_norm` whose norm `z` is, if it keeps the residual stream's dtype."""
    if not isinstance(z, Node) or z.target is not operator.getitem or z.args[1] != 1:
        return None
    node = z.args[0]
    if not is_call(node, "add_rms_norm"):
        return None
    assert isinstance(node, Node)
    args = arguments(node)
    return node if args["dtype"] == args["x"].meta["val"].dtype else None


def add_norm_arguments(node: Node) -> dict[str, Any]:
    """What a fused operator takes first of an `add_rms_norm` that it starts with."""
    args = arguments(node)
    return {
        "x": args["x"],
        "delta": args["delta"],
        "norm_weight": args["weight"],
    }


def replace_outputs(call: Node, outputs: dict[int, Node]) -> None:
    """Let the readers of the outputs of `call`, by index, read these nodes instead."""
    for user in list(call.users):
        index = user.args[1] if user.target is operator.getitem else None
        if isinstance(index, int) and index in outputs:
            user.replace_all_uses_with(outputs[index])
