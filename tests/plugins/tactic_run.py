"""Runs an operator's tactics on a device and compares them with the oracles, case by case.

The device is a backend of perf/kernels/w4a16_backend.py: the GPU, or the CPU that stands in for it.
"""

import copy
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles import ORACLES, to_float64
from oracles_draft import ORACLES_DRAFT
from oracles_flint import ORACLES_FLINT
from oracles_fused import ORACLES_FUSED
from oracles_media import ORACLES_MEDIA
from oracles_quantize import ORACLES_QUANTIZE
from oracles_vision import ORACLES_VISION
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "perf/kernels"))

from w4a16_backend import Backend, Buffer, empty

from inkrt.builder.tactics import find_tactics
from inkrt.plugins import kv_layout
from inkrt.plugins.registry import Arguments, Case, Plugin
from inkrt.plugins.tactic import (
    CallArgs,
    Float32,
    InputPointer,
    Int32,
    Output,
    Param,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
    strides_of_view,
)

ALL_ORACLES = (
    ORACLES
    | ORACLES_FUSED
    | ORACLES_FLINT
    | ORACLES_DRAFT
    | ORACLES_QUANTIZE
    | ORACLES_VISION
    | ORACLES_MEDIA
)
_CACHES = ("k_cache", "v_cache")
# What may be read before the wait: it does not change within a step.
_STEADY = (
    "weight", "codes", "exponents", "scale", "norm", "queries", "bank", "table", "position",
    "num_tokens", "slot",
)  # fmt: skip
_STEADY_ROWS = ("state",)


@dataclass
class Ran:
    """Outputs of a tactic, and the arguments that it writes, by name."""

    outputs: list[Tensor]
    written: dict[str, Tensor]


def arguments_of(plugin: Plugin, case: Case) -> Arguments:
    """A case's arguments in bf16, always the same."""
    seed = zlib.crc32(f"{plugin.name}/{case.name}".encode())
    return case.arguments(torch.bfloat16, torch.Generator().manual_seed(seed))


def call_args(arguments: Arguments) -> CallArgs:
    """Arguments as tactics see them."""

    def tensor(x: Tensor) -> TensorArg:
        return TensorArg(tuple(x.shape), x.dtype, strides_of_view(x.shape, x.stride()))

    def arg(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensor(value)
        if isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value):
            return [tensor(x) for x in value]
        return value

    return {name: arg(value) for name, value in arguments.items()}


def tactics_of(plugin: Plugin, arguments: Arguments) -> list[Tactic]:
    """Those of Hopper."""
    return find_tactics(plugin.name, "sm_90a", call_args(arguments))


def run(
    backend: Backend, plugin: Plugin, tactic: Tactic, arguments: Arguments, *, repeats: int = 1
) -> Ran:
    """Run a tactic on copies of the arguments; `repeats` times on the same scratch.

    The last run starts from the same arguments as the first.
    """
    meta = {
        name: [x.to("meta") for x in value]
        if isinstance(value, list) and value and isinstance(value[0], Tensor)
        else value.to("meta") if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }  # fmt: skip
    made = plugin.op(**meta)
    shapes = [] if made is None else [made] if isinstance(made, Tensor) else list(made)
    scratch: dict[str, Buffer] = {}
    for _ in range(repeats):
        given = {
            (name, index): _upload(backend, name, x)
            for name, value in arguments.items()
            for index, x in enumerate(_as_list(value))
            if isinstance(x, Tensor)
        }
        if ("num_tokens", 0) not in given and shapes:  # of the step: all rows live
            num_rows = np.array([len(shapes[0])], np.int32)
            given["num_tokens", 0] = backend.upload(num_rows.view(np.uint8))
        for packing in tactic.packings:
            lists = [_as_list(arguments[name]) for name in packing.arguments]
            for index, weights in enumerate(zip(*lists, strict=True)):
                packed = packing.pack(*weights).view(torch.uint8).numpy().reshape(-1)
                given[packing.arguments[0], index] = backend.upload(packed)
        outputs = [empty(backend, x.numel() * x.itemsize) for x in shapes]
        made_before: set[str] = set()  # scratch that kernels of this launch hand on
        for kernel in tactic.kernels:
            values = [_value(backend, p, given, outputs, scratch) for p in kernel.params]
            late = [
                value
                for param, value in zip(kernel.params, values, strict=True)
                if isinstance(value, Buffer)
                and (_is_late(param) or (isinstance(param, Scratch) and param.name in made_before))
            ]
            made_before |= {
                param.name
                for param in kernel.params
                if isinstance(param, Scratch) and param.fill is None
            }
            unique = list({buffer.address: buffer for buffer in late}.values())
            backend.launch(kernel, values, unique)
    if "error" in scratch:
        assert not backend.download(scratch["error"]).any(), "a kernel gave up waiting"
    written = {
        name: _download(backend, name, given[name, 0], arguments[name]) for name in plugin.mutates
    }
    return Ran(
        [_tensor(backend.download(b), x) for b, x in zip(outputs, shapes, strict=True)], written
    )


