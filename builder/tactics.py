"""Choosing a tactic for an operator call on a GPU target.

The candidates come from `plugins/<op>/tactics.py`, best guess first. Without a measurement the
first is taken.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.fx import Node

from inkrt.builder.rewrite import arguments, module_path
from inkrt.errors import BuildError
from inkrt.plugins.registry import Plugin
from inkrt.plugins.tactic import CallArgs, Tactic, TensorArg


def choose_tactic(node: Node, plugin: Plugin, target: str) -> Tactic:
    """The tactic for a call of `plugin`.

    Raises:
        BuildError: no kernel of ours runs this call on the target.
    """
    args = call_args(node)
    module = f"inkrt.plugins.{plugin.name}.tactics"
    candidates: list[Tactic] = []
    if find_spec(module) is not None:
        candidates = import_module(module).find_tactics(target, args)
    if not candidates:
        shapes = {name: list(arg.shape) for name, arg in args.items() if isinstance(arg, TensorArg)}
        raise BuildError(
            f"{module_path(node) or 'model'}: {plugin.qualified_name} has no kernel for {target} "
            f"with shapes {shapes}; build for another target"
        )
    return candidates[0]


def call_args(node: Node) -> CallArgs:
    """The arguments of a call as tactics see them."""

    def tensor(value: Tensor) -> TensorArg:
        return TensorArg(tuple(value.shape), value.dtype)

    args: CallArgs = {}
    for name, value in arguments(node).items():
        if isinstance(value, Node):
            args[name] = tensor(value.meta["val"])
        elif isinstance(value, list | tuple):
            args[name] = [tensor(item.meta["val"]) for item in value]
        else:
            assert value is None or isinstance(value, bool | int | float | str | torch.dtype)
            args[name] = value
    return args
