"""Launches that exchange data between ranks: which calls have them, their sizes, their code."""

from dataclasses import replace

import pytest
import torch
from cubin import resources

from inkrt.builder.compile import compile_cubin
from inkrt.plugins.all_gather.tactics import find_tactics as all_gather
from inkrt.plugins.all_gather.tactics import gather, grid_of_rows
from inkrt.plugins.all_reduce.launches import MAX_BLOCKS, grid_of
from inkrt.plugins.all_reduce.tactics import find_tactics as all_reduce
from inkrt.plugins.linear_conv_mix.tactics import find_tactics as linear_conv_mix
from inkrt.plugins.lm_head_sample.tactics import find_tactics as lm_head_sample
from inkrt.plugins.moe_conv_mix.tactics import find_tactics as moe_conv_mix
from inkrt.plugins.tactic import (
    BLACKWELL,
    HOPPER,
    CallArgs,
    InputPointer,
    KernelLaunch,
    Output,
    Peers,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
)

BF16, FLOAT = torch.bfloat16, torch.float32


def reduce_args(num_tokens: int, width: int, num_ranks: int) -> CallArgs:
    x = TensorArg((num_tokens, width), FLOAT)
    return {"x": x, "dtype": BF16, "tp_size": num_ranks}


def sent(kernel: KernelLaunch) -> int:
    (num_bytes,) = {param.num_bytes for param in kernel.params if isinstance(param, Peers)}
    return num_bytes


@pytest.mark.parametrize("num_quads", [1, 128, 129, 16896, 16897, 67584, 67585, 10**7])
def test_blocks_of_a_launch_fit_a_gpu_at_once(num_quads: int) -> None:
    grid = grid_of(num_quads)
    assert 1 <= grid.blocks <= MAX_BLOCKS == 132
    assert grid.blocks == MAX_BLOCKS or grid.blocks * grid.threads >= num_quads


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 8, 9, 512])
@pytest.mark.parametrize("row_words", [4, 512, 516, 50016, 200060])
def test_rows_of_logits_share_a_gpu(num_tokens: int, row_words: int) -> None:
    """All rows of a verify step at once, each block with something of its row."""
    grid, parts = grid_of_rows(num_tokens, row_words)
    assert grid.blocks == parts * min(num_tokens, 8) <= MAX_BLOCKS
    assert 0 <= (parts - 1) * grid.threads < row_words // 4


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 9), (8, 72), (512, 132)])
def test_a_sum_sends_float32_parts(num_tokens: int, blocks: int) -> None:
    (tactic,) = all_reduce(HOPPER, reduce_args(num_tokens, 4608, 4))
    (kernel,) = tactic.kernels
    assert sent(kernel) == 4 * num_tokens * 4608
    assert kernel.grid == (blocks, 1, 1)
    assert tactic.bytes == 6 * num_tokens * 4608
    assert tactic.flops == 3 * num_tokens * 4608
    is_wide = num_tokens > 8
    assert (InputPointer("num_tokens") in kernel.params) == is_wide


@pytest.mark.parametrize(
    ("target", "width", "num_ranks"),
    [("cpu", 8, 2), (HOPPER, 6, 2), (HOPPER, 8, 1), (HOPPER, 8, 9)],
)
def test_sums_that_no_kernel_makes(target: str, width: int, num_ranks: int) -> None:
    assert all_reduce(target, reduce_args(1, width, num_ranks)) == []


def test_concatenations_are_of_whole_words() -> None:
    def found(width: int, dtype: torch.dtype, num_ranks: int = 2) -> list[KernelLaunch]:
        args: CallArgs = {"x": TensorArg((3, width), dtype), "tp_size": num_ranks}
        return [kernel for tactic in all_gather(HOPPER, args) for kernel in tactic.kernels]

    assert found(5, BF16) == found(8, FLOAT, 1) == []
    (odd,), (even,) = found(5, FLOAT), found(10, BF16)
    assert odd == even
    assert sent(odd) == 64  # of 60 bytes


