"""allreduce_conv_mix of several ranks on the CPU: ranks are processes, threads are fibers."""

import numpy as np
import pytest
import torch
from rank_processes import COMPILER, Emulator, Ranks, SharedMemory, run_kernel, run_ranks
from torch import Tensor

from inkrt.plugins.allreduce_conv_mix.op import combine
from inkrt.plugins.tactic import Float32, Int32, Output, Peers, Pointer, Scratch, Tactic, TensorArg

find_tactics = pytest.importorskip("inkrt.plugins.allreduce_conv_mix.tactics").find_tactics
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
    pytest.mark.slow,
]
SLOTS, RING = 2, 16


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


def make_arguments(
    num_rows: int, num_tokens: int, width: int, position: int, num_former: int, num_queries: int,
    residual: torch.dtype | None, num_ranks: int,
) -> list[dict[str, object]]:  # fmt: skip
    """Of every rank; all but the parts are the same."""
    generator = torch.Generator().manual_seed(num_rows + width)

    def bf16(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def one(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32)

    shared = {
        "conv_weight": torch.randn(width, 4, generator=generator),
        "conv_state": bf16(SLOTS, RING, width),
        "position": one(position),
        "num_tokens": one(num_tokens),
        "slot": one(1),
        "residual": None if residual is None else bf16(num_rows, width).to(residual),
        "sources": [bf16(num_rows, width) for _ in range(num_former)],
        "queries": torch.randn(num_queries, width, generator=generator),
        "norm_weights": [1 + 0.1 * bf16(width) for _ in range(num_queries)],
        "mix_eps": 1e-6,
        "norm_eps": 1e-5,
        "residual_dtype": residual or torch.float32,
        "dtype": torch.bfloat16,
        "tp_size": num_ranks,
    }
    parts = [torch.randn(num_rows, width, generator=generator) for _ in range(num_ranks)]
    if num_rows > 3:  # a NaN takes its row's norm with it, and three rows behind
        parts[0].view(torch.int32)[0, 5] = -1  # the empty pattern
    return [{"partial": part, **shared} for part in parts]


class Memory:
    """Arguments, outputs and scratch of one rank."""

    def __init__(self, shared: SharedMemory, arguments: dict[str, object]) -> None:
        self.shared = shared
        self.arguments = arguments
        self.given = {
            (name, index): shared.put(item.view(torch.uint8).numpy())
            for name, value in arguments.items()
            for index, item in enumerate(value if isinstance(value, list) else [value])
            if isinstance(item, Tensor)
        }
        rows, width = arguments["partial"].shape  # type: ignore[attr-defined]
        size = 4 if arguments["residual_dtype"] == torch.float32 else 2
        self.outputs = [
            shared.empty(size * rows * width, 0x11),
            shared.empty(2 * len(arguments["queries"]) * rows * width, 0x11),  # type: ignore[arg-type]
        ]
        self.scratch: dict[str, np.ndarray] = {}
        self.kinds: dict[str, Scratch] = {}

    def prepare(self, tactic: Tactic) -> None:
        """Scratch that it needs; what another tactic has by the same name must be alike."""
        for param in (param for kernel in tactic.kernels for param in kernel.params):
            if not isinstance(param, Scratch):
                continue
            if self.kinds.setdefault(param.name, param) != param:
                raise ValueError(f"{tactic.name}: {param} is {self.kinds[param.name]} already")
            if param.name not in self.scratch:
                fill = 0x77 if param.fill is None else param.fill
                self.scratch[param.name] = self.shared.empty(param.num_bytes, fill)

    def values(self, tactic: Tactic, index: int, table: np.ndarray, error: np.ndarray) -> list:
        def value(param: object) -> object:
            if isinstance(param, Int32 | Float32):
                return param.value
            if isinstance(param, Output):
                return self.outputs[param.index]
            if isinstance(param, Peers):
                return table
            if isinstance(param, Scratch):
                return error if param.name == "error" else self.scratch[param.name]
            name = (
                (param.argument, param.index) if isinstance(param, Pointer) else ("num_tokens", 0)
            )
            return self.given[name]

        return [value(param) for param in tactic.kernels[index].params]


def call_args(arguments: dict[str, object]) -> dict:
    def arg(value: object) -> object:
        if isinstance(value, Tensor):
            return TensorArg(tuple(value.shape), value.dtype)
        return [arg(item) for item in value] if isinstance(value, list) else value

    return {name: arg(value) for name, value in arguments.items()}


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "width", "position", "former", "queries", "residual", "ranks"),
    [
        (1, 1, 256, 0, 0, 1, None, 2),
        (1, 1, 520, 17, 3, 3, torch.bfloat16, 2),  # two slices, of which one is two threads
        (1, 1, 1024, 5, 4, 3, torch.bfloat16, 3),  # whole slices: a cluster has a row
        (3, 2, 512, 15, 1, 1, torch.float32, 2),
        (8, 8, 520, 1, 2, 3, torch.float32, 2),
        (8, 5, 256, 30, 1, 1, torch.bfloat16, 4),  # padding rows, through the ring's end
        (5, 5, 512, 14, 2, 2, torch.bfloat16, 3),  # clusters that receive four rows
        (40, 37, 256, 3, 1, 1, torch.bfloat16, 2),  # a prefill step wider than the ring
    ],
)
def test_ranks_agree_with_the_reference_and_tactics_in_bits(
    emulator: Emulator, num_rows: int, num_tokens: int, width: int, position: int, former: int,
    queries: int, residual: torch.dtype | None, ranks: int,
) -> None:  # fmt: skip
    arguments = make_arguments(
        num_rows, num_tokens, width, position, former, queries, residual, ranks
    )
    tactics = find_tactics("sm_90a", call_args(arguments[0]))
    names = [tactic.name for tactic in tactics]
    has_cluster = width % 512 == 0
    front = ["push_in_front", "push_in_front_row_a_cluster"][: 1 + has_cluster]
    if num_rows > 3:
        within = ["push_in_slices", *["push_in_cluster"][:has_cluster]]
        assert names == [*front, *within][: 1 if num_rows > 8 else None]
    else:
        assert names == ["push_in_slices", *["push_in_cluster"][:has_cluster], *front]
    state = arguments[0]["conv_state"].clone()  # type: ignore[attr-defined]
    of_one = {**arguments[0], "conv_state": state}
    expected = combine([of_rank["partial"] for of_rank in arguments], **of_one)  # type: ignore[arg-type]
    seen = []
    for tactic in tactics:
        shared = SharedMemory()
        places = Ranks(shared, ranks, 4 * num_rows * width)
        # Both launches and a third in between, so that buffers are emptied and filled again.
        memories = [[Memory(shared, of_rank) for of_rank in arguments] for _ in range(4)]
        for memory in memories[0]:
            memory.prepare(tactic)
        for of_launch in memories[1:]:
            for memory, first in zip(of_launch, memories[0], strict=True):
                memory.scratch = first.scratch
        for kernel in tactic.kernels:
            emulator.library(kernel)

        def run(rank: int, tactic=tactic, memories=memories, places=places) -> None:  # type: ignore[no-untyped-def]
            emulator.reverse = rank % 2 == 1
            for of_launch in memories:
                for index, kernel in enumerate(tactic.kernels):
                    values = of_launch[rank].values(
                        tactic, index, places.tables[rank], places.errors[rank]
                    )
                    run_kernel(emulator, kernel, values)

        run_ranks(ranks, run)
        shared.check()
        assert [int(error[0]) for error in places.errors] == [0] * ranks
        first = memories[0][0]
        for of_launch in memories:
            for memory in of_launch:
                for ours, other in zip(memory.outputs, first.outputs, strict=True):
                    assert np.array_equal(ours, other)
                assert np.array_equal(memory.given["conv_state", 0], first.given["conv_state", 0])
        seen.append([*first.outputs, first.given["conv_state", 0]])
        dtypes = (arguments[0]["residual_dtype"], torch.bfloat16)
        for number, (result, dtype) in enumerate(zip(expected, dtypes, strict=True)):
            data = torch.from_numpy(first.outputs[number].copy()).view(dtype)  # type: ignore[call-overload]
            got = data.view(result.shape)[..., :num_tokens, :].double()
            want = result[..., :num_tokens, :].double()
            is_nan = want.isnan()
            assert torch.equal(got.isnan(), is_nan)
            error = (got - want)[~is_nan].norm() / want[~is_nan].norm()
            assert error < 4e-3, (tactic.name, number, error)
        ring = torch.from_numpy(first.given["conv_state", 0].copy()).view(torch.bfloat16)
        assert torch.equal(ring.view(state.shape).nan_to_num(nan=77.0), state.nan_to_num(nan=77.0))
    for other in seen[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(seen[0], other, strict=True))