def _is_late(param: Param) -> bool:
    """Whether a kernel of another launch of the step may write the argument until the wait."""
    return (
        isinstance(param, Pointer)
        and not param.argument.endswith(_STEADY_ROWS)
        and not any(steady in param.argument for steady in _STEADY)
        and not param.argument.startswith(_CACHES)
    )


def check_case(backend: Backend, plugin: Plugin, case: Case) -> int:
    """Compare all tactics of a case with the oracle and, in bits, with each other.

    Returns:
        How many there are.
    """
    arguments = arguments_of(plugin, case)
    tactics = tactics_of(plugin, arguments)
    wide = {name: to_float64(value) for name, value in copy.deepcopy(arguments).items()}
    outputs, written = ALL_ORACLES[plugin.name](**wide)
    rtol = case.rtol[torch.bfloat16]
    first: Ran | None = None
    for tactic in tactics:
        ran = run(backend, plugin, tactic, arguments, repeats=2)
        for index, (ours, expected) in enumerate(zip(ran.outputs, outputs, strict=True)):
            live = _live(arguments, expected)
            _compare(f"{tactic.name} output {index}", ours[live], expected[live], rtol)
        for name, expected in written.items():
            _compare(f"{tactic.name} {name}", ran.written[name], expected, rtol)
            is_kept = expected == wide[name]
            kept = arguments[name]
            assert torch.equal(ran.written[name][is_kept], kept[is_kept]), f"{name}: other places"
        if first is not None:
            assert_equal_bits(first, ran, arguments, tactic.name)
        first = first or ran
    return len(tactics)


# Arguments that have a row for every token, of operators with a state.
_ROWS = {
    "allreduce_conv_mix": ("partial", "residual", "sources"),
    "qkv_post": ("q", "k", "v", "rel", "k_dynamic", "v_dynamic"),
    "short_conv": ("x",),
}


def check_rows(
    backend: Backend, plugin: Plugin, arguments: Arguments, number: int, widths: Sequence[int]
) -> None:
    """A step has the bits of the narrower steps that it can be cut into.

    Args:
        backend: device.
        plugin: an operator of `_ROWS`.
        arguments: of a step in which all rows live.
        number: of the tactic.
        widths: of the narrower steps.
    """
    whole = run(backend, plugin, tactics_of(plugin, arguments)[number], arguments)
    parts: list[list[Tensor]] = []
    given, first = dict(arguments), 0
    for width in widths:
        rows = slice(first, first + width)
        for name in _ROWS[plugin.name]:
            value = arguments[name]
            if value is not None:
                given[name] = [x[rows] for x in value] if isinstance(value, list) else value[rows]
        given["position"] = arguments["position"] + first
        given["num_tokens"] = torch.tensor([width], dtype=torch.int32)
        ran = run(backend, plugin, tactics_of(plugin, given)[number], given)
        given |= ran.written
        parts.append(ran.outputs)
        first += width
    is_stacked = [x.dim() == 3 and plugin.name == "allreduce_conv_mix" for x in whole.outputs]
    joined = Ran(
        [
            torch.cat(x, int(stacked))
            for x, stacked in zip(zip(*parts, strict=True), is_stacked, strict=True)
        ],
        {name: given[name] for name in plugin.mutates},
    )
    assert_equal_bits(whole, joined, arguments, f"steps of {widths}")


