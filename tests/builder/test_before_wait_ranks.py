"""Launches of several ranks touch nothing but the table of peers before they wait.

As in `test_before_wait`; no other engine of the tests has such launches. What waits for words, not
for launches, may read what is older than the launch that sends them.
"""

import pytest
import torch

from inkrt.plugins.all_gather.tactics import gather
from inkrt.plugins.all_reduce.launches import ERROR
from inkrt.plugins.all_reduce.tactics import find_tactics as all_reduce
from inkrt.plugins.linear_conv_mix.tactics import find_tactics as linear_conv_mix
from inkrt.plugins.moe_conv_mix.tactics import find_tactics as moe_conv_mix
from inkrt.plugins.tactic import (
    CallArgs,
    InputPointer,
    KernelLaunch,
    Output,
    Param,
    Peers,
    Pointer,
    Scratch,
    TensorArg,
)

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")

from ptx import compile_ptx, touched_before_wait, triggers_before_wait

BF16, FLOAT, INT = torch.bfloat16, torch.float32, torch.int32
WIDTH = 1024


def touched(kernel: KernelLaunch) -> set[Param]:
    """Parameters of what a kernel touches before it waits."""
    numbers = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
    return {kernel.params[number] for number in numbers}


def triggers_early(kernel: KernelLaunch) -> bool:
    """Whether a kernel releases the next one before it waits."""
    return triggers_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)


def test_launches_of_several_ranks_touch_the_table_of_peers_only() -> None:
    args: CallArgs = {"x": TensorArg((8, 256), FLOAT), "dtype": BF16}
    (reduce,) = all_reduce("sm_90a", {**args, "tp_size": 4})
    x, out = Pointer("x"), Output(0)
    best = (Output(1), Output(2))
    for kernel in (
        *reduce.kernels,
        gather(4, 8, 64, 250, x=x, out=out, best=best),
        gather(4, 512, 7, 28, x=x, out=out),
    ):
        assert touched(kernel) == {param for param in kernel.params if isinstance(param, Peers)}


def mix_args(num_tokens: int) -> CallArgs:
    one, rows = TensorArg((1,), INT), TensorArg((num_tokens, WIDTH), BF16)
    return {
        "conv_weight": TensorArg((WIDTH, 4), FLOAT), "conv_state": TensorArg((1, 16, WIDTH), BF16),
        "position": one, "num_tokens": one, "slot": one, "residual": rows, "sources": [rows] * 2,
        "queries": TensorArg((1, WIDTH), FLOAT), "norm_weights": [TensorArg((WIDTH,), BF16)],
        "mix_eps": 1e-6, "norm_eps": 1e-6, "residual_dtype": BF16, "dtype": BF16, "tp_size": 4,
    }  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_pairs_that_push_read_early_what_is_older_than_the_sender(num_tokens: int) -> None:
    x = {"x": TensorArg((num_tokens, 256), BF16), "weight": TensorArg((WIDTH, 256), BF16)}
    tactics = linear_conv_mix("sm_90a", {**mix_args(num_tokens), **x})
    assert {tactic.name.rpartition("_")[2] for tactic in tactics} == {"slices", "cluster"}
    for tactic in {tactic.name.rpartition("_")[2]: tactic for tactic in tactics}.values():
        sender, receiver = tactic.kernels
        # Else the receiver could start while older launches still run.
        assert not triggers_early(sender)
        assert triggers_early(receiver)
        early = {p for p in touched(sender) if not isinstance(p, Peers)} - {ERROR}
        assert early == {Pointer("weight")}
        early = touched(receiver)
        assert Pointer("sources", 1) in early  # it does not wait for them
        # As of any kernel.
        assert not [param for param in early if isinstance(param, Output)]
        own = {param.name for param in early if isinstance(param, Scratch)}
        assert own <= {"mix_exchange", "error"}


def test_experts_that_push_touch_weights_and_peers_only() -> None:
    num_experts, width, byte = 16, 64, torch.uint8
    experts: CallArgs = {
        "x": TensorArg((1, WIDTH), BF16), "router_weight": TensorArg((num_experts, WIDTH), FLOAT),
        "router_bias": TensorArg((num_experts,), FLOAT), "rank": None,
        "gate_up": TensorArg((num_experts, 2 * width, WIDTH // 2), byte),
        "gate_up_scales": TensorArg((num_experts, 2 * width, WIDTH // 16), byte),
        "gate_up_global_scale": TensorArg((num_experts,), FLOAT),
        "down": TensorArg((num_experts, WIDTH, width // 2), byte),
        "down_scales": TensorArg((num_experts, WIDTH, width // 16), byte),
        "down_global_scale": TensorArg((num_experts,), FLOAT),
        "top_k": 4, "route_scale": 1.0, "gate_softcap": 4.0, "up_softcap": 25.0,
    }  # fmt: skip
    weights = {
        Pointer(name) for name in experts if name not in ("x", "rank") and "scales" not in name
    }
    tactics = moe_conv_mix("sm_90a", {**mix_args(1), **experts})
    for tactic in (tactics[0], tactics[-1]):
        *_, sender, _ = tactic.kernels
        assert not triggers_early(sender)
        assert InputPointer("num_tokens") in sender.params
        assert {p for p in touched(sender) if not isinstance(p, Peers)} <= weights, tactic.name
