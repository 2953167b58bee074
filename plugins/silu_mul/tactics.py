"""How `silu_mul` runs on a GPU: four values a thread."""

from pathlib import Path

from inkrt.plugins.tactic import CallArgs, Int32, Output, Pointer, Tactic, tensor_arg
from inkrt.plugins.vector import blocks_for, bytes_of, count, has_kernels, launch


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Rows of two times a multiple of four bf16 values."""
    gate_up = tensor_arg(args, "gate_up")
    width = gate_up.shape[1] // 2
    if not has_kernels(target, gate_up) or width % 4:
        return []
    kernel = launch(
        Path(__file__).parent / "silu_mul.cu",
        "silu_mul",
        (("WIDTH", width),),
        (Pointer("gate_up"), Output(), Int32(count(gate_up) // 8)),
        blocks=blocks_for(count(gate_up) // 8),
    )
    return [Tactic("four_a_thread", (kernel,), bytes_of(args, "gate_up") * 3 // 2, 0)]
