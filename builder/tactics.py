"""Choosing a tactic for an operator call on a GPU target.

The candidates come from `plugins/<op>/tactics.py`, best guess first. The fastest of those that the
timing cache knows is taken; if it knows none, the first. Of launches that exchange data, times of
real ranks count, and where there are none those of a slice whose collectives were looped back.
"""

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inkrt.builder.kv_order import is_written_first
from inkrt.builder.rewrite import arguments, module_path
from inkrt.builder.timing_cache import DEVICES, KernelDigests, TimingCache, looped_back
from inkrt.errors import BuildError
from inkrt.plugins.registry import Plugin
from inkrt.plugins.tactic import CallArgs, Tactic, TensorArg, strides_of_view

# Operators whose kernels expect the step's own keys and values in the cache.
_READ_FROM_CACHE = frozenset({"relative_attention", "sink_attention"})


class TacticChooser:
    """Chooses among candidates by measured times, and remembers why.

    Args:
        target: e.g. "sm_90a".
        cache: the times; those of the target's device in `DEVICES` count.
    """

    def __init__(self, target: str, cache: TimingCache | None = None) -> None:
        self._device = DEVICES.get(target, "")
        self._cache = cache or TimingCache()
        self._digests = KernelDigests(target)
        # What was decided, by operator and kernels of the first candidate: the device whose times
        # did, "" if there were none.
        self._timed: dict[tuple[str, str], str] = {}

    def choose(self, op: str, candidates: Sequence[Tactic]) -> Tactic:
        """The fastest of the candidates with known times, else the first."""
        if len(candidates) == 1:
            return candidates[0]
        digests = [self._digests.of_tactic(tactic) for tactic in candidates]
        for device in (self._device, looped_back(self._device)):
            times = [self._cache.median_us(device, op, digest) for digest in digests]
            known = [(time, number) for number, time in enumerate(times) if time is not None]
            if known:
                self._timed[op, digests[0]] = device
                return candidates[min(known)[1]]
        self._timed[op, digests[0]] = ""
        return candidates[0]

    def summary(self) -> str:
        """A line for the log: where the choices came from, each distinct one counted once."""
        count = Counter(self._timed.values())
        unknown = count[""]
        line = (
            f"tactics: {len(self._timed)} choices, {len(self._timed) - unknown} by the timing cache"
        )
        if of_slices := count[looped_back(self._device)]:
            line += f" ({of_slices} by times of collectives looped back, without the way to others)"
        if unknown:
            has = ", ".join(self._cache.devices) or "none"
            line += (
                f", {unknown} unknown to it and left at the first "
                f"(asked for {self._device or 'no device'}; it has times of: {has})"
            )
        return line


def choose_tactic(node: Node, plugin: Plugin, target: str, chooser: TacticChooser) -> Tactic:
    """The tactic for a call of `plugin`.

    Raises:
        BuildError: no kernel of ours runs this call on the target, or it would read keys that the
            step has not written yet.
    """
    args = call_args(arguments(node))
    candidates = find_tactics(plugin.name, target, args)
    if not candidates:
        shapes = {name: list(arg.shape) for name, arg in args.items() if isinstance(arg, TensorArg)}
        raise BuildError(
            f"{module_path(node) or 'model'}: {plugin.qualified_name} has no kernel for {target} "
            f"with shapes {shapes}; build for another target"
        )
    if plugin.name in _READ_FROM_CACHE and not is_written_first(node):
        raise BuildError(
            f"{module_path(node) or 'model'}: {plugin.qualified_name} on {target} reads the step's "
            f"own keys from the cache, but they are written behind it; write the module such that "
            f"a pass fuses what makes them, or build for the cpu"
        )
    return chooser.choose(plugin.name, candidates)


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
        strides = strides_of_view(value.shape, value.stride())
        return TensorArg(tuple(value.shape), value.dtype, strides)

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