def head_args(num_ranks: int, rows: int, vocab: int) -> CallArgs:
    return {
        "x": TensorArg((3, 1024), BF16), "weight": TensorArg((rows, 1024), BF16), "scales": None,
        "global_scale": None, "vocab_size": vocab, "cap": 0.0, "logits_dtype": FLOAT,
        "last_row": False, "tp_size": num_ranks,
    }  # fmt: skip


def test_heads_of_several_ranks_draw_from_all_logits() -> None:
    """The slice goes to scratch; only what all ranks have gathered is the output."""
    for tactic in lm_head_sample(HOPPER, head_args(4, 516, 2050)):
        head, push, draw = tactic.kernels
        own = Scratch("slice", 4 * 3 * 516)
        assert own in head.params
        assert Output(1) not in head.params
        assert push.params[:2] == (own, Output(1))
        assert dict(push.defines)["COLUMNS"] == dict(draw.defines)["VOCAB"] == 2050
        assert dict(head.defines)["DIM_N"] == 516
        assert Output(1) in draw.params
        assert draw.params[:2] == push.params[4:6]
    assert lm_head_sample(HOPPER, head_args(4, 516, 2050))
    assert lm_head_sample(HOPPER, head_args(4, 514, 2050)) == []


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_code_has_no_stack(target: str, num_ranks: int) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    kernels = [
        *all_reduce(target, reduce_args(8, 4608, num_ranks))[0].kernels,
        gather(
            num_ranks, 8, 200058 // 8 // 4 * 4, 190001, x=Pointer("x"), out=Output(0),
            best=(Output(1), Output(2)),
        ),
        gather(num_ranks, 3, 7, 7 * num_ranks, x=Pointer("x"), out=Output(0)),
    ]  # fmt: skip
    for kernel in kernels:
        found = resources(compile_cubin(kernel.source, kernel.defines, target))
        assert found["stack"] == 0, kernel.entry
        assert found["registers"] * kernel.block[0] <= 65536


def test_kernels_that_share_scratch_agree_on_it() -> None:
    """A mix as it is behind experts has its own `exchange`, which is smaller and full of zeros."""
    pair = next(way for way in pairs(HOPPER, "moe", 1, 2) if way.name.endswith("_words_slices"))
    renamed = pair.kernels[-1]
    (scratch,) = (
        param
        for param in renamed.params
        if isinstance(param, Scratch) and param.name == "mix_exchange"
    )
    params = tuple(
        replace(param, name="exchange") if param == scratch else param for param in renamed.params
    )
    with pytest.raises(ValueError, match="exchange"):
        replace(pair, kernels=(*pair.kernels[:-1], replace(renamed, params=params)))


