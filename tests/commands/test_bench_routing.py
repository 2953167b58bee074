"""Experts that `ink-bench` counts: those of the operators, with the bytes that tactics count."""

from collections.abc import Sequence
from math import ceil

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from inkrt.builder.dummy import dummy_weights
from inkrt.builder.pack import PackedTensor
from inkrt.commands.bench_routing import launch_routing, step_routing, summary
from inkrt.plugins.moe.sizes import MoeDims
from inkrt.plugins.moe.tactics import moe
from inkrt.plugins.moe.variants import Variant
from inkrt.plugins.router.op import router
from inkrt.plugins.router_top_k.op import router_top_k
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.plan import Argument, Const, Launch, Plan, Ref, Space, TensorSpec

EXPERTS, OWN, TOP_K, TOKENS, HIDDEN, WIDTH = 12, 4, 3, 5, 128, 32
DIMS = MoeDims(HIDDEN, WIDTH, EXPERTS, OWN, TOP_K, "nvfp4")
INPUT = StepInput([1] * TOKENS, 100, 0, [0, 1, 2], Sampling())


class Memory:
    """A plan's tensors with their values, which it reads as a timer does."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.values: list[torch.Tensor | None] = []
        self.reads: list[tuple[str, int]] = []

    def add(
        self, value: torch.Tensor | None, space: Space, shape: tuple[int, ...] = (),
        dtype: str = "uint8",
    ) -> Ref:  # fmt: skip
        if value is not None:
            shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        name = f"t{len(self.specs)}"
        self.specs.append(TensorSpec(name, dtype, shape, (), space, name, 0))
        self.values.append(value)
        return Ref(len(self.specs) - 1)

    def pack(self, weight: Ref, num_bytes: int) -> None:
        """What kernels read in place of a weight."""
        storage = self.specs[weight.tensor].storage
        self.specs.append(TensorSpec("packed", "uint8", (num_bytes,), (1,), "weight", storage, 0))
        self.values.append(None)

    def read(
        self, step: str, step_input: StepInput, until: int, tensors: Sequence[int]
    ) -> list[NDArray[np.uint8]]:
        assert step_input is INPUT
        self.reads.append((step, until))
        found = [self.values[index] for index in tensors]
        return [x.contiguous().view(torch.uint8).flatten().numpy() for x in found if x is not None]


def moe_plan(rank: int | None, num_own: int) -> tuple[Memory, Plan, set[int]]:
    """A plan with a `moe` behind another launch, and the experts that its tokens choose."""
    generator = torch.Generator().manual_seed(7)
    memory = Memory()
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5
    bias = torch.zeros(EXPERTS)
    bias[7:] = -2.0  # so that some are chosen by nobody
    args: dict[str, Argument] = {
        "x": memory.add(x, "arena"),
        "router_weight": memory.add(weight, "weight"),
        "router_bias": memory.add(bias, "weight"),
        "gate_up": memory.add(None, "weight", (num_own, 2 * WIDTH, HIDDEN // 2)),
        "down": memory.add(None, "weight", (num_own, HIDDEN, WIDTH // 2)),
        "rank": Const(None) if rank is None else memory.add(torch.tensor([rank]).int(), "input"),
        "top_k": Const(TOP_K),
    }
    dims = MoeDims(HIDDEN, WIDTH, EXPERTS, num_own, TOP_K, "nvfp4")
    whole = num_own * dims.expert_bytes
    for name, num_bytes in (("gate_up", whole // 3), ("down", whole - whole // 3)):
        ref = args[name]
        assert isinstance(ref, Ref)
        memory.pack(ref, num_bytes)
    tactic = moe(
        dims, TOKENS, route_scale=8.0, gate_cap=4.0, up_cap=25.0, is_partial=rank is not None,
        has_rank=rank is not None, variant=Variant(by_words=False),
    )  # fmt: skip
    launches = (
        Launch("rms_norm", "t", {}, (), "", 10),
        Launch("moe", tactic.name, args, (), "layers.0.mlp", tactic.bytes),
    )
    _, ids = router(x, weight, bias, TOP_K, 8.0)
    plan = Plan("verify5", TOKENS, TOKENS, tuple(memory.specs), launches, 0, {}, {})
    return memory, plan, set(ids.flatten().tolist())


def test_all_experts_of_a_step_are_counted() -> None:
    memory, plan, chosen = moe_plan(None, EXPERTS)
    assert 3 < len(chosen) < EXPERTS
    routing = step_routing(memory, plan, INPUT)
    assert list(routing) == [1]
    assert set(memory.reads) == {("verify5", 1)}, "activations are those right before the launch"
    assert routing[1].distinct == len(chosen)
    dims = MoeDims(HIDDEN, WIDTH, EXPERTS, EXPERTS, TOP_K, "nvfp4")
    assert routing[1].expert_bytes == dims.expert_bytes
    launch = plan.launches[1]
    other = launch.bytes - ceil(dims.distinct(TOKENS) * dims.expert_bytes)
    assert other == EXPERTS * HIDDEN * 4 + TOKENS * HIDDEN * 4
    assert routing[1].bytes_of(launch) == other + len(chosen) * dims.expert_bytes
    found = summary(routing)
    assert (found["mean"], found["distinct"]) == (len(chosen), [len(chosen)])
    assert found["independent"] == pytest.approx(EXPERTS * (1 - 0.75**TOKENS))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_reads_its_own(rank: int) -> None:
    memory, plan, chosen = moe_plan(rank, OWN)
    own = chosen & set(range(rank * OWN, (rank + 1) * OWN))
    routing = launch_routing(memory, plan, plan.launches[1], INPUT, 1)
    assert routing is not None
    assert routing.distinct == len(own)
    assert routing.expert_bytes == DIMS.expert_bytes


def test_flints_experts_come_from_logits_with_ties_to_the_lowest() -> None:
    logits = torch.zeros(TOKENS, EXPERTS)
    logits[0, 9] = logits[3, 5] = 1.0  # rows are 9 0 1, 0 1 2, 5 0 1
    memory, plan, _ = moe_plan(None, EXPERTS)
    args = plan.launches[1].args | {"logits": memory.add(logits.bfloat16(), "arena")}
    launch = replace(plan.launches[1], op="flint_moe", args=args)
    plan = replace(plan, tensors=tuple(memory.specs), launches=(plan.launches[0], launch))
    _, ids = router_top_k(logits, TOP_K)
    routing = step_routing(memory, plan, INPUT)
    assert routing[1].distinct == len(set(ids.flatten().tolist())) == 5


def test_a_step_without_experts_has_no_routing() -> None:
    memory, plan, _ = moe_plan(None, EXPERTS)
    assert step_routing(memory, replace(plan, launches=plan.launches[:1]), INPUT) == {}


def test_dummy_weights_route_like_independent_tokens() -> None:
    """Of 8 tokens with nothing in common, some 60 of 384 experts; a bias of noise makes it 45."""
    made = dummy_weights(
        [
            PackedTensor("layers.0.mlp.router", (384, 1152), torch.float32),
            PackedTensor("layers.0.mlp.router_bias", (384,), torch.float32),
        ]
    )
    weight, bias = (
        torch.frombuffer(bytearray(made.templates[made.kind_of[f"layers.0.mlp.{name}"]]),
                         dtype=torch.float32)
        for name in ("router", "router_bias")
    )  # fmt: skip
    x = torch.randn(64, 8, 1152, generator=torch.Generator().manual_seed(3))
    counts = [len(router(rows, weight.view(384, -1), bias, 8, 8.0)[1].unique()) for rows in x]
    assert np.mean(counts) == pytest.approx(384 * (1 - (1 - 8 / 384) ** 8), abs=1.5)
