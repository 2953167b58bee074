"""What ranks need and which GPUs hold it, for every number of ranks, as text."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inkrt.commands.console import format_bytes, format_table

if TYPE_CHECKING:
    from inkrt.builder.sizing import RankSize


def fits(
    sizes: "Sequence[RankSize]", scratch: int, left: Mapping[str, Sequence[int | None]]
) -> list[str]:
    """A table with a column for every number of ranks, and below it why one is missing.

    Args:
        sizes: of a rank, by number of ranks.
        scratch: bytes of a rank beside them.
        left: positions of context that fit, by GPU and number of ranks; None for any number.
    """
    rows = [["memory of a rank, by ranks", *(f"tp {size.tp_size}" for size in sizes)]]
    for name, values in (
        ("weights", [format_bytes(size.weights) for size in sizes]),
        ("rings and the like", [format_bytes(size.rings) for size in sizes]),
        ("scratch, as above", [format_bytes(scratch) for _ in sizes]),
        ("a position of context", [format_bytes(size.position) for size in sizes]),
    ):
        rows.append([name, *_known(sizes, values)])
    rows.append(["positions of context left", *("" for _ in sizes)])
    for gpu, counts in left.items():
        texts = [
            "any" if count is None else f"{count:,}" if count else "does not fit"
            for count in counts
        ]
        rows.append([f"  {gpu}", *_known(sizes, texts)])
    refusals = [f"tp {size.tp_size}: {size.refusal}" for size in sizes if size.refusal]
    return [*format_table(rows, right=frozenset(range(1, len(sizes) + 1))), *refusals]


def _known(sizes: "Sequence[RankSize]", values: Sequence[str]) -> list[str]:
    """The values, but for numbers of ranks that cannot share the model."""
    return ["-" if size.refusal else value for size, value in zip(sizes, values, strict=True)]
