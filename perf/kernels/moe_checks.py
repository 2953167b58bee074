"""Cases of the operator `moe` on a device, or on the CPU by emulation, against the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from w4a16_backend import Backend, Buffer, empty, run

from inkrt.errors import BuildError
from inkrt.plugins.moe import tactics
from inkrt.plugins.registry import Arguments, Case, plugins
from inkrt.plugins.tactic import CallArgs, Tactic, TensorArg

MOE = plugins()["moe"]
TARGET = "sm_90a"


def arguments_of(case: Case) -> Arguments:
    """A case's arguments in bfloat16."""
    return case.arguments(torch.bfloat16, torch.Generator().manual_seed(1))


def tactics_of(arguments: Mapping[str, Any]) -> list[Tactic]:
    """The tactics of a call; none if its sizes are not for the kernels."""
    args: CallArgs = {
        name: TensorArg(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    try:
        return tactics.find_tactics(TARGET, args)
    except BuildError:
        return []


def cases() -> dict[str, Case]:
    """The cases that kernels take, by name."""
    return {case.name: case for case in MOE.cases() if tactics_of(arguments_of(case))}


def rows_of(arguments: Mapping[str, Any], first: int, last: int) -> Arguments:
    """The same call for some of its tokens."""
    return dict(arguments) | {"x": arguments["x"][first:last].contiguous()}


def run_on(
    backend: Backend,
    tactic: Tactic,
    arguments: Mapping[str, Any],
    times: int = 1,
    scratch: dict[str, Buffer] | None = None,
) -> Tensor:
    """What the kernels write, after `times` launches in the same scratch: a new one, or `scratch`.

    Raises:
        RuntimeError: a kernel gave up waiting.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    packed = dict(tensors)
    for packing in tactic.packings:
        packed[packing.arguments[0]] = packing.pack(*(tensors[n] for n in packing.arguments))
    buffers = {name: backend.upload(_bytes(value)) for name, value in packed.items()}
    buffers["num_tokens"] = backend.upload(np.array([len(tensors["x"])], np.int32))
    dtype = torch.float32 if arguments["partial"] else torch.bfloat16
    shape = tensors["x"].shape
    out = empty(backend, shape.numel() * dtype.itemsize)
    scratch = {} if scratch is None else scratch
    for _ in range(times):
        run(backend, tactic, buffers, [out], scratch)
    if backend.download(scratch["error"]).any():
        raise RuntimeError(f"{tactic.name}: a kernel gave up waiting")
    return torch.from_numpy(backend.download(out)).view(dtype).view(shape)


def error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||; infinite where something is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy()
    return data
