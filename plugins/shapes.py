"""Checks that operators make of their arguments' shapes and dtypes at build time.

A fake binds axis letters with `Axes` and states every other condition with `require`; both raise
BuildError naming the operator, what it got and what it expects. Nothing here looks at values.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from inkrt.errors import BuildError

MODEL_DTYPES = (torch.float32, torch.bfloat16)


def require(holds: bool, message: str) -> None:
    """Raise BuildError with `message` (operator, got, expected) unless `holds`."""
    if not holds:
        raise BuildError(f"{message}; correct the module or the configuration that makes this call")


@contextmanager
def in_name_of(op: str) -> Iterator[None]:
    """Let errors of operators that `op` consists of name `op`."""
    try:
        yield
    except BuildError as error:
        _, _, text = str(error).partition(": ")
        raise BuildError(f"ink::{op}: {text or error}") from error


class Axes:
    """The axes of one operator call: a letter has the size of its first use in all later uses.

    Example:
        axes = Axes("linear")
        axes.fit("x", x, "T", "K")
        axes.fit("weight", weight, "N", "K")
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}

    def __getitem__(self, letter: str) -> int:
        """Size of an axis that some `fit` has bound."""
        return self.sizes[letter]

    def fit(
        self,
        name: str,
        tensor: Tensor,
        *axes: str | int,
        dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    ) -> None:
        """Check the shape, and the dtype if one is given, of the argument `name`.

        Args:
            name: the parameter's name, for the message.
            tensor: its value, real or fake.
            axes: for each dimension its letter or its required size; a leading "..." stands for
                any number of dimensions.
            dtype: the allowed dtype or dtypes.

        Raises:
            BuildError: rank, a size or the dtype differs.
        """
        expected = axes
        sizes = tuple(tensor.shape)
        if axes and axes[0] == "...":
            expected = axes[1:]
            sizes = sizes[max(len(sizes) - len(expected), 0) :]
        fits = len(sizes) == len(expected)
        # The known sizes are copied so that a mismatch is reported as it stood before this call.
        known = dict(self.sizes)
        for axis, size in zip(expected, sizes, strict=False):
            required = axis if isinstance(axis, int) else known.setdefault(axis, size)
            fits = fits and bool(size == required)
        require(
            fits,
            f"ink::{self.op}: {name} has shape {list(tensor.shape)}, "
            f"expected [{', '.join(self._spell(axis) for axis in axes)}]",
        )
        self.sizes = known
        if dtype is not None:
            allowed = dtype if isinstance(dtype, tuple) else (dtype,)
            require(
                tensor.dtype in allowed,
                f"ink::{self.op}: {name} has dtype {_spell_dtype(tensor.dtype)}, "
                f"expected {' or '.join(_spell_dtype(d) for d in allowed)}",
            )

    def step(self, position: Tensor, num_tokens: Tensor | None, slot: Tensor) -> None:
        """Check the step arguments that stateful operators share: int32 [1] each, if given."""
        self.fit("position", position, 1, dtype=torch.int32)
        if num_tokens is not None:
            self.fit("num_tokens", num_tokens, 1, dtype=torch.int32)
        self.fit("slot", slot, 1, dtype=torch.int32)

    def require(self, holds: bool, message: str) -> None:
        """`require` with the operator's name before the message (got, expected)."""
        require(holds, f"ink::{self.op}: {message}")

    def _spell(self, axis: str | int) -> str:
        if isinstance(axis, str) and axis in self.sizes:
            return f"{axis}={self.sizes[axis]}"
        return str(axis)


def _spell_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
