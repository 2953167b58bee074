"""How `short_conv` runs on a GPU, and what kernels share that convolve on their way."""

from pathlib import Path

import torch

from inkrt.plugins.tactic import (
    CallArgs,
    Int32,
    KernelLaunch,
    Output,
    Pointer,
    Tactic,
    TensorArg,
    tensor_arg,
)
from inkrt.plugins.vector import blocks_for, bytes_of, count, has_kernels, launch

_FOLDER = Path(__file__).parent
TAPS = 4
STEP = (Pointer("position"), Pointer("num_tokens"), Pointer("slot"))


def ring_defines(num_rows: int, state: TensorArg) -> list[tuple[str, int | str]]:
    """Macros of short_conv.cuh for steps of `num_rows` rows."""
    return [("RING", state.shape[1]), ("RING_IS_WIDE", int(is_wide(num_rows, state)))]


def is_wide(num_rows: int, state: TensorArg) -> bool:
    """Whether the ring has room for a step and the inputs before it, see short_conv.cuh."""
    return num_rows + TAPS - 1 <= state.shape[1]


def ring_write(x: str, ring: str, state: TensorArg) -> KernelLaunch:
    """Stores the last rows of x, both names of arguments, behind a kernel that did not."""
    _, ring_rows, channels = state.shape
    return launch(
        _FOLDER / "ring_write.cu",
        "ring_write",
        (("CHANNELS", channels), ("RING", ring_rows)),
        (Pointer(x), Pointer(ring), *STEP),
        blocks=blocks_for(ring_rows * channels // 4),
    )


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Four channels a thread, for four taps; a second kernel for steps as wide as the ring."""
    x, weight, state = (tensor_arg(args, name) for name in ("x", "weight", "state"))
    is_float32 = weight.dtype == torch.float32
    if not has_kernels(target, x, state) or weight.shape[1] != TAPS or not is_float32:
        return []
    num_rows, channels = x.shape
    remembers = args["num_tokens"] is not None
    kernel = launch(
        _FOLDER / "short_conv.cu",
        "short_conv_rows",
        (
            ("CHANNELS", channels),
            ("REMEMBERS", int(remembers)),
            ("SCALED", int(args["is_scaled"] is not False if "is_scaled" in args else 1)),
            *ring_defines(num_rows, state),
        ),
        (
            *(Pointer(name) for name in ("x", "weight", "state", "position")),
            Pointer("num_tokens" if remembers else "position"),
            Pointer("slot"),
            Output(),
            Int32(num_rows),
        ),
        blocks=blocks_for(count(x) // 4),
    )
    kernels = [kernel]
    if remembers and not is_wide(num_rows, state):
        kernels.append(ring_write("x", "state", state))
    size = 2 * bytes_of(args, "x") + bytes_of(args, "weight")
    return [Tactic("four_a_thread", tuple(kernels), size, 0)]
