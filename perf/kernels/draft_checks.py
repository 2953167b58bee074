"""Checks of the drafter's kernels: every tactic of every case against the operator's reference.

A check runs on any backend. Caches are packed as kernels read them, and what a session has not
written yet is NaN in them.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from w4a16_backend import Backend, Buffer, empty, run

from inkrt.builder.tactics import find_tactics
from inkrt.engines.interface import vocabulary_share
from inkrt.plugins.draft_head.op import is_base_shared
from inkrt.plugins.draft_sample.op import draw_draft
from inkrt.plugins.kv_layout import PAGE_TOKENS, pack
from inkrt.plugins.registry import Arguments, Case, plugins
from inkrt.plugins.tactic import CallArg, CallArgs, Tactic, TensorArg, strides_of_view

Report = Callable[[str, bool, str], None]
REQUEST = ("is_coupled", "temperature", "top_k", "top_p", "min_p", "seed", "position")
NEAR = 3e-6  # float32 sums in other orders


@dataclass(frozen=True, slots=True)
class Call:
    """A tactic with the arguments of a case.

    Attributes:
        name: of operator, case and tactic.
        op: the operator.
        case: the case.
        arguments: of its bfloat16 form.
        tactic: how to run it.
    """

    name: str
    op: str
    case: Case
    arguments: Arguments
    tactic: Tactic


def calls(op: str, target: str = "sm_90a") -> Iterator[Call]:
    """All cases of an operator that have tactics, with each of them."""
    for case in plugins()[op].cases():
        seed = zlib.crc32(f"{op}/{case.name}".encode())
        arguments = case.arguments(torch.bfloat16, torch.Generator().manual_seed(seed))
        for tactic in find_tactics(op, target, call_args(arguments)):
            yield Call(f"{op} {case.name} {tactic.name}", op, case, arguments, tactic)


def call_args(arguments: Arguments) -> CallArgs:
    """Arguments as tactics see them."""

    def described(value: object) -> CallArg:
        if isinstance(value, Tensor):
            strides = strides_of_view(value.shape, value.stride())
            return TensorArg(tuple(value.shape), value.dtype, strides)
        assert value is None or isinstance(value, bool | int | float | str)
        return value

    return {name: described(value) for name, value in arguments.items()}


def shares(arguments: Arguments, num_ranks: int) -> list[Arguments]:
    """Arguments of `draft_head` on every rank, of those of one rank; padding is NaN."""
    total = int(arguments["draft_vocab_size"])
    share = vocabulary_share(total, num_ranks)
    more = share * num_ranks - total
    table = F.pad(arguments["markov_w2"], (0, 0, 0, more), value=torch.nan)
    base = arguments["base_logits"]
    is_shared = is_base_shared(arguments["d2t"], arguments["base_is_drafted"])
    ranks = []
    for rank in range(num_ranks):
        own = {**arguments, "tp_size": num_ranks, "markov_w2": table[rank * share :][:share]}
        if is_shared:
            whole = F.pad(base, (0, more), value=torch.nan)
            own["base_logits"] = whole[:, rank * share :][:, :share].contiguous()
        ranks.append(own)
    return ranks


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes; of a view of rows, those between its rows too, NaN."""
    if tensor.is_contiguous():
        return tensor.view(torch.uint8).flatten().numpy()
    rows, width = tensor.shape[0], tensor.stride(0)
    whole = torch.full((rows, width), torch.nan, dtype=tensor.dtype)
    whole[:, : tensor.shape[1]] = tensor
    return whole.view(torch.uint8).flatten().numpy()


def run_call(backend: Backend, call: Call) -> tuple[Tensor, ...]:
    """The outputs of a call's kernels, which run twice on the same scratch.

    Raises:
        RuntimeError: the second run has other bits, or a kernel gave up waiting.
    """
    given = dict(call.arguments)
    for name in ("k_cache", "v_cache"):
        if name in given:
            given[name] = pack(_unwritten_is_nan(given[name], given))
    buffers = {
        name: backend.upload(bytes_of(value))
        for name, value in given.items()
        if isinstance(value, Tensor)
    }
    like = reference(call)
    scratch: dict[str, Buffer] = {}
    results = []
    for _ in range(2):
        outputs = [empty(backend, max(x.numel() * x.element_size(), 16)) for x in like]
        scratch = run(backend, call.tactic, buffers, outputs, scratch)
        results.append([backend.download(output) for output in outputs])
        if "error" in scratch and backend.download(scratch["error"]).any():
            raise RuntimeError("a kernel gave up waiting")
    if any(not np.array_equal(a, b) for a, b in zip(*results, strict=True)):
        raise RuntimeError("a second run has other bits")
    return tuple(
        torch.frombuffer(data, dtype=x.dtype, count=x.numel()).view(x.shape)
        if x.numel()
        else torch.empty_like(x)
        for data, x in zip(results[0], like, strict=True)
    )


def reference(call: Call) -> tuple[Tensor, ...]:
    """What the operator's reference gives."""
    result = plugins()[call.op].reference(**call.arguments)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _unwritten_is_nan(cache: Tensor, arguments: Arguments) -> Tensor:
    """The cache with NaN in all rows but those of the context."""
    context = torch.arange(int(arguments["position"]))
    pages = arguments["page_table"].long()[context // PAGE_TOKENS]
    filled = torch.full_like(cache, torch.nan)
    filled[pages, context % PAGE_TOKENS] = cache[pages, context % PAGE_TOKENS]
    return filled


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||; infinite where something is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float(error)


def check_attention(backend: Backend, report: Report, chosen: str = "") -> None:
    """`draft_attention` on the case `chosen`, or on all."""
    for call in calls("draft_attention"):
        if chosen not in ("", call.case.name):
            continue
        (got,) = run_call(backend, call)
        (expected,) = reference(call)
        error, bound = relative_error(got, expected), call.case.rtol[torch.bfloat16]
        report(call.name, error <= bound, f"relative error {error:.2g} of {bound:.2g}")


def check_head(backend: Backend, report: Report, chosen: str = "") -> None:
    """`draft_head` on the case `chosen`, or on all.

    Tokens are what the reference draws from the logits that the kernels wrote, and the same as in
    the reference's own block, whose logits differ by rounding alone.
    """
    for call in calls("draft_head"):
        if chosen not in ("", call.case.name):
            continue
        tokens, logits, confidences = run_call(backend, call)
        expected = reference(call)
        request = {name: call.arguments[name] for name in REQUEST}
        drawn = [draw_draft(row, **request, place=number) for number, row in enumerate(logits)]
        report(f"{call.name} draws", tokens.tolist() == drawn, f"{tokens.tolist()} for {drawn}")
        same = torch.equal(tokens, expected[0])
        report(f"{call.name} tokens", same, f"{tokens.tolist()} for {expected[0].tolist()}")
        is_drafted = torch.isfinite(expected[1])
        same = torch.equal(torch.isfinite(logits), is_drafted)
        report(f"{call.name} drafted tokens", same, "others have logits")
        error = relative_error(logits[is_drafted], expected[1][is_drafted])
        report(f"{call.name} logits", error <= NEAR, f"relative error {error:.2g}")
        if len(confidences):
            error = relative_error(confidences, expected[2])
            report(f"{call.name} confidences", error <= NEAR, f"relative error {error:.2g}")
