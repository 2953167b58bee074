"""A product whose launch sends its sums to all ranks, and the mix that waits for them, on the CPU.

Ranks are processes, threads are fibers. The bits must be those of the launches one by one, with
which pairs share inboxes.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from rank_processes import COMPILER, Emulator, Ranks, SharedMemory, run_kernel, run_ranks
from test_conv_mix_ranks_emulated import Memory, call_args, make_arguments

from inkrt.builder.tactics import find_tactics
from inkrt.plugins.allreduce_conv_mix.pushed import pushed_pairs, with_own_scratch
from inkrt.plugins.moe import variants as moe_variants
from inkrt.plugins.registry import plugins
from inkrt.plugins.tactic import Output, Param, Pointer, Tactic
from inkrt.runtime.executor.peers import RankSlice, describe_error

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
    pytest.mark.slow,
]
TARGET = "sm_90a"
ERROR_MBARRIER = 1


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


def linear_arguments(num_rows: int, width: int, rank: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_rows, 192, generator=generator).bfloat16()
    weight = torch.randn(width, 192, generator=generator).bfloat16()
    if num_rows > 3:  # a NaN takes its row's norm with it, and three rows behind
        x[0, 5] = float("nan")
    return {"x": x, "weight": weight, "partial": True}


def moe_arguments(name: str, rank: int) -> dict[str, object]:
    (case,) = [case for case in plugins()["moe"].cases() if case.name == name]
    return case.arguments(torch.bfloat16, torch.Generator().manual_seed(rank))


class Pair:
    """A product and the mix behind it on some ranks, with memory for several launches.

    Args:
        op: of the product.
        products: its arguments on every rank.
        num_tokens: rows that are there.
        num_former: sources in front of the new residual.
        num_launches: to have memory for.
    """

    def __init__(
        self, op: str, products: list[dict[str, object]], width: int, num_tokens: int,
        num_former: int, num_launches: int,
    ) -> None:  # fmt: skip
        num_ranks = len(products)
        num_rows = len(products[0]["x"])  # type: ignore[arg-type]
        mixes = make_arguments(
            num_rows, num_tokens, width, 14, num_former, 1 + num_former % 3, torch.bfloat16,
            num_ranks,
        )  # fmt: skip
        self.shared = SharedMemory(1 << 27)
        self.memories = [
            [
                Memory(self.shared, {**product, **mix})
                for product, mix in zip(products, mixes, strict=True)
            ]
            for _ in range(num_launches)
        ]
        self.senders = find_tactics(op, TARGET, call_args(products[0]))
        both = {**call_args(products[0]), **call_args(mixes[0])}
        self.pairs = pushed_pairs(TARGET, both, self.senders, width)
        self.mixes = {
            tactic.name: tactic
            for tactic in find_tactics("allreduce_conv_mix", TARGET, call_args(mixes[0]))
        }
        self.slot_bytes = 4 * num_rows * width
        for of_launch in self.memories:
            for memory, first in zip(of_launch, self.memories[0], strict=True):
                memory.scratch = first.scratch
                self._pack(memory)

    def _pack(self, memory: Memory) -> None:
        for packing in self.senders[0].packings:
            weights = [memory.arguments[name] for name in packing.arguments]
            packed = packing.pack(*weights)
            memory.given[packing.arguments[0], 0] = self.shared.put(packed.numpy())

    def apart(self, sender: Tactic) -> Tactic:
        """The two launches one by one, as a tactic of both."""
        *before, last = sender.kernels
        partial: Param = Pointer("partial")
        params = tuple(partial if param == Output(0) else param for param in last.params)
        mix = map(with_own_scratch, self.mixes["push_in_slices"].kernels)
        return replace(sender, name="apart", kernels=(*before, replace(last, params=params), *mix))

    def run(self, emulator: Emulator, tactics: Sequence[Tactic], places: Ranks) -> None:
        """A launch of each tactic in turn, on all ranks that run."""
        for tactic in tactics:
            for memory in self.memories[0]:
                memory.prepare(tactic)
            for kernel in tactic.kernels:
                emulator.library(kernel)

        def run(rank: int) -> None:
            emulator.reverse = rank % 2 == 1
            for of_launch, tactic in zip(self.memories, tactics, strict=True):
                for index, kernel in enumerate(tactic.kernels):
                    values = of_launch[rank].values(
                        tactic, index, places.tables[rank], places.errors[rank]
                    )
                    run_kernel(emulator, kernel, values)

        run_ranks(len(places.tables), run)
        self.shared.check()

    def results(self, launch: int, rank: int) -> list[np.ndarray]:
        memory = self.memories[launch][rank]
        return [*memory.outputs, memory.given["conv_state", 0]]


def check(emulator: Emulator, pair: Pair, ways: Sequence[Tactic]) -> None:
    """Pairs among launches one by one, as many as there is memory for: same bits, on all ranks."""
    apart = pair.apart(pair.senders[0])
    tactics = [apart, *(launch for way in ways for launch in (way, way, apart, way))]
    tactics = tactics[: len(pair.memories)]
    num_ranks = len(pair.memories[0])
    places = Ranks(pair.shared, num_ranks, pair.slot_bytes)
    pair.run(emulator, tactics, places)
    assert [int(error[0]) for error in places.errors] == [0] * num_ranks
    for launch, tactic in enumerate(tactics):
        for rank in range(num_ranks):
            for ours, expected in zip(pair.results(launch, rank), pair.results(0, 0), strict=True):
                assert np.array_equal(ours, expected), (launch, tactic.name, rank)
    # What the last launch has received is there, and nothing else.
    live = int(pair.memories[0][0].arguments["num_tokens"])  # type: ignore[call-overload]
    for inbox in places.inboxes:
        words = inbox.view(np.uint32).reshape(3, num_ranks, -1)
        is_full = (words != 0xFFFFFFFF).sum(axis=2)
        assert (
            is_full[(len(tactics) - 1) % 3].tolist()
            == [
                live * pair.slot_bytes // 4 // len(pair.memories[0][0].arguments["x"])  # type: ignore[arg-type]
            ]
            * num_ranks
        )
        assert np.delete(is_full, (len(tactics) - 1) % 3, axis=0).sum() == 0


LINEARS = [
    pytest.param(1, 1, 512, 2, id="one_row"),
    pytest.param(1, 1, 520, 3, id="two_slices_three_ranks"),
    pytest.param(3, 2, 512, 2, id="cluster_padding"),
    pytest.param(8, 5, 264, 2, id="eight_rows_padding"),
    pytest.param(8, 8, 520, 4, id="eight_rows_four_ranks"),
]


@pytest.mark.parametrize(("num_rows", "num_tokens", "width", "num_ranks"), LINEARS)
def test_linear(
    emulator: Emulator, num_rows: int, num_tokens: int, width: int, num_ranks: int
) -> None:
    products = [linear_arguments(num_rows, width, rank) for rank in range(num_ranks)]
    pair = Pair("linear", products, width, num_tokens, num_ranks % 3, 9)
    ways = {tactic.name.rpartition("_")[2]: tactic for tactic in pair.pairs}
    has_cluster = width % 512 == 0 and num_rows <= 3
    assert list(ways) == ["slices", *["cluster"][:has_cluster]]
    check(emulator, pair, [ways["slices"], ways.get("cluster", ways["slices"])])


def test_a_slice_hears_itself(emulator: Emulator) -> None:
    """What it sends comes back as if all ranks had sent the same."""
    products = [linear_arguments(2, 264, 0)] * 2
    whole, part = (Pair("linear", products, 264, 2, 1, number) for number in (1, 4))
    whole.run(emulator, [whole.apart(whole.senders[0])], Ranks(whole.shared, 2, whole.slot_bytes))
    slot_bytes = -(-part.slot_bytes // 256) * 256
    places = Ranks(part.shared, 2, slot_bytes, RankSlice(1, 2))
    part.run(emulator, [part.pairs[0]] * 4, places)
    assert int(places.errors[0][0]) == 0
    for launch in range(4):
        for ours, expected in zip(part.results(launch, 0), whole.results(0, 0), strict=True):
            assert np.array_equal(ours, expected)


def test_a_failure_is_told_before_anything_is_sent(emulator: Emulator) -> None:
    """And nobody waits any longer: the other rank does not run at all."""
    pair = Pair("linear", [linear_arguments(1, 264, rank) for rank in range(2)], 264, 1, 0, 2)
    places = Ranks(pair.shared, 2, pair.slot_bytes)
    places.errors[0][0] = ERROR_MBARRIER
    places.tables = places.tables[:1]
    pair.run(emulator, [pair.pairs[0]] * 2, places)
    assert [int(error[0]) for error in places.errors] == [ERROR_MBARRIER | 1 << 16] * 2
    assert "of rank 0 gave up" in describe_error(int(places.errors[1][0]))


@pytest.mark.parametrize(
    ("name", "width", "num_tokens"),
    [
        ("T1_mxfp8_slice", 192, 1),
        ("T7_nvfp4_slice", 128, 6),
        ("T5_nvfp4_rank_of_4", 64, 5),
    ],
)
def test_moe(
    emulator: Emulator, name: str, width: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of experts and whole ones; whole steps are in test_inkling2_ranks_emulated.py."""
    monkeypatch.setattr(moe_variants, "MULTIPROCESSORS", 8)
    products = [moe_arguments(name, rank) for rank in range(2)]
    pair = Pair("moe", products, width, num_tokens, 2, 6)
    ways = [tactic for tactic in pair.pairs if tactic.name.endswith("_slices")]
    assert [way.name.removesuffix("_slices") for way in ways] == [x.name for x in pair.senders]
    check(emulator, pair, [ways[0], ways[-1]])
