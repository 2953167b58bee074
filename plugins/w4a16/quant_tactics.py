"""Tactics of matrices in NVFP4 or MXFP8, several at once, beside some in bf16: see ring_quant.cu.

Quantized matrices are vectors of `moe.packing`, with rows padded to whole tiles and K to whole
chunks of 256; those in bf16 are the chunks of `ring_tactics`. Steps of more than 8 tokens make bf16
chunks of each quantized matrix first, exactly, and multiply with them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import pad

from inkrt.plugins import mxfp8, nvfp4
from inkrt.plugins.moe.packing import VECTOR_BYTES, pack_mxfp8_vectors, pack_nvfp4_vectors
from inkrt.plugins.tactic import (
    Int32,
    KernelLaunch,
    Packing,
    Param,
    Scratch,
    Tactic,
    TensorArg,
)
from inkrt.plugins.w4a16.launches import Names, launch, params_of, trigger
from inkrt.plugins.w4a16.packing import bf16_packing, padded_rows, padded_width
from inkrt.plugins.w4a16.ring_tactics import RING_BYTES, padded_inputs, split_of, wide_rows
from inkrt.plugins.w4a16.shapes import (
    LARGE_BLOCK,
    MAX_TOKENS,
    MULTIPROCESSORS,
    check_smem,
    check_tokens,
    partial_bytes,
    require,
    struct_bytes,
)

Form = Literal["nvfp4", "mxfp8"]

_FORMAT: dict[Form, int] = {"nvfp4": 0, "mxfp8": 2}  # of weights.cuh
_BLOCK: dict[Form, int] = {"nvfp4": nvfp4.BLOCK, "mxfp8": mxfp8.BLOCK}
_CODES_PER_BYTE: dict[Form, int] = {"nvfp4": 2, "mxfp8": 1}
_MOST_STAGE_BYTES = 4096
_UNPACK_WARPS = 8


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [rows, K] as kernel parameters.

    Attributes:
        rows: N.
        input: index of its x.
        weight: packed.
        scale: float32 [1], of NVFP4; None for a matrix of another form.
        output: its result.
        is_plain: whether it is bf16.
    """

    rows: int
    input: int
    weight: Param
    scale: Param | None
    output: Param
    is_plain: bool = False

    @property
    def tiles(self) -> int:
        """Of 16 rows."""
        return -(-self.rows // 16)


@dataclass(frozen=True, slots=True)
class Products:
    """What is multiplied at once.

    Attributes:
        form: of the matrices that are not plain.
        width: K.
        inputs: x.
        matrices: of one or both kinds, at least one quantized.
        is_float: whether results are float32, not bf16.
    """

    form: Form
    width: int
    inputs: tuple[Param, ...]
    matrices: tuple[Matrix, ...]
    is_float: bool = False

    @property
    def in_order(self) -> tuple[Matrix, ...]:
        """As blocks take them: those in bf16 first; else by input, of which few are read twice."""
        return tuple(sorted(self.matrices, key=lambda m: (not m.is_plain, m.input)))

    @property
    def weight_bytes(self) -> int:
        """Codes and scales."""
        plain = sum(matrix.rows for matrix in self.matrices if matrix.is_plain)
        quantized = sum(matrix.rows for matrix in self.matrices) - plain
        return 2 * plain * self.width + quantized * self.width * VECTOR_BYTES[self.form] // 1024


@dataclass(frozen=True, slots=True)
class Ring:
    """How a block streams; the macros of ring_quant.cu. Only `stages` is a choice."""

    warps: int
    vectors: int
    plain_vectors: int
    stages: int
    slot_bytes: int

    def smem(self, width: int, num_tokens: int) -> int:
        """`Shared` of ring_quant.cu."""
        slots = self.warps * self.stages
        partial = 2 * partial_bytes(padded_width(width), self.warps, num_tokens)
        return struct_bytes((slots * self.slot_bytes, 128), (partial, 16), (slots * 8, 8))


def rings(products: Products) -> list[Ring]:
    """Ways to stream, best guess first; bits are equal.

    Raises:
        BuildError: a width that the kernel does not take.
    """
    block = _BLOCK[products.form]
    require(
        products.width % block == 0,
        "ring_quant",
        f"width={products.width}, expected a multiple of the {block} columns of a scale",
    )
    warps, share = split_of(products.width)
    size = VECTOR_BYTES[products.form]
    vectors = _largest_divisor(share, _MOST_STAGE_BYTES // size)
    slot, plain_vectors, further = vectors * size, 0, 0
    if any(matrix.is_plain for matrix in products.matrices):
        plain_vectors = _largest_divisor(share, max(1, slot // VECTOR_BYTES["bf16"]))
        slot = max(slot, plain_vectors * VECTOR_BYTES["bf16"])
        further = max(0, share // plain_vectors - share // vectors)
    tiles = sum(matrix.tiles for matrix in products.matrices)
    # A short list of tiles needs no long ring.
    most = -(-tiles // MULTIPROCESSORS) * share // vectors + further
    found = []
    # With a ring of two stages code for both kinds of tiles spills.
    for num_bytes in RING_BYTES[:2]:
        stages = max(1, min(most, num_bytes // (warps * slot)))
        found.append(Ring(warps, vectors, plain_vectors, stages, slot))
    return list(dict.fromkeys(found))


def linear_products(
    num_tokens: int, products: Products, *, weights: str, scales: str, plain: str = ""
) -> list[Tactic]:
    """Tactics of the products.

    Args:
        num_tokens: T.
        products: what to multiply, for any T.
        weights: name of the argument, a tensor or a list, that has the codes.
        scales: likewise, of scales or exponents.
        plain: likewise, of matrices in bf16, if there are any.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    choices = rings(products)
    packings = [quantized_packing(products.form, weights, scales)]
    if any(matrix.is_plain for matrix in products.matrices):
        packings.append(bf16_packing(plain, "plain"))
    rows = sum(matrix.rows for matrix in products.matrices)
    result_bytes = (4 if products.is_float else 2) * rows
    num_bytes = products.weight_bytes
    num_bytes += num_tokens * (2 * products.width * len(products.inputs) + result_bytes)

    def tactic(name: str, *kernels: KernelLaunch) -> Tactic:
        flops = 2 * num_tokens * rows * products.width
        return Tactic(f"{products.form}_{name}", kernels, num_bytes, flops, tuple(packings))

    if num_tokens > MAX_TOKENS:
        return [tactic("tiles", *_wide(num_tokens, products))]
    check_tokens("ring_quant", num_tokens)
    return [tactic(f"ring_{ring.stages}", _stream(num_tokens, products, ring)) for ring in choices]


def quantized_packing(form: Form, weights: str, scales: str) -> Packing:
    """The packing of the arguments `weights` and `scales`: vectors of whole tiles and chunks."""

    def pack(codes: Tensor, block_scales: Tensor) -> Tensor:
        per_byte, block = _CODES_PER_BYTE[form], _BLOCK[form]
        rows, columns = codes.shape
        width = columns * per_byte
        extra, extra_rows = padded_width(width) - width, padded_rows(rows) - rows
        codes = pad(codes, (0, extra // per_byte, 0, extra_rows))
        block_scales = pad(block_scales, (0, extra // block, 0, extra_rows))
        vectors = pack_nvfp4_vectors if form == "nvfp4" else pack_mxfp8_vectors
        return vectors(codes, block_scales, "plain")

    def num_bytes(shapes: Sequence[TensorArg]) -> int:
        rows, columns = shapes[0].shape
        width = padded_width(columns * _CODES_PER_BYTE[form])
        return padded_rows(rows) // 16 * (width // 64) * VECTOR_BYTES[form]

    return Packing((weights, scales), f"{form}_tiles", pack, num_bytes, row_unit=16)


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, max(1, min(number, most)) + 1) if number % n == 0)


def _stream(num_tokens: int, products: Products, ring: Ring) -> KernelLaunch:
    matrices = products.in_order
    own: dict[str, Param] = {"T": Int32(num_tokens)}
    for name, values, count in (
        ("w", [m.weight for m in matrices], 8),
        ("s", [m.scale or m.weight for m in matrices], 8),
        ("x", list(products.inputs), 4),
        ("y", [m.output for m in matrices], 8),
    ):
        require(len(values) <= count, "ring_quant", f"{len(values)} {name}, expected up to {count}")
        own |= {f"{name}{i}": values[min(i, len(values) - 1)] for i in range(count)}
    blocks = min(MULTIPROCESSORS, sum(m.tiles for m in matrices))
    return launch(
        "ring_quant",
        [
            ("FORMAT", _FORMAT[products.form]), ("MATRICES", len(matrices)),
            ("ROWS", _listed(m.rows for m in matrices)),
            ("IS_PLAIN", _listed(int(m.is_plain) for m in matrices)),
            ("INPUTS", len(products.inputs)), ("INPUT_OF", _listed(m.input for m in matrices)),
            ("DIM_K", products.width), ("BLOCKS", blocks), ("NUM_WARPS", ring.warps),
            ("STAGE_VECTORS", ring.vectors), ("PLAIN_VECTORS", ring.plain_vectors),
            ("STAGES", ring.stages),
            ("FLOAT_RESULT", int(products.is_float)), ("TRIGGER", trigger(num_tokens)),
            ("ONE_TOKEN", int(num_tokens == 1)),
        ],
        blocks=blocks,
        threads=32 * ring.warps,
        # More than half of a multiprocessor's: no two blocks share one while another idles.
        smem=max(check_smem("ring_quant", ring.smem(products.width, num_tokens)), LARGE_BLOCK),
        params=params_of(
            "w0 w1 w2 w3 w4 w5 w6 w7 s0 s1 s2 s3 s4 s5 s6 s7 x0 x1 x2 x3 y0 y1 y2 y3 y4 y5 y6 y7 "
            "error T",
            None,
            own,
        ),
    )  # fmt: skip


def _wide(num_tokens: int, products: Products) -> list[KernelLaunch]:
    """For each matrix its bf16 chunks, then the product; before them padded inputs."""
    width = padded_width(products.width)
    inputs, kernels = padded_inputs(num_tokens, products.width, products.inputs)
    most = max(matrix.tiles for matrix in products.matrices if not matrix.is_plain)
    chunks = Scratch("chunks", most * 16 * width * 2)
    for matrix in products.matrices:
        weight = matrix.weight
        if not matrix.is_plain:
            vectors = matrix.tiles * (width // 64)
            kernels.append(
                launch(
                    "unpack_vectors",
                    [("FORMAT", _FORMAT[products.form]), ("NUM_VECTORS", vectors)],
                    blocks=-(-vectors // _UNPACK_WARPS),
                    threads=32 * _UNPACK_WARPS,
                    smem=0,
                    params=(weight, chunks),
                )
            )
            weight = chunks
        names: Names = {
            "x": inputs[matrix.input], "weights": weight, "scale": matrix.scale or weight,
            "y": matrix.output,
        }  # fmt: skip
        kernels.append(
            wide_rows(
                num_tokens,
                matrix.rows,
                width,
                names,
                is_float=products.is_float,
                is_made=not matrix.is_plain,
                is_scaled=matrix.scale is not None,
            )
        )
    return kernels


def _listed(values: Iterable[int]) -> str:
    return ",".join(str(value) for value in values)
