"""The registry of plugins: operators of ours, each described in one place.

A plugin is declared by decorating its reference with `operator`. The reference is typed, so the
schema of `ink::<name>` follows from its signature. It is plain torch, written for reading, at the
model's stated precision; everything else (kernels, other targets) is compared with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "ink"

# A verify step has at most this many tokens. A row of such a step has the same bits whatever the
# width of the step (see `plugins.narrow`).
MAX_VERIFY_TOKENS = 8

Arguments = dict[str, Any]
MakeArguments = Callable[[torch.dtype, torch.Generator], Arguments]


@dataclass(frozen=True, slots=True)
class Case:
    """One test input of a plugin.

    Attributes:
        name: says what is special about the shapes or values.
        arguments: makes the keyword arguments of the reference for a model dtype, from a seeded
            CPU generator; it must not draw from any other source of randomness.
        rtol: bound on ||out - oracle|| / ||oracle|| of every output and mutated argument, by model
            dtype; the oracle is evaluated in float64 on the same inputs.
    """

    name: str
    arguments: MakeArguments
    rtol: dict[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 1e-6, torch.bfloat16: 4e-3}
    )


@dataclass(frozen=True, slots=True)
class Collective:
    """How an operator that exchanges data between ranks is split at the exchange.

    Attributes:
        payload: maps the operator's arguments on one rank, all by keyword, to the tensor that the
            rank sends to all.
        combine: maps the payloads of all ranks, in rank order, and the operator's arguments on the
            receiving rank, by keyword, to its outputs. Every rank sees the same list, so ranks
            agree bit for bit.
    """

    payload: Callable[..., Tensor]
    combine: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Plugin:
    """All that the other packages need to know about one operator.

    Attributes:
        name: without namespace; the graph calls `ink::<name>`.
        version: raised when the meaning of the operator changes; engines record it.
        reference: eager implementation with the operator's signature; for a collective it serves a
            single rank.
        mutates: names of the arguments it writes; of a list, it writes every tensor.
        collective: the two halves of an operator that exchanges data between ranks, else None.
        cases: makes the test cases.
        plain: the reference as standard torch operators that look at no value and take any number
            of rows, for export (see `plugins.plain`).
    """

    name: str
    version: int
    reference: Callable[..., Any]
    plain: Callable[..., Any]
    mutates: tuple[str, ...]
    collective: Collective | None
    cases: Callable[[], list[Case]]

    @property
    def op(self) -> torch._ops.OpOverload:
        """The torch operator that stands in graphs."""
        packet = getattr(getattr(torch.ops, NAMESPACE), self.name)
        overload: torch._ops.OpOverload = packet.default
        return overload

    @property
    def qualified_name(self) -> str:
        """`ink::<name>`, as graphs, plans and errors spell it."""
        return f"{NAMESPACE}::{self.name}"


_PLUGINS: dict[str, Plugin] = {}


def operator(
    name: str,
    *,
    fake: Callable[..., Any],
    cases: Callable[[], list[Case]],
    mutates: Sequence[str] = (),
    collective: Collective | None = None,
    plain: Callable[..., Any] | None = None,
    version: int = 1,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated reference as the operator `ink::<name>`.

    Args:
        name: snake case, unique.
        fake: shape inference with the same signature; raises BuildError for shapes that do not fit.
        cases: makes the test cases, which the generic plugin tests run.
        mutates: names of the arguments, tensors or lists of tensors, that the operator writes.
        collective: required when the operator exchanges data between ranks.
        plain: see `Plugin.plain`; by default the reference.
        version: see `Plugin.version`.
    """

    def declare(reference: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in _PLUGINS, f"operator {name} is declared twice"
        qualified = f"{NAMESPACE}::{name}"
        custom_op = torch.library.custom_op(qualified, reference, mutates_args=tuple(mutates))
        custom_op.register_fake(fake)
        _PLUGINS[name] = Plugin(
            name, version, reference, plain or reference, tuple(mutates), collective, cases
        )
        return reference

    return declare


@cache
def plugins() -> dict[str, Plugin]:
    """Every plugin by name; imports each folder beside this file that has an `op.py`."""
    for op_file in sorted(Path(__file__).parent.glob("*/op.py")):
        import_module(f"inkrt.plugins.{op_file.parent.name}.op")
    return dict(sorted(_PLUGINS.items()))
