"""How `concat` runs on a GPU: one copy of all parts."""

import math
from itertools import accumulate
from pathlib import Path

from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    Output,
    Pointer,
    Tactic,
    TensorArg,
    number_arg,
    tensor_list_arg,
)
from inkrt.plugins.vector import blocks_for, count, is_dense, launch

_MOST_PARTS = 8
_UNITS = (16, 8, 4)


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Up to eight parts of rows of a multiple of four bytes; a part may repeat one row."""
    parts, dim = tensor_list_arg(args, "parts"), int(number_arg(args, "dim"))
    item = parts[0].dtype.itemsize
    widths = [part.shape[1] * item for part in parts]
    unit = next((unit for unit in _UNITS if not any(width % unit for width in widths)), 0)
    fits = len(parts) <= _MOST_PARTS and all(is_dense(p) or _repeats_row(p) for p in parts)
    if target not in GPU_TARGETS or not unit or not fits:
        return []
    rows = parts[0].shape[0] if dim == 1 else 1
    sizes = [count(part) * item // unit // rows for part in parts]  # of a row of the result
    periods = [width // unit for width in widths]
    if dim == 0:
        periods = [
            p if _repeats_row(x) else s for p, x, s in zip(periods, parts, sizes, strict=True)
        ]
    steps = [0 if _repeats_row(part) else size for part, size in zip(parts, sizes, strict=True)]
    starts = [0, *accumulate(sizes)]

    def spell(values: list[int]) -> str:
        return ",".join(map(str, values))

    kernel = launch(
        Path(__file__).parent / "concat.cu",
        "concat",
        (
            ("PARTS", len(parts)),
            ("UNIT", unit),
            ("ROWS", rows),
            ("TOTAL", starts[-1]),
            ("STARTS", spell(starts[:-1])),
            ("STEPS", spell(steps)),
            ("PERIODS", spell(periods)),
        ),
        (
            *(Pointer("parts", index) for index in range(len(parts))),
            *[Pointer("parts")] * (_MOST_PARTS - len(parts)),
            Output(),
        ),
        blocks=blocks_for(rows * starts[-1]),
    )
    return [Tactic("copy", (kernel,), 2 * rows * starts[-1] * unit, 0)]


def _repeats_row(part: TensorArg) -> bool:
    """Whether all rows of a part are one row."""
    return part.strides is not None and part.strides == (0, 1) and math.prod(part.shape) > 0
