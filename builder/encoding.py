"""What the bytes of quantized weights and the numbers that scale them may be.

Both are checked when they are read, piece by piece: a code or scale that stands for no number would
turn all that it touches into NaN, or be taken for a number by a kernel.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from inkrt.engines.interface import Encoding, Part
from inkrt.errors import CheckpointError
from inkrt.plugins import mxfp8, nvfp4

# Codes of dtypes in safetensors.
DTYPES_OF: Mapping[Encoding, tuple[str, ...]] = MappingProxyType(
    {
        "e2m1": ("U8",),
        "e4m3": ("F8_E4M3",),
        "e4m3_scale": ("F8_E4M3",),
        "e8m0_scale": ("U8", "F8_E8M0"),
    }
)
_BLOCKS: Mapping[Encoding, int] = MappingProxyType(
    {"e4m3_scale": nvfp4.BLOCK, "e8m0_scale": mxfp8.BLOCK}
)
_NO_EXPONENT = 0xFF


def blocks_of(part: Part) -> str:
    """A remark on the shape of scales for a message that it is another; "" for other tensors."""
    block = _BLOCKS.get(part.encoding) if part.encoding else None
    return "" if block is None else f" (a scale per {block} columns)"


def require_values(part: Part, piece: Tensor, path: Path) -> None:
    """Refuse codes, scales and factors that stand for no number or have a sign they may not have.

    Args:
        part: what was read; only its encoding or its sign say anything.
        piece: its values, bytes if it is encoded.
        path: of the file, for messages.

    Raises:
        CheckpointError: there is such a value.
    """
    if not piece.numel() or part.encoding == "e2m1":  # all bytes are two numbers
        return
    if part.encoding is not None:
        is_bad, allowed = _BAD_BYTES[part.encoding]
        if (bad := is_bad(piece)).any():
            raise CheckpointError(
                f"{path}: tensor {part.name} has a byte 0x{int(piece[bad][0]):02X}, {allowed}; "
                f"download the file again"
            )
    elif part.sign != "any":
        numbers = piece.float()
        bad = ~numbers.isfinite() | (numbers < 0)
        if part.sign == "positive":
            bad |= numbers == 0
        if bad.any():
            raise CheckpointError(
                f"{path}: tensor {part.name} has a value {float(numbers[bad][0]):g}, what scales "
                f"weights must be finite and {part.sign}; download the file again"
            )


# Which bytes are no good, and what a message says of them.
_BAD_BYTES: Mapping[Encoding, tuple[Callable[[Tensor], Tensor], str]] = MappingProxyType(
    {
        "e4m3": (
            lambda codes: (codes & 0x7F) == mxfp8.NO_NUMBER,
            "which as E4M3 is no number",
        ),
        "e4m3_scale": (
            lambda scales: scales > nvfp4.MAX_SCALE,
            "block scales must be E4M3 numbers without a sign, 0x00 to 0x7E",
        ),
        "e8m0_scale": (
            lambda exponents: exponents == _NO_EXPONENT,
            "block scales must be E8M0 exponents, 0x00 to 0xFE",
        ),
    }
)