def assert_equal_bits(a: Ran, b: Ran, arguments: Arguments, what: str) -> None:
    """Outputs in live rows, and all that is written."""
    for index, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True)):
        live = _live(arguments, x)
        assert torch.equal(_bits(x[live]), _bits(y[live])), f"{what}: bits of output {index}"
    for name, x in a.written.items():
        assert torch.equal(_bits(x), _bits(b.written[name])), f"{what}: bits of {name}"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _live(arguments: Arguments, output: Tensor) -> tuple[slice, ...]:
    """The rows that a step has, of an output [T, ...] or [m, T, ...]."""
    num_tokens, position = arguments.get("num_tokens"), arguments.get("position")
    if num_tokens is None or position is None:
        return (slice(None),)
    rows = slice(0, int(num_tokens))
    is_stacked = "queries" in arguments and output.dim() == 3
    return (slice(None), rows) if is_stacked else (rows,)


def _compare(what: str, ours: Tensor, expected: Tensor, rtol: float) -> None:
    if not expected.is_floating_point():
        assert torch.equal(ours.long(), expected.long()), what
        return
    left_out = torch.isneginf(expected)  # of a choice
    assert torch.equal(torch.isneginf(ours), left_out), f"{what} leaves out others"
    ours, expected = ours[~left_out], expected[~left_out]
    assert torch.isfinite(ours).all(), f"{what} is not finite"
    expected = torch.where(torch.isnan(expected), ours.double(), expected)
    error = torch.linalg.vector_norm(ours.double() - expected)
    bound = rtol * torch.linalg.vector_norm(expected)
    assert error <= bound, f"{what}: {error / bound * rtol:.3g} > {rtol}"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _upload(backend: Backend, name: str, x: Tensor) -> Buffer:
    if name in _CACHES:
        x = kv_layout.pack(x)
    elif x.dim() == 2 and x.stride() == (0, 1):
        x = x[:1]  # a row that is repeated is stored once
    elif x.dim() == 2 and x.stride(1) == 1 and x.stride(0) > x.shape[1]:
        x = functional.pad(x, (0, x.stride(0) - x.shape[1]))  # columns of a wider matrix
    return backend.upload(x.contiguous().view(torch.uint8).numpy().reshape(-1))


def _download(backend: Backend, name: str, buffer: Buffer, like: Tensor) -> Tensor:
    data = backend.download(buffer)
    if name not in _CACHES:
        return _tensor(data, like)
    entries, rows, kv_heads, head = like.shape
    packed = torch.from_numpy(data.copy()).view(like.dtype)
    pages = packed.view(entries * rows // kv_layout.PAGE_TOKENS, kv_heads, -1)
    return kv_layout.unpack(pages, rows, head)


def _tensor(data: np.ndarray, like: Tensor) -> Tensor:
    if not like.numel():  # as bytes it has no stride that a view could have
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.from_numpy(data.copy()).view(like.dtype).view(like.shape)


def _value(
    backend: Backend,
    param: Param,
    given: dict[tuple[str, int], Buffer],
    outputs: list[Buffer],
    scratch: dict[str, Buffer],
) -> Buffer | int | float:
    if isinstance(param, Int32 | Float32):
        return param.value
    if isinstance(param, Output):
        return outputs[param.index]
    if isinstance(param, Pointer):
        return given[param.argument, param.index]
    if isinstance(param, InputPointer):
        return given[param.name, 0]
    assert isinstance(param, Scratch)
    if param.name not in scratch:
        scratch[param.name] = empty(
            backend, param.num_bytes, 0xFF if param.fill is None else param.fill
        )
    return scratch[param.name]
