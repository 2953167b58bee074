"""Draft step and drafter's context of a rank of the full size: kernels, bytes, resources."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from inkrt.builder.compile import Compiler
from inkrt.builder.lower import Target, lower, start_compiling
from inkrt.builder.passes import passes_for
from inkrt.builder.trace import trace
from inkrt.engines.dspark.config import DraftLayerConfig, DSparkConfig
from inkrt.engines.dspark.model import Drafter, DraftStep
from inkrt.engines.interface import DraftTarget, StateOptions, StepInputs
from inkrt.engines.parts import ink
from inkrt.runtime.engine_file import DRAFT_STEP, StepSpec
from inkrt.runtime.plan import PeersParam, Plan

# The target of Inkling-2-Small; the drafter's sizes are those published for others.
TARGET = DraftTarget(4608, 48, 201_024, 200_058, 1_048_576, 30.0, True, True)
FULL = DSparkConfig(
    hidden_size=4608,
    target_hidden_size=4608,
    layers=(DraftLayerConfig(False, None),) * 5,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12_288,
    rms_norm_eps=1e-6,
    rope_theta=8e6,
    max_position_embeddings=1_048_576,
    block_size=7,
    anchor_first=True,
    mask_token_id=200_064,
    taps=(1, 12, 23, 35, 46),
    tap_point="layer_output",
    head="rnn",
    markov_rank=256,
    vocab_size=201_024,
    draft_vocab_size=201_024,
    is_trimmed=False,
    has_confidence=True,
    confidence_reads_markov=True,
    confidence_has_bias=True,
    has_own_embedding=False,
    has_own_unembed=False,
    applies_embed_norm=False,
    softcap_place="before_bias",
    logits_divisor=1.0,
    has_sinks=False,
)
STATE = StateOptions(num_slots=1, max_seq_len=8192, page_tokens=64)
BF16 = torch.bfloat16


class Context(nn.Module):
    """What a step of the target does for the drafter, behind features that it has."""

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.drafter = Drafter(FULL, TARGET.unpadded_vocab_size, tp_size, BF16, STATE)
        self.features = nn.ParameterList(
            nn.Parameter(torch.empty(8, 4608, dtype=BF16, device="meta")) for _ in FULL.taps
        )

    def row_parallel_weights(self) -> frozenset[str]:
        return frozenset()

    def forward(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        self.drafter.write_context(list(self.features), step)
        rows = ink.concat([self.features[0]], 0)  # a plan needs an output of its own
        return rows, rows


def plan_of(module: nn.Module, step: StepSpec, tp_size: int, target: Target) -> Plan:
    graph = trace(module, step, STATE, tp_size, BF16)
    for run_pass in passes_for(target.name):
        graph = run_pass(graph)
    start_compiling(graph, target)
    return lower(graph, target)


def plans(tp_size: int, target: Target) -> tuple[Plan, Plan]:
    """Of the draft step and of the context of eight tokens."""
    layers = FULL.layers[:2]  # all are the same
    config = dataclasses.replace(FULL, layers=layers)
    draft = DraftStep(config, TARGET, 1e-6, tp_size, BF16, STATE)
    return (
        plan_of(draft, StepSpec(DRAFT_STEP, 1, 7), tp_size, target),
        plan_of(Context(tp_size), StepSpec("verify8", 8, 8), tp_size, target),
    )


@pytest.fixture(params=[4, 8])
def tp_size(request: pytest.FixtureRequest) -> int:
    return request.param


class NoCompiler(Compiler):
    """Names kernels without compiling them."""

    def start(self, kernels: object) -> None:
        pass

    def compile(self, kernel: object) -> str:  # noqa: ARG002
        return "none"


def test_bytes_of_a_rank_are_its_share(tp_size: int) -> None:
    """What the least time of a draft step is made of."""
    draft, context = plans(tp_size, Target("sm_90a", NoCompiler("sm_90a")))
    of_op: dict[str, int] = {}
    for launch in (*draft.launches, *context.launches):
        assert launch.kernels, launch.op
        of_op[launch.op] = of_op.get(launch.op, 0) + launch.bytes
    (head,) = (launch for launch in draft.launches if launch.op == "draft_head")
    tokens = -(-200_058 // (4 * tp_size)) * 4
    table, mixing = tokens * 256 * 2, 768 * (512 + 4608) * 2
    assert 7 * table + mixing < head.bytes < 7 * (table + 8 * tokens) + 2 * mixing
    (unembed,) = (x for x in draft.launches if x.op == "linear" and x.bytes > 4608 * tokens * 2)
    assert unembed.bytes < 1.01 * 4608 * tokens * 2
    # Two sums a layer, and the row-parallel products in front of them, of half the step's width.
    assert [launch.op for launch in draft.launches].count("all_reduce") == 2 * 2
    rows = 2 * (2 * 6144 + 3 * 12_288 + 2 * 1024) * 4608 * 2 // tp_size
    products = sum(x.bytes for x in draft.launches if x.op in ("linear", "linear_group"))
    assert rows < products - unembed.bytes < 1.05 * rows
    features = [launch for launch in context.launches if launch.op == "linear"]
    assert len(features) == 5
    assert sum(x.bytes for x in features) < 1.05 * 5 * 4608 * 4608 * 2 // tp_size
    peers = {
        param.num_bytes
        for launch in draft.launches
        for kernel in launch.kernels
        for param in kernel.params
        if isinstance(param, PeersParam)
    }
    assert peers == {7 * 4608 * 4, 16 + tokens * 4}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["sm_90a", "sm_100a"])
def test_kernels_compile_and_fit(tp_size: int, name: str) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    sys.path.append(str(Path(__file__).parents[1] / "plugins"))
    from cubin import resources

    compiler = Compiler(name)
    try:
        both = plans(tp_size, Target(name, compiler))
    finally:
        compiler.stop()
    entries = set()
    for kernel in (k for plan in both for launch in plan.launches for k in launch.kernels):
        used = resources(compiler.cubins[kernel.cubin])
        threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
        assert used["registers"] * threads <= 65_536, kernel.entry
        # NVRTC spills eight registers there of the kernel that it is told to keep to 128.
        most = 32 if (name, kernel.entry) == ("sm_100a", "head_logits") else 0
        assert used["stack"] <= most, (kernel.entry, used)
        assert kernel.smem_bytes <= 232_448, kernel.entry
        entries.add(kernel.entry)
    assert {"share_row", "head_logits", "next_row", "all_reduce", "all_gather"} <= entries
    assert {"sum_parts", "kv_write", "attend"} <= entries
