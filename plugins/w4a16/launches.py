"""Parts that the w4a16 tactics are put together from."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from inkrt.plugins.tactic import KernelLaunch, Packing, Param, Pointer, Scratch, Tactic
from inkrt.plugins.w4a16.packing import bf16_packing, nvfp4_packing
from inkrt.plugins.w4a16.shapes import HEAD, Dims

Names = Mapping[str, Param]
Defines = Sequence[tuple[str, int | float | str]]

_FOLDER = Path(__file__).parent
# Kernels that wait for copies report a wait that gave up here; the word is 0 in a sound run.
_ERROR = Scratch("error", 4, fill=0)


def inverse_frequencies(theta: float) -> str:
    """The 64 rotary frequencies theta^(-2i/128) as torch computes them, as C float literals."""
    exponents = torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD
    values = 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponents)
    # Hexadecimal floats are exact; 9 digits would be enough, but nothing has to be argued.
    return ",".join(f"{value.hex()}f" for value in values.tolist())


def candidates(num_tokens: int, blocks: int) -> dict[str, Param]:
    """Scratch for the largest value and its row of each block."""
    size = 4 * num_tokens * blocks
    return {"best": Scratch("best", size), "row": Scratch("row", size)}


def trigger(num_tokens: int) -> int:
    """One token: dependents start at once. More: after the wait, which measured better."""
    return 0 if num_tokens == 1 else 1


def variant(dims: Dims, num_tokens: int) -> list[tuple[str, int | float | str]]:
    """Macros of every kernel."""
    return [
        ("WEIGHTS", int(dims.bf16)), ("TRIGGER", trigger(num_tokens)),
        ("ONE_TOKEN", int(num_tokens == 1)),
    ]  # fmt: skip


def params_of(spelled: str, names: Names | None, own: Mapping[str, Param]) -> tuple[Param, ...]:
    """The caller's parameter of each name, else the kernel's own, else an argument so called."""
    known = {"error": _ERROR, **own, **(names or {})}
    return tuple(known.get(name, Pointer(name)) for name in spelled.split())


def packings_of(
    dims: Dims, names: Names | None, *weights: tuple[str, str, str]
) -> tuple[Packing, ...]:
    """Packings of (codes, scales, row order); with bf16 weights the codes are the weights."""

    def argument(name: str) -> str:
        param = (names or {}).get(name, Pointer(name))
        assert isinstance(param, Pointer), f"{name} is packed, so it must be an argument"
        return param.argument

    if dims.bf16:
        return tuple(bf16_packing(argument(codes), order) for codes, _, order in weights)
    return tuple(nvfp4_packing(argument(c), argument(s), order) for c, s, order in weights)


def launch(
    entry: str,
    defines: Defines,
    *,
    blocks: int,
    threads: int,
    smem: int,
    params: tuple[Param, ...],
    source: str | None = None,
) -> KernelLaunch:
    """A one-dimensional launch of the kernel `entry` of `source`.cu (by default `entry`.cu)."""
    return KernelLaunch(
        source=_FOLDER / f"{source or entry}.cu",
        entry=entry,
        defines=tuple(defines),
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        params=params,
        smem_bytes=smem,
    )


def tactic_of(
    name: str, dims: Dims, kernels: tuple[KernelLaunch, ...], *, rows_by_k: int, num_tokens: int,
    other_bytes: int, packings: tuple[Packing, ...],
) -> Tactic:  # fmt: skip
    """A tactic whose weights are `rows_by_k` values."""
    return Tactic(
        name=name,
        kernels=kernels,
        bytes=rows_by_k * dims.chunk_bytes // 4096 + other_bytes,
        flops=2 * num_tokens * rows_by_k,
        packings=packings,
    )
