"""What the checks of kernels share: inputs made at random, comparisons, and their report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from w4a16_backend import Backend, Buffer
from w4a16_oracle import Bits, Floats, Matrix, random_matrix, to_bits

from inkrt.errors import InkError
from inkrt.plugins.w4a16.shapes import Dims

Report = Callable[[str, bool, str], None]
SLOTS, SLOT = 2, 1


def relative_error(got: Floats, expected: Floats) -> float:
    """||got - expected|| / ||expected||; infinite if a value is not finite or all are zero."""
    if not np.isfinite(got).all() or not expected.any():
        return float("inf")
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@dataclass(slots=True)
class KernelChecks:
    """Runs checks.

    Attributes:
        backend: where kernels run.
        dims: sizes.
        report: takes name, whether it passed, and a detail.
        widths: values of T, the largest (8) last.
        seed: of the inputs.
    """

    backend: Backend
    dims: Dims
    report: Report
    widths: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8)
    seed: int = 1

    def _try(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except (RuntimeError, InkError) as error:
            self.report(name, False, str(error))

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _matrix(self, *shape: int, order: str = "plain") -> Matrix:
        return random_matrix(self._generator(), *shape, order=order, bf16=self.dims.bf16)

    def _bits(self, *shape: int, mean: float = 0.0, scale: float = 1.0, salt: int = 0) -> Bits:
        generator = torch.Generator().manual_seed(self.seed * 1000 + salt)
        values = mean + scale * torch.randn(*shape, generator=generator)
        return to_bits(values.double().numpy())

    def _upload(self, **arrays: NDArray[np.generic] | Matrix) -> dict[str, Buffer]:
        """Buffers by argument name; a matrix `w` gives `w_codes` and `w_scale`."""
        buffers = {}
        for name, value in arrays.items():
            if isinstance(value, Matrix):
                head = "" if name == "w" else f"{name}_"
                buffers[f"{head}codes"] = self.backend.upload(value.packed())
                unit = "global_scale" if name == "w" else f"{name}_scale"
                # NaN where no kernel may look.
                has_unit = value.scales is not None
                read = value.unit if has_unit else np.full_like(value.unit, np.nan)
                buffers[unit] = self.backend.upload(read)
            else:
                buffers[name] = self.backend.upload(value)
        return buffers

    def _close(self, name: str, got: Floats, expected: Floats, limit: float) -> None:
        error = relative_error(got, expected)
        self.report(name, error <= limit, f"relative error {error:.2e}, limit {limit:.0e}")

    def _equal(self, name: str, got: NDArray[np.generic], expected: NDArray[np.generic]) -> None:
        wrong = int((got != expected).sum())
        self.report(name, wrong == 0, f"{wrong} of {expected.size} differ")


def cache_rows(
    cache: Bits, kv_heads: int, where: NDArray[np.int32], positions: NDArray[np.int64], ring: int
) -> tuple[Bits, Bits]:
    """The rows [count, kv heads, 128] of some positions, and everything else."""
    view = cache.reshape(-1, kv_heads, 2, 64, 8, 8)
    used = np.zeros(view.shape, bool)
    rows = np.empty((len(positions), kv_heads, 128), np.uint16)
    for i, position in enumerate(positions):
        row = int(position) % 64
        if ring:
            page = int(where[0]) * (ring // 64) + int(position) % ring // 64
        else:
            page = int(where[int(position) // 64])
        for half in range(2):
            for piece in range(8):
                at = (page, slice(None), half, row, piece ^ (row & 7))
                rows[i, :, half * 64 + piece * 8 : half * 64 + piece * 8 + 8] = view[at]
                used[at] = True
    return rows, view[~used]
