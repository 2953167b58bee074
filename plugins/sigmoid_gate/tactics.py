"""How `sigmoid_gate` runs on a GPU: four values a thread."""

from pathlib import Path

from inkrt.plugins.tactic import CallArgs, Int32, Output, Pointer, Tactic, tensor_arg
from inkrt.plugins.vector import blocks_for, bytes_of, count, has_kernels, launch


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Rows of a multiple of four bf16 values."""
    x = tensor_arg(args, "x")
    if not has_kernels(target, x, tensor_arg(args, "gate")):
        return []
    kernel = launch(
        Path(__file__).parent / "sigmoid_gate.cu",
        "sigmoid_gate",
        (),
        (Pointer("x"), Pointer("gate"), Output(), Int32(count(x) // 4)),
        blocks=blocks_for(count(x) // 4),
    )
    return [Tactic("four_a_thread", (kernel,), 3 * bytes_of(args, "x"), 0)]
