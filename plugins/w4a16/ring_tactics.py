"""Tactics of bf16 matrices of any number of rows and any width up to 8192, see ring_linear.cu.

They serve where a matrix has more row tiles than there are multiprocessors, where several are
multiplied at once, where a width is no whole number of chunks, and where a result stays in float32.
Packings are those of the other w4a16 kernels. Steps of more than 8 tokens take the tiled kernels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inkrt.plugins.tactic import Float32, InputPointer, Int32, KernelLaunch, Param, Scratch, Tactic
from inkrt.plugins.w4a16 import tile_tactics
from inkrt.plugins.w4a16.launches import Defines, Names, candidates, launch, params_of, variant
from inkrt.plugins.w4a16.packing import bf16_packing, padded_width
from inkrt.plugins.w4a16.sample_tactics import sample
from inkrt.plugins.w4a16.shapes import (
    LARGE_BLOCK,
    MAX_TOKENS,
    MULTIPROCESSORS,
    Dims,
    check_smem,
    check_tokens,
    partial_bytes,
    require,
    struct_bytes,
    tiled_bytes,
)

MAX_WIDTH = 8192
_VECTOR_BYTES = 2048  # of 16 rows x 64 k
# On their way of a block before the wait: with less an H200's memory idles, with more small loads
# wait (docs/inkling2.md).
_PACE_BYTES = 32_768
_MAX_SHARE = 8  # vectors of a warp; their activations live in registers
_MAX_WARPS = 16
# Shared memory of a block's ring, best guess first. The rest of a multiprocessor's is for a block
# of the kernel before or after.
RING_BYTES = (192 * 1024, 144 * 1024, 96 * 1024)
_DIMS = Dims(bf16=True)
_WIDE = tile_tactics.Tile(warp_tiles=2, token_tiles=4, stages=2)


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices [rows, width] and their inputs [T, width], as kernel parameters.

    Attributes:
        width: K, a multiple of 8 up to 8192.
        rows: of each matrix.
        inputs: x.
        input_of: for each matrix the index of its input.
        weights: packed matrices.
        outputs: results.
        is_float: whether results are float32, not bf16.
    """

    width: int
    rows: tuple[int, ...]
    inputs: tuple[Param, ...]
    input_of: tuple[int, ...]
    weights: tuple[Param, ...]
    outputs: tuple[Param, ...]
    is_float: bool = False

    @property
    def tiles(self) -> int:
        """Row tiles of all matrices."""
        return sum(-(-rows // 16) for rows in self.rows)

    def sorted(self) -> "Group":
        """The same with matrices of one input side by side: a block reads few inputs twice."""
        order = sorted(range(len(self.rows)), key=lambda number: self.input_of[number])
        return Group(
            self.width,
            tuple(self.rows[i] for i in order),
            self.inputs,
            tuple(self.input_of[i] for i in order),
            tuple(self.weights[i] for i in order),
            tuple(self.outputs[i] for i in order),
            self.is_float,
        )


@dataclass(frozen=True, slots=True)
class Ring:
    """How a block streams; the macros of ring_linear.cu. Only `stages` is a choice.

    Attributes:
        warps: of a block; they split K evenly.
        vectors: of a stage.
        stages: of a warp's ring.
    """

    warps: int
    vectors: int
    stages: int

    @property
    def num_bytes(self) -> int:
        """Of all rings of a block."""
        return self.warps * self.vectors * self.stages * _VECTOR_BYTES

    def smem(self, width: int, num_tokens: int, matrices: int, *, is_head: bool) -> int:
        """`Shared` of ring_linear.cu."""
        partial = 2 * partial_bytes(padded_width(width), self.warps, num_tokens)
        best = 4 * MAX_TOKENS * 4 if is_head else 0
        return struct_bytes(
            (self.num_bytes, 128), (partial, 16), (self.warps * self.stages * 8, 8), (8, 8),
            (32 * matrices * (matrices > 1), 8), (best, 4), (best, 4),
        )  # fmt: skip


def rings(width: int, tiles: int) -> list[Ring]:
    """Ways to stream matrices of `tiles` row tiles in all, best guess first; bits are equal.

    Raises:
        BuildError: a width that the kernel does not take.
    """
    warps, share = split_of(width)
    vectors = 2 if share % 2 == 0 else 1
    # A short list of tiles needs no long ring.
    most = -(-tiles // MULTIPROCESSORS) * share // vectors
    stage = warps * vectors * _VECTOR_BYTES
    found = [Ring(warps, vectors, min(most, size // stage)) for size in RING_BYTES]
    return list(dict.fromkeys(found))


def split_of(width: int) -> tuple[int, int]:
    """The warps that share K, and the vectors of 64 that each of them has.

    Raises:
        BuildError: a width that the kernels do not take.
    """
    require(
        width % 8 == 0 and 0 < width <= MAX_WIDTH,
        "ring_linear",
        f"width={width}, expected a multiple of 8 up to {MAX_WIDTH}",
    )
    total = padded_width(width) // 64
    # As `vectors_per_warp`: the split of K that all kernels for 1 to 8 tokens have.
    warps = max(n for n in range(1, _MAX_WARPS + 1) if total % n == 0)
    share = total // warps
    require(
        share <= _MAX_SHARE,
        "ring_linear",
        f"width={width} are {total} vectors of 64, {share} for each of {warps} warps, expected up "
        f"to {_MAX_SHARE}",
    )
    return warps, share


def linear_group(num_tokens: int, group: Group, *, weight: str) -> list[Tactic]:
    """Products of a group.

    Args:
        num_tokens: T.
        group: what to multiply, for any T.
        weight: name of the argument, a tensor or a list, that has the matrices.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    if num_tokens > MAX_TOKENS:
        return [_wide(num_tokens, group, weight)]
    check_tokens("ring_linear", num_tokens)
    return [
        _tactic(
            f"ring_{ring.stages}",
            num_tokens,
            group,
            (_kernel(num_tokens, group.sorted(), ring, [("RESULT", int(group.is_float))]),),
            weight,
        )
        for ring in rings(group.width, group.tiles)
    ]


def lm_head_sample(
    num_tokens: int,
    group: Group,
    *,
    weight: str,
    cap: float,
    is_rounded: bool,
    last_row: bool,
    names: Names,
) -> list[Tactic]:
    """Logits of one matrix, a row each, and the token drawn from them.

    Args:
        num_tokens: T, 1 to 8.
        group: one matrix; its rows are the vocabulary, its output the logits, float32.
        weight: name of the argument that has the matrix.
        cap: softcap of the logits; 0 for none.
        is_rounded: whether products are rounded to bf16 first.
        last_row: see `sample_tactics.sample`.
        names: as there.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    check_tokens("ring_linear", num_tokens)
    (vocab,) = group.rows
    blocks = min(group.tiles, MULTIPROCESSORS)
    last = sample(vocab, num_tokens, blocks, last_row=last_row, names=names)
    macros: Defines = [("RESULT", 2), ("ROUNDED", int(is_rounded)), ("CAPPED", int(cap > 0))]
    best = candidates(num_tokens, blocks)
    return [
        _tactic(
            f"ring_head_{ring.stages}",
            num_tokens,
            group,
            (_kernel(num_tokens, group, ring, macros, cap=cap, best=best), last),
            weight,
        )
        for ring in rings(group.width, group.tiles)
    ]


def _kernel(
    num_tokens: int,
    group: Group,
    ring: Ring,
    macros: Defines,
    *,
    cap: float = 0.0,
    best: Mapping[str, Param] | None = None,
) -> KernelLaunch:
    own: dict[str, Param] = {"T": Int32(num_tokens), "cap": Float32(cap)}
    own |= best or {"best": group.outputs[0], "row": group.outputs[0]}
    for name, values, count in (
        ("w", group.weights, 8), ("x", group.inputs, 4), ("y", group.outputs, 8),
    ):  # fmt: skip
        require(
            len(values) <= count, "ring_linear", f"{len(values)} {name}, expected up to {count}"
        )
        own |= {f"{name}{i}": values[min(i, len(values) - 1)] for i in range(count)}
    smem = ring.smem(group.width, num_tokens, len(group.rows), is_head=best is not None)
    return launch(
        "ring_linear",
        [
            ("MATRICES", len(group.rows)), ("ROWS", _listed(group.rows)),
            ("INPUT_OF", _listed(group.input_of)),
            ("DIM_K", group.width), ("NUM_WARPS", ring.warps), ("STAGE_VECTORS", ring.vectors),
            ("STAGES", ring.stages), ("PACE", _PACE_BYTES // (_VECTOR_BYTES * ring.vectors)),
            *macros, *variant(_DIMS, num_tokens),
        ],
        blocks=min(group.tiles, MULTIPROCESSORS),
        threads=32 * ring.warps,
        # More than half of a multiprocessor's: no two blocks share one while another idles.
        smem=max(check_smem("ring_linear", smem), LARGE_BLOCK),
        params=params_of(
            "w0 w1 w2 w3 w4 w5 w6 w7 x0 x1 x2 x3 y0 y1 y2 y3 y4 y5 y6 y7 best row error T cap",
            None,
            own,
        ),
    )  # fmt: skip


def _wide(num_tokens: int, group: Group, weight: str) -> Tactic:
    """A launch for each matrix, behind one for each input whose width must be padded."""
    width = padded_width(group.width)
    require(
        group.width % 8 == 0 and 0 < group.width <= MAX_WIDTH,
        "tile_rows",
        f"width={group.width}, expected a multiple of 8 up to {MAX_WIDTH}",
    )
    inputs, kernels = padded_inputs(num_tokens, group.width, group.inputs)
    for rows, index, codes, y in zip(
        group.rows, group.input_of, group.weights, group.outputs, strict=True
    ):
        names = {"x": inputs[index], "codes": codes, "global_scale": codes, "y": y}
        if rows % 8 == 0 and not group.is_float:
            tactic = tile_tactics.linear(_DIMS, num_tokens, rows=rows, width=width, names=names)
            kernels += tactic.kernels
        else:
            names = {"x": inputs[index], "weights": codes, "scale": codes, "y": y}
            kernels.append(wide_rows(num_tokens, rows, width, names, is_float=group.is_float))
    return _tactic("tile_group", num_tokens, group, tuple(kernels), weight)


def padded_inputs(
    num_tokens: int, width: int, inputs: Sequence[Param]
) -> tuple[list[Param], list[KernelLaunch]]:
    """Inputs of a wide step with whole chunks of columns, and the kernels that make them."""
    padded = padded_width(width)
    if padded == width:
        return list(inputs), []
    wide: list[Param] = []
    kernels = []
    for number, x in enumerate(inputs):
        wide.append(Scratch(f"x{number}", 2 * num_tokens * padded))
        kernels.append(
            launch(
                "pad_rows",
                [("WIDTH", width), ("PADDED", padded)],
                blocks=num_tokens,
                threads=128,
                smem=0,
                params=(x, wide[number]),
            )
        )
    return wide, kernels


def wide_rows(
    num_tokens: int, rows: int, width: int, names: Names, *, is_float: bool,
    is_made: bool = False, is_scaled: bool = False,
) -> KernelLaunch:  # fmt: skip
    """One product of a wide step with any number of rows, see tile_rows.cu.

    Args:
        num_tokens: T.
        rows: of the matrix.
        width: K, a multiple of 256.
        names: what "x", "weights", "scale" and "y" are; any pointer for a scale that is not read.
        is_float: whether the result is float32, not bf16.
        is_made: whether a kernel before makes the matrix.
        is_scaled: whether the result is multiplied by the scale.
    """
    blocks = -(-num_tokens // _WIDE.tokens)
    smem = tiled_bytes(
        _DIMS, _WIDE.warp_tiles, _WIDE.token_tiles, _WIDE.stages, 0, row_major=False, lists=1
    )
    return launch(
        "tile_rows",
        [
            ("DIM_N", rows), ("DIM_K", width), ("FLOAT_RESULT", int(is_float)),
            ("SCALED", int(is_scaled)), ("IS_MADE", int(is_made)), ("TOKEN_BLOCKS", blocks),
            *_WIDE.defines, *variant(_DIMS, num_tokens),
        ],
        blocks=blocks * -(-rows // _WIDE.rows),
        threads=128,
        smem=smem,
        params=params_of(
            "x weights scale y num_tokens", names, {"num_tokens": InputPointer("num_tokens")}
        ),
    )  # fmt: skip


def _tactic(
    name: str, num_tokens: int, group: Group, kernels: tuple[KernelLaunch, ...], weight: str
) -> Tactic:
    size = 4 if group.is_float else 2
    values = sum(group.rows) * group.width
    other = num_tokens * (2 * group.width * len(group.inputs) + size * sum(group.rows))
    return Tactic(
        name, kernels, 2 * values + other, 2 * num_tokens * values, (bf16_packing(weight, "plain"),)
    )


def _listed(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)
