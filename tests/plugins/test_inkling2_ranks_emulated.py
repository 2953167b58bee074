"""Steps of a small Inkling-2 and its drafter on two ranks: GPU kernels on the CPU, one by one.

Ranks are processes and threads are fibers; the same engine for the CPU says what must come out.
"""

import ast
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rank_processes import COMPILER, Emulator, Ranks, SharedMemory, run_kernel, run_ranks

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.plugins.tactic import KernelLaunch, Scratch
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import (
    DRAFT_STEP,
    EngineCode,
    EngineConfig,
    read_code,
    read_config,
)
from inkrt.runtime.executor import Sampling
from inkrt.runtime.plan import (
    DTYPE_BYTES,
    Kernel,
    PeersParam,
    Plan,
    TensorParam,
    TensorSpec,
    slot_bytes,
    weight_specs,
)

pytest.importorskip("inkrt.plugins.allreduce_conv_mix.tactics")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
MODEL = Path(__file__).parents[2] / "engines/nano/checkpoint/config.json"
STEPS = (("decode", [5], 0), ("verify3", [700, 33, 1234], 1), ("decode", [8], 4))
DRAFT = (DRAFT_STEP, [9], 5)
# A drafter of one layer, with taps of a model of two.
DRAFTER = {
    "dspark_target_layer_ids": [0, 1],
    "dspark_num_hidden_layers": 1,
    "dspark_layer_types": ["full_attention"],
}
# A launch of a bf16 model that adds in another order.
NEAR = 2e-2


def build(folder: Path, target: str, **changes: Any) -> Path:
    options = BuildOptions(
        target=target, tp_size=2, max_seq_len=512, weights="dummy", spec="dspark",
        keep_intermediates=True,
    )  # fmt: skip
    options = replace(options, **changes)
    name = "-".join([target, *map(str, changes.values())])
    build_engine(folder / "model", folder / name, options)
    return folder / name


class Rank:
    """One rank's memory, and its kernels."""

    def __init__(
        self, emulator: Emulator, memory: SharedMemory, code: EngineCode, config: EngineConfig,
        rank: int, ranks: Ranks,
    ) -> None:  # fmt: skip
        self.emulator, self.code, self.rank, self.ranks = emulator, code, rank, ranks
        specs = weight_specs(code.plans)
        self.named: dict[tuple[str, str], NDArray[np.uint8]] = {
            ("weight", name): memory.put(
                np.resize(np.frombuffer(code.templates[kind], np.uint8), size_of(specs[name]))
            )
            for name, kind in code.template_of.items()
        }
        for buffer in config.state.buffers:
            size = math.prod(buffer.shape) * DTYPE_BYTES[buffer.dtype]
            self.named["state", buffer.name] = memory.empty(size)
        arena = max(plan.arena_bytes for plan in code.plans.values())
        self.named["arena", ""] = memory.empty(arena, 0x3C)
        self.scratch: dict[str, NDArray[np.uint8]] = {}
        for step in {name for name, _, _ in (*STEPS, DRAFT) if name in code.plans}:
            plan = code.plans[step]
            self.scratch[step] = memory.empty(max(plan.scratch_bytes, 16))
            for fill in plan.fills:
                self.scratch[step][fill.offset : fill.offset + fill.size] = fill.value
            for name in plan.inputs:
                if ("input", name) not in self.named:
                    self.named["input", name] = memory.empty(4096)

    def bytes_of(self, step: str, spec: TensorSpec) -> NDArray[np.uint8]:
        if spec.space == "scratch" and spec.name.startswith("error."):
            return self.ranks.errors[self.rank].view(np.uint8)
        is_scratch = spec.space == "scratch"
        memory = self.scratch[step] if is_scratch else self.named[spec.space, spec.storage]
        return memory[spec.offset : spec.offset + size_of(spec)]

    def kernel(self, plan: Plan, kernel: Kernel) -> KernelLaunch:
        """With the scratch by which the emulator knows that blocks wait for each other."""
        source, defines = ast.literal_eval(self.code.cubins[kernel.cubin].decode())
        specs = [plan.tensors[p.tensor] for p in kernel.params if isinstance(p, TensorParam)]
        scratch = tuple(
            Scratch(spec.name.rpartition(".")[0], 0) for spec in specs if spec.dtype == "uint8"
        )
        launch = KernelLaunch(Path(source), kernel.entry, defines, kernel.grid, kernel.block, ())
        return replace(launch, params=scratch, cluster=kernel.cluster, smem_bytes=kernel.smem_bytes)

    def run(self, step: str, tokens: Sequence[int], position: int) -> None:
        plan = self.code.plans[step]
        given = {
            "tokens": tokens, "position": [position], "num_tokens": [len(tokens)],
            "rank": [self.rank], "page_table": range(8), "top_p": [1.0], "is_coupled": [1],
            "wants_logits": [1],
        }  # fmt: skip
        for name, index in plan.inputs.items():
            memory, dtype = self.named["input", name], np.dtype(plan.tensors[index].dtype)
            data = np.array(list(given.get(name, [])), dtype).view(np.uint8)
            memory[:] = 0
            memory[: data.size] = data
        for launch in plan.launches:
            for kernel in launch.kernels:
                values = [
                    self.bytes_of(step, plan.tensors[param.tensor])
                    if isinstance(param, TensorParam)
                    else self.ranks.tables[self.rank]
                    if isinstance(param, PeersParam)
                    else param.value  # type: ignore[union-attr]
                    for param in kernel.params
                ]
                run_kernel(self.emulator, self.kernel(plan, kernel), values)


