"""Choosing a tactic for an operator call on a GPU target.

The candidates come from `plugins/<op>/tactics.py`, best guess first. Without a measurement the
first is taken.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

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
    args = call_args(arguments(node))
    candidates = find_tactics(plugin.name, target, args)
    if not candidates:
        shapes = {name: list(arg.shape) for name, arg in args.items() if isinstance(arg, TensorArg)}
        raise BuildError(
            f"{module_path(node) or 'model'}: {plugin.qualified_name} has no kernel for {target} "
            f"with shapes {shapes}; build for another target"
        )
    return candidates[0]


def find_tactics(name: str, target: str, args: CallArgs) -> list[Tactic]:
    """The candidates for a call of the operator `ink::name`; none if it has no tactics at all."""
    module = f"inkrt.plugins.{name}.tactics"
    if find_spec(module) is None:
        return []
    candidates: list[Tactic] = import_module(module).find_tactics(target, args)
    return candidates


def call_args(values: dict[str, Any]) -> CallArgs:
    """The arguments of a call, nodes or constants by parameter name, as tactics see them."""

    def tensor(value: Tensor) -> TensorArg:
        return TensorArg(tuple(value.shape), value.dtype)

    args: CallArgs = {}
    for name, value in values.items():
        if isinstance(value, Node):
            args[name] = tensor(value.meta["val"])
        elif isinstance(value, list | tuple):
            is_numbers = all(isinstance(item, int | float) for item in value)
            args[name] = list(value) if is_numbers else [tensor(x.meta["val"]) for x in value]
        else:
            assert value is None or isinstance(value, bool | int | float | str | torch.dtype)
            args[name] = value
    return args
