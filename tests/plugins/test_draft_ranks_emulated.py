"""Kernels of `draft_head` on several ranks, on the CPU: ranks are processes, threads are fibers.

Drafts are those of the reference, the same on every rank, and the same whether or not logits are
exchanged; the reference's own halves give the drafts of one rank.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rank_processes import COMPILER, Emulator, Ranks, SharedMemory, run_kernel, run_ranks

# isort: split
from draft_checks import NEAR, bytes_of, call_args, calls, reference, relative_error, shares

from inkrt.builder.tactics import find_tactics
from inkrt.plugins.registry import plugins
from inkrt.plugins.tactic import (
    Float32,
    Int32,
    KernelLaunch,
    Output,
    Param,
    Peers,
    Pointer,
    Scratch,
    Tactic,
)
from inkrt.runtime.executor.peers import RankSlice

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="needs g++ to compile kernels for the CPU"
)
CASES = [call.case.name for call in calls("draft_head")]
QUICK = "wide, vanilla, ties"
NUMPY = {torch.int32: np.int32, torch.float32: np.float32}
EMULATED = [
    ("wide, rnn, coupled", 4),
    ("wide, rnn, all filters", 2),
    ("wide, vanilla, top-p", 4),
    ("wide, trimmed", 2),
    ("wide, trimmed, own base, top-k", 2),
    ("wide, one row", 8),  # of 33 tokens: the fifth rank has one, the last three have none
]


class Rank:
    """A rank's memory and the kernels of its tactic."""

    def __init__(
        self, memory: SharedMemory, arguments: dict[str, Any], tactic: Tactic, sizes: list[int],
        table: NDArray[np.uint8], error: NDArray[np.int32],
    ) -> None:  # fmt: skip
        self.memory, self.tactic, self.table, self.error = memory, tactic, table, error
        self.given = {
            name: memory.put(bytes_of(value))
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor)
        }
        self.outputs = [memory.empty(max(size, 16), 0x55) for size in sizes]
        self.scratch: dict[str, NDArray[np.uint8]] = {}
        self.launches = [
            (kernel, [self.value(param) for param in kernel.params]) for kernel in tactic.kernels
        ]

    def value(self, param: Param) -> Any:
        if isinstance(param, Int32 | Float32):
            return param.value
        if isinstance(param, Output):
            return self.outputs[param.index]
        if isinstance(param, Pointer):
            return self.given[param.argument]
        if isinstance(param, Peers):
            return self.table
        assert isinstance(param, Scratch)
        if param.name == "error":
            return self.error
        if param.name not in self.scratch:
            fill = 0xFF if param.fill is None else param.fill
            self.scratch[param.name] = self.memory.empty(param.num_bytes, fill)
        return self.scratch[param.name]