def size_of(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model of two layers; what is built of it has sources for code."""

    def compile_cubin(source: Path, defines: Sequence[object], _target: str) -> bytes:
        return repr((str(source), tuple(defines))).encode()

    monkeypatch.setattr("inkrt.builder.compile.compile_cubin", compile_cubin)
    monkeypatch.setattr("inkrt.builder.build.compile_cubin", compile_cubin)
    model = json.loads(MODEL.read_text()) | DRAFTER
    model |= {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(model))
    return tmp_path


class BothRanks:
    """Two ranks of an engine that was built for a GPU."""

    def __init__(self, emulator: Emulator, folder: Path) -> None:
        config, codes = read_config(folder), [read_code(folder, rank) for rank in range(2)]
        self.memory = memory = SharedMemory(1 << 27)
        self.plans = codes[0].plans
        self.ranks = Ranks(memory, 2, slot_bytes(self.plans.values()))
        self.both = [
            Rank(emulator, memory, codes[rank], config, rank, self.ranks) for rank in range(2)
        ]
        for plan in (self.plans[step] for step, _, _ in (*STEPS, DRAFT) if step in self.plans):
            for launch in plan.launches:
                for kernel in launch.kernels:
                    emulator.library(self.both[0].kernel(plan, kernel))

    def run(self, step: str, tokens: Sequence[int], position: int) -> None:
        run_ranks(2, lambda rank: self.both[rank].run(step, tokens, position))
        self.memory.check()
        assert [int(error[0]) for error in self.ranks.errors] == [0, 0]


def test_pushed_sums_have_the_bits_of_others(folder: Path) -> None:
    """Whole steps, on both ranks: products that send their sums, and mixes that do."""
    emulator = Emulator(folder)
    found = []
    for sums in ("mix", "pushed"):
        changes = {"sums": sums, "spec": "none", "keep_intermediates": False}
        engine = BothRanks(emulator, build(folder, "sm_90a", **changes))
        plan = engine.plans["decode"]
        ops = Counter(launch.op for launch in plan.launches)
        exchanges = ("linear", "moe", "allreduce_conv_mix", "linear_conv_mix", "moe_conv_mix")
        # Behind the last layer there is a mix, too; one product is of no rank's part alone.
        found.append([ops[name] for name in exchanges])
        seen: list[Any] = []
        for step, tokens, position in STEPS:
            engine.run(step, tokens, position)
            plan = engine.plans[step]
            for rank in engine.both:
                seen += [rank.bytes_of(step, plan.tensors[i]).copy() for i in plan.outputs.values()]
        for rank in engine.both:
            seen += [data.copy() for (space, _), data in rank.named.items() if space == "state"]
        found.append(seen)
    of_mix, expected, of_pushed, got = found
    assert of_mix[3:] == [0, 0]
    assert of_pushed == [of_mix[0] - 2, of_mix[1] - 2, of_mix[2] - 4, 2, 2]
    assert len(got) == len(expected) > 0
    for ours, other in zip(got, expected, strict=True):
        assert np.array_equal(ours, other)


def test_steps_are_those_of_the_cpu(folder: Path) -> None:
    expected: list[list[list[torch.Tensor]]] = []
    with Engine.open(build(folder, "cpu")) as on_cpu, on_cpu.session() as session:
        on_cpu.executor.observer = lambda _, __, outputs: expected[-1].append(  # type: ignore[attr-defined]
            [x.clone() for x in outputs]
        )
        for _, tokens, _ in STEPS:
            expected.append([])
            session.step(tokens, Sampling())
        expected.append([])
        session.draft(DRAFT[1][0], Sampling(), coupled=True, wants_logits=True)
    engine = BothRanks(Emulator(folder), build(folder, "sm_90a"))
    both = engine.both
    for (step, tokens, position), wanted in zip((*STEPS, DRAFT), expected, strict=True):
        engine.run(step, tokens, position)
        plan = engine.plans[step]
        for launch, outputs in zip(plan.launches, wanted, strict=True):
            for index, want in zip(launch.outputs, outputs, strict=True):
                spec = plan.tensors[index]
                data = torch.from_numpy(both[0].bytes_of(step, spec).copy())
                got = data.view(want.dtype).view(want.shape).double()
                theirs = want.double()
                if launch.op == "draft_head":
                    # Only the first row has the same token before it in any case.
                    if want.dtype == torch.int32:
                        continue
                    got, theirs = got[:1], theirs[:1]
                error = (got - theirs).norm() / theirs.norm().clamp(min=1e-30)
                assert error < NEAR, (step, launch.op, launch.module, float(error))
        if step == DRAFT_STEP:
            drawn, logits = (
                both[0].bytes_of(step, plan.tensors[plan.outputs[name]]).copy()
                for name in ("tokens", "logits")
            )
            rows = torch.from_numpy(logits.view(np.float32).reshape(7, -1))
            assert drawn.view(np.int32).tolist() == rows.argmax(1).tolist()
        for index in plan.outputs.values():
            first, second = (rank.bytes_of(step, plan.tensors[index]) for rank in both)
            assert np.array_equal(first, second)