def pair_args(num_tokens: int, num_ranks: int, num_former: int, num_queries: int) -> CallArgs:
    """Of the pairs of a full-size rank: the mix, the output projection and NVFP4 experts."""
    one, width = TensorArg((1,), torch.int32), 4608
    row, codes = TensorArg((num_tokens, width), BF16), torch.uint8
    own, num_experts = 2304 // num_ranks, 384
    return {
        "conv_weight": TensorArg((width, 4), FLOAT), "conv_state": TensorArg((1, 16, width), BF16),
        "position": one, "num_tokens": one, "slot": one, "residual": row,
        "sources": [row] * num_former, "queries": TensorArg((num_queries, width), FLOAT),
        "norm_weights": [TensorArg((width,), BF16)] * num_queries, "mix_eps": 1e-6,
        "norm_eps": 1e-6, "residual_dtype": BF16, "dtype": BF16, "tp_size": num_ranks,
        "weight": TensorArg((width, 6144 // num_ranks), BF16),
        "router_weight": TensorArg((num_experts, width), FLOAT),
        "router_bias": TensorArg((num_experts,), FLOAT), "rank": None,
        "gate_up": TensorArg((num_experts, 2 * own, width // 2), codes),
        "gate_up_scales": TensorArg((num_experts, 2 * own, width // 16), codes),
        "gate_up_global_scale": TensorArg((num_experts,), FLOAT),
        "down": TensorArg((num_experts, width, own // 2), codes),
        "down_scales": TensorArg((num_experts, width, own // 16), codes),
        "down_global_scale": TensorArg((num_experts,), FLOAT),
        "top_k": 8, "route_scale": 8.0, "gate_softcap": 4.0, "up_softcap": 25.0,
    }  # fmt: skip


def pairs(target: str, op: str, num_tokens: int, num_ranks: int) -> list[Tactic]:
    args = pair_args(num_tokens, num_ranks, 8, 3)
    if op == "moe":
        return moe_conv_mix(target, {**args, "x": TensorArg((num_tokens, 4608), BF16)})
    return linear_conv_mix(target, {**args, "x": TensorArg((num_tokens, 6144 // num_ranks), BF16)})


@pytest.mark.parametrize("op", ["linear", "moe"])
def test_pairs_that_push_have_kernels_of_the_same_exchange(op: str) -> None:
    for num_tokens in (1, 3, 8):
        found = pairs(HOPPER, op, num_tokens, 4)
        names = [tactic.name for tactic in found]
        assert len(set(names)) == len(names) > 0
        for tactic in found:
            *_, sender, receiver = tactic.kernels
            assert sent(sender) == sent(receiver) == 4 * num_tokens * 4608
            assert Output(0) not in sender.params
            assert Pointer("partial") not in (*sender.params, *receiver.params)
            # Scratch is by name, of all kernels of a tactic.
            sizes = {
                (param.name, param) for k in tactic.kernels for param in k.params
                if isinstance(param, Scratch)
            }  # fmt: skip
            assert len(dict(sizes)) == len(sizes)
            (shared,) = {p for p in sender.params if isinstance(p, Scratch)} & {*receiver.params}
            assert shared.name == "error"
    assert pairs(HOPPER, op, 9, 4) == pairs("cpu", op, 1, 4) == []
    assert pairs(HOPPER, op, 1, 1) == []


def test_the_mix_stands_beside_what_sends() -> None:
    """On a multiprocessor, by registers and shared memory: else it starts when the sender ends."""
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    receivers = set()
    for op, wanted in (("linear", "ring_3_slices"), ("moe", "moe_beside_slices")):
        (tactic,) = [x for x in pairs(HOPPER, op, 1, 4) if x.name == wanted]
        *_, sender, receiver = tactic.kernels
        receivers.add(receiver)
        registers = 0
        for kernel in (sender, receiver):
            found = resources(compile_cubin(kernel.source, kernel.defines, HOPPER))
            assert found["stack"] == 0
            registers += -(-found["registers"] // 8) * 8 * kernel.block[0]
        assert registers <= 65536
        assert sender.smem_bytes + receiver.smem_bytes + 2 * 1024 <= 228 * 1024
    assert len(receivers) == 1


def check_pairs(target: str, op: str, num_tokens: int, num_ranks: int) -> None:
    seen = set()
    for tactic in pairs(target, op, num_tokens, num_ranks):
        for kernel in tactic.kernels[-2:]:
            if (kernel.entry, kernel.defines) in seen:
                continue
            seen.add((kernel.entry, kernel.defines))
            found = resources(compile_cubin(kernel.source, kernel.defines, target))
            assert found["stack"] == 0, (tactic.name, kernel.entry)
            assert found["registers"] * kernel.block[0] <= 65536


@pytest.mark.slow
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("op", ["linear", "moe"])
@pytest.mark.parametrize(("num_tokens", "num_ranks"), [(1, 4), (2, 2), (4, 8), (6, 4), (8, 2)])
def test_all_pairs_that_push_have_no_stack(
    target: str, op: str, num_tokens: int, num_ranks: int
) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    # On Blackwell experts of 7 and 8 tokens spill, pushed or not.
    check_pairs(target, op, min(num_tokens, 6) if target == BLACKWELL else num_tokens, num_ranks)