def run_case(
    folder: Path, case: str, num_ranks: int, *, wants_logits: bool, reverse: bool = False
) -> tuple[list[list[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Outputs of every rank, and those of the reference on one rank.

    With logits the block runs twice, so that the second finds what the first has left.
    """
    (call,) = (call for call in calls("draft_head") if call.case.name == case)
    expected = reference(call)
    given = shares(call.arguments, num_ranks)
    for arguments in given:
        arguments["wants_logits"] = torch.tensor([int(wants_logits)], dtype=torch.int32)
    (tactic,) = find_tactics("draft_head", "sm_90a", call_args(given[0]))
    memory, emulator = SharedMemory(1 << 26), Emulator(folder)
    slot = max(p.num_bytes for kernel in tactic.kernels for p in kernel.params if type(p) is Peers)
    boxes = Ranks(memory, num_ranks, -(-slot // 256) * 256)
    sizes = [x.numel() * x.element_size() for x in expected]
    ranks = [
        Rank(memory, arguments, tactic, sizes, boxes.tables[rank], boxes.errors[rank])
        for rank, arguments in enumerate(given)
    ]
    for kernel in tactic.kernels:
        emulator.library(kernel)

    def run(rank: int) -> None:
        emulator.reverse = reverse and rank > 0
        for _ in range(2 if wants_logits else 1):
            for kernel, values in ranks[rank].launches:
                run_kernel(emulator, kernel, values)

    run_ranks(num_ranks, run)
    assert [int(error[0]) for error in boxes.errors] == [0] * num_ranks
    got = [
        [
            torch.from_numpy(out[:size].copy().view(NUMPY[x.dtype])).view(x.shape)
            for out, size, x in zip(rank.outputs, sizes, expected, strict=True)
        ]
        for rank in ranks
    ]
    return got, expected


def check(folder: Path, case: str, num_ranks: int, *, reverse: bool = False) -> None:
    got, expected = run_case(folder, case, num_ranks, wants_logits=True, reverse=reverse)
    tokens, logits, confidences = expected
    is_drafted = torch.isfinite(logits)
    for rank, outputs in enumerate(got):
        for ours, first in zip(outputs, got[0], strict=True):
            assert torch.equal(ours.view(torch.int32), first.view(torch.int32)), rank
    assert got[0][0].tolist() == tokens.tolist()
    assert torch.equal(torch.isfinite(got[0][1]), is_drafted)
    assert relative_error(got[0][1][is_drafted], logits[is_drafted]) <= NEAR
    if len(confidences):
        assert relative_error(got[0][2], confidences) <= NEAR
    if case == QUICK:
        return
    bare, _ = run_case(folder, case, num_ranks, wants_logits=False, reverse=reverse)
    for outputs in bare:
        assert torch.equal(outputs[0], got[0][0])
        assert torch.equal(outputs[2], got[0][2])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_halves_of_the_reference_give_what_one_rank_gives(case: str, num_ranks: int) -> None:
    """In bits."""
    (call,) = (call for call in calls("draft_head") if call.case.name == case)
    collective = plugins()["draft_head"].collective
    assert collective is not None
    given = shares(call.arguments, num_ranks)
    payloads = [collective.payload(**arguments) for arguments in given]
    for arguments in given:
        for ours, one in zip(
            collective.combine(payloads, **arguments), reference(call), strict=True
        ):
            assert torch.equal(ours, one)


@pytest.mark.slow
@needs_compiler
def test_two_ranks_give_what_the_reference_gives(tmp_path: Path) -> None:
    check(tmp_path, QUICK, 2)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_ranks"), EMULATED)
def test_ranks_give_what_the_reference_gives(tmp_path: Path, case: str, num_ranks: int) -> None:
    check(tmp_path, case, num_ranks)


@needs_compiler
@pytest.mark.slow
def test_ranks_whose_threads_run_in_other_orders(tmp_path: Path) -> None:
    check(tmp_path, "wide, rnn, all filters", 2, reverse=True)


@needs_compiler
@pytest.mark.slow
def test_a_slice_hears_itself(tmp_path: Path) -> None:
    """As rank 1 of 4, of equal shares: the token is one of the lowest rank that has the best."""
    (call,) = (call for call in calls("draft_head") if call.case.name == "wide, rnn, greedy")
    arguments = shares(call.arguments, 4)[1]
    (tactic,) = find_tactics("draft_head", "sm_90a", call_args(arguments))
    memory, emulator = SharedMemory(1 << 26), Emulator(tmp_path)
    boxes = Ranks(memory, 4, 4096, RankSlice(1, 4))
    sizes = [4 * 7, 4 * 7 * 1003, 4 * 7]
    rank = Rank(memory, arguments, tactic, sizes, boxes.tables[0], boxes.errors[0])
    for kernel, values in rank.launches:
        run_kernel(emulator, kernel, values)
    assert int(boxes.errors[0][0]) == 0
    tokens = rank.outputs[0][: 4 * 7].view(np.int32)
    assert ((tokens >= 252) & (tokens < 504)).all()


def test_what_kernels_take() -> None:
    """Whole fours of tokens, up to eight ranks; each moves its own share of the second table."""
    (call,) = (call for call in calls("draft_head") if call.case.name == "wide, rnn, greedy")
    for target in ("sm_90a", "sm_100a"):
        for num_ranks in (2, 4, 8):
            (tactic,) = find_tactics(
                "draft_head", target, call_args(shares(call.arguments, num_ranks)[0])
            )
            entries = [kernel.entry for kernel in tactic.kernels]
            assert entries == [
                "hidden_part",
                *["next_row", "head_logits", "share_row"] * 7,
                "next_row",
            ]
            assert tactic.bytes < call.tactic.bytes
    odd = call_args(shares(call.arguments, 2)[0])
    odd["markov_w2"] = call_args({"x": torch.empty(502, 64, dtype=torch.bfloat16)})["x"]
    odd["base_logits"] = call_args({"x": torch.empty(7, 502, dtype=torch.bfloat16)})["x"]
    assert find_tactics("draft_head", "sm_90a", odd) == []
    kernels: list[KernelLaunch] = list(call.tactic.kernels)
    assert not any(isinstance(p, Peers) for kernel in kernels for p in kernel.params)
