"""Experts that go on with the next layer's projections beside the mix, on the CPU.

Ranks are processes, threads are fibers, and the two kernels of a rank that need each other run in
a thread each. The bits must be those of experts, mix and projections one by one.
"""

import numpy as np
import pytest
import torch
from rank_processes import (
    COMPILER,
    Emulator,
    Ranks,
    SharedMemory,
    run_kernel,
    run_kernels,
    run_ranks,
)
from test_conv_mix_ranks_emulated import Memory, call_args, make_arguments
from test_pushed_ranks_emulated import TARGET, Pair, moe_arguments

from inkrt.builder.tactics import find_tactics
from inkrt.plugins.moe import variants as moe_variants
from inkrt.plugins.tactic import Output, Pointer, Scratch, Tactic

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
BLOCKS, QUERIES = 8, 3  # of queries `Pair` has as many


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


class Streamed:
    """`moe_conv_mix` with weights on two ranks, with memory for several launches."""

    def __init__(
        self, name: str, width: int, num_tokens: int, rows: list[int], query_of: list[int],
        num_launches: int,
    ) -> None:  # fmt: skip
        products = [moe_arguments(name, rank) for rank in range(2)]
        num_rows = len(products[0]["x"])  # type: ignore[arg-type]
        mixes = make_arguments(num_rows, num_tokens, width, 14, 2, QUERIES, torch.bfloat16, 2)
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(n, width, generator=generator).bfloat16() for n in rows]
        more = {"weights": weights, "query_of": query_of}
        self.shared = SharedMemory(1 << 27)
        self.memories = [
            [
                Memory(self.shared, {**product, **mix, **more})
                for product, mix in zip(products, mixes, strict=True)
            ]
            for _ in range(num_launches)
        ]
        args = {**call_args(products[0]), **call_args(mixes[0]), **call_args(more)}
        self.tactics = find_tactics("moe_conv_mix", TARGET, args)
        self.apart = Pair("moe", products, width, num_tokens, 2, 1)
        self.rows, self.query_of, self.num_rows, self.width = rows, query_of, num_rows, width
        for of_launch in self.memories:
            for memory, first in zip(of_launch, self.memories[0], strict=True):
                memory.scratch = first.scratch
                memory.outputs.append(self.shared.empty(2 * num_rows * sum(rows), 0x11))
                self._pack(memory)

    def _pack(self, memory: Memory) -> None:
        for packing in self.tactics[0].packings:
            values = [memory.arguments[name] for name in packing.arguments]
            if isinstance(values[0], list):
                for i, value in enumerate(values[0]):
                    memory.given[packing.arguments[0], i] = self.shared.put(
                        packing.pack(value).numpy()
                    )
            else:
                memory.given[packing.arguments[0], 0] = self.shared.put(
                    packing.pack(*values).numpy()
                )

    def run(self, emulator: Emulator, tactic: Tactic) -> None:
        for memory in self.memories[0]:
            memory.prepare(tactic)
        for kernel in tactic.kernels:
            emulator.library(kernel)
        slot_bytes = 4 * self.num_rows * self.width
        places = Ranks(self.shared, 2, slot_bytes)

        def run(rank: int) -> None:
            emulator.reverse = rank % 2 == 1
            for of_launch in self.memories:
                table, error = places.tables[rank], places.errors[rank]
                run_kernels(
                    emulator,
                    [
                        (kernel, of_launch[rank].values(tactic, index, table, error))
                        for index, kernel in enumerate(tactic.kernels)
                    ],
                )

        run_ranks(2, run)
        self.shared.check()
        assert [int(error[0]) for error in places.errors] == [0, 0]

    def products(self, emulator: Emulator, normed: np.ndarray) -> list[np.ndarray]:
        """What `linear_group` makes of the mix's results."""
        size = 2 * self.num_rows * self.width
        memory = self.memories[0][0]
        weights = memory.arguments["weights"]
        xs = [self.shared.put(normed[i * size : (i + 1) * size]) for i in range(QUERIES)]
        args = {
            "xs": [torch.empty(self.num_rows, self.width, dtype=torch.bfloat16)] * QUERIES,
            "weights": weights, "input_of": self.query_of,
        }  # fmt: skip
        (kernel,) = find_tactics("linear_group", TARGET, call_args(args))[0].kernels
        outs = [self.shared.empty(2 * self.num_rows * n) for n in self.rows]
        spare = self.shared.empty(4)
        values = []
        for param in kernel.params:
            if isinstance(param, Pointer):
                is_input = param.argument == "xs"
                values.append(xs[param.index] if is_input else memory.given["weights", param.index])
            elif isinstance(param, Output):
                values.append(outs[param.index])
            else:
                values.append(spare if isinstance(param, Scratch) else param.value)
        run_kernel(emulator, kernel, values)
        return outs


@pytest.mark.parametrize(
    ("name", "width", "num_tokens", "rows", "query_of"),
    [
        # One tile or two of a set, some sets without any; queries out of order.
        ("T1_mxfp8_slice", 192, 1, [33, 70, 16, 5], [1, 0, 1, 2]),
        # Several rounds of tiles, blocks with inputs of two queries, rows that are not there.
        ("T7_nvfp4_slice", 128, 6, [500, 40, 1200], [0, 2, 0]),
        # Fewer tiles than blocks.
        ("T5_nvfp4_rank_of_4", 64, 5, [20, 3], [0, 0]),
    ],
)
def test_bits_are_those_of_launches_one_by_one(
    emulator: Emulator, name: str, width: int, num_tokens: int, rows: list[int],
    query_of: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Blocks: as few as can be their own router.
    monkeypatch.setattr(moe_variants, "MULTIPROCESSORS", BLOCKS)
    streamed = Streamed(name, width, num_tokens, rows, query_of, 3)
    apart = streamed.apart
    tactic = apart.apart(apart.senders[0])
    apart.run(emulator, [tactic], Ranks(apart.shared, 2, apart.slot_bytes))
    expected = apart.results(0, 0)
    products = streamed.products(emulator, expected[1])
    live = 2 * num_tokens
    for tactic in (streamed.tactics[0], streamed.tactics[-1]):
        streamed.run(emulator, tactic)
        for of_launch in streamed.memories:
            for memory in of_launch:
                got = [*memory.outputs[:2], memory.given["conv_state", 0]]
                for ours, wanted in zip(got, expected, strict=True):
                    assert np.array_equal(ours, wanted), tactic.name
                ends = (2 * streamed.num_rows * np.cumsum(rows)).tolist()
                of_all = np.split(memory.outputs[2], ends[:-1])
                for ours, wanted, n in zip(of_all, products, rows, strict=True):
                    assert np.array_equal(ours[: live * n], wanted[: live * n]), tactic.name
                    assert (ours[live * n :] == 0x11).all()
