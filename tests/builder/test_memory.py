"""Arena plans are sound: by themselves, and in whole plans whose dead bytes are poisoned."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_run import run_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_model import OPTIONS, rank_states, rank_weights, small_graph
from torch import Tensor

from inkrt.builder.build import build_engine
from inkrt.builder.memory import ALIGNMENT, Lifetime, plan_arena
from inkrt.builder.options import BuildOptions
from inkrt.builder.passes import PASSES
from inkrt.builder.steps import engine_steps
from inkrt.runtime.engine_file import EngineConfig, read_config, read_plans
from inkrt.runtime.executor import Sampling, StepInput, StepOutput
from inkrt.runtime.executor.cpu import CpuExecutor
from inkrt.runtime.plan import DTYPE_BYTES, Launch, Plan, Ref, Refs, TensorSpec

Bytes = NDArray[np.bool_]


def lifetimes() -> st.SearchStrategy[list[Lifetime]]:
    sizes = st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 512, 5000]))
    one = st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        sizes,
        st.integers(0, 12),
        st.integers(0, 6),
    )
    return st.lists(one, max_size=24)


@given(lifetimes())
@settings(max_examples=300, deadline=None)
def test_arena_plans_are_sound(tensors: list[Lifetime]) -> None:
    offsets, total = plan_arena(tensors)
    assert (offsets, total) == plan_arena(list(tensors))
    assert len(offsets) == len(tensors)
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in offsets)
    placed = list(zip(offsets, tensors, strict=True))
    assert total == max((offset + x.size for offset, x in placed), default=0)
    for index, (offset, x) in enumerate(placed):
        for other_offset, y in placed[:index]:
            if x.first <= y.last and y.first <= x.last:
                assert offset + x.size <= other_offset or other_offset + y.size <= offset
    for now in range(20):
        assert total >= sum(x.size for x in tensors if x.first <= now <= x.last)


def test_bytes_are_used_again() -> None:
    chain = [Lifetime(1000, launch, launch + 1) for launch in range(10)]
    assert plan_arena(chain)[1] == 1024 + 1000
    alone = [Lifetime(1000, launch, launch) for launch in range(10)]
    assert plan_arena(alone)[1] == 1000
    assert plan_arena([]) == ([], 0)


def bytes_of(spec: TensorSpec, arena_bytes: int) -> Bytes:
    """Which bytes of the arena a tensor touches."""
    touched = np.zeros(arena_bytes, bool)
    if spec.space == "arena":
        size = DTYPE_BYTES[spec.dtype]
        start = np.array([spec.offset])
        for length, stride in zip(spec.shape, spec.strides, strict=True):
            start = (start[:, None] + np.arange(length) * stride * size).reshape(-1)
        for byte in range(size):
            touched[start + byte] = True
    return touched


def indices(launch: Launch) -> list[int]:
    read: list[int] = []
    for argument in launch.args.values():
        if isinstance(argument, Ref):
            read.append(argument.tensor)
        elif isinstance(argument, Refs):
            read += argument.tensors
    return read


def dead_bytes(plan: Plan) -> list[Bytes]:
    """Bytes that nothing will read before they are written again, after each launch."""

    def touched(tensors: list[int]) -> Bytes:
        union = np.zeros(plan.arena_bytes, bool)
        for index in tensors:
            union |= bytes_of(plan.tensors[index], plan.arena_bytes)
        return union

    live = touched(list(plan.outputs.values()))
    dead = []
    for launch in reversed(plan.launches):
        dead.append(~live)
        written, read = touched(list(launch.outputs)), touched(indices(launch))
        assert not (written & read).any(), f"{launch.op} writes what it reads"
        live = live & ~written | read
    assert not live.any(), "bytes are read before anything is written to them"
    return dead[::-1]


class PoisonedExecutor(CpuExecutor):
    """Fills all bytes of the arena that are dead with NaN, before a step and after each launch."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(folder, config)
        self.dead = {name: dead_bytes(plan) for name, plan in read_plans(folder, 0).items()}
        self.num_poisoned = 0
        self.observer = self._after_launch

    def run(self, step: str, step_input: StepInput) -> StepOutput:
        self.step, self.launch = step, 0
        self._poison(np.ones_like(self.dead[step][0]))
        return super().run(step, step_input)

    def _after_launch(self, _input: StepInput, _launch: Launch, _outputs: list[Tensor]) -> None:
        self._poison(self.dead[self.step][self.launch])
        self.launch += 1

    def _poison(self, dead: Bytes) -> None:
        self.num_poisoned += int(dead.sum())
        for rank in self._ranks:  # 0xff.. is NaN in float32 and bfloat16, and -1 in integers
            rank.memory.arena.view(torch.uint8)[: len(dead)][torch.from_numpy(dead)] = 0xFF


def steps() -> list[tuple[str, StepInput]]:
    """A prompt in two chunks, the second padded, and three tokens."""
    tokens = torch.randint(512, (32,), generator=torch.Generator().manual_seed(3)).tolist()
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=7)
    cuts = [("prefill16", 0, 16), ("prefill16", 16, 29)]
    cuts += [("decode", position, position + 1) for position in (29, 30, 31)]
    return [
        (step, StepInput(tokens[start:end], start, 0, [2, 0, 1, 3], sampling))
        for step, start, end in cuts
    ]


def run_executor(executor: CpuExecutor) -> tuple[list[StepOutput], dict[str, Tensor]]:
    """Outputs of `steps` and the state of the last rank afterwards."""
    config = executor._config
    outputs = [executor.run(step, step_input) for step, step_input in steps()]
    rank = config.tp_size - 1
    return outputs, {
        spec.name: executor.state(spec.name, rank).clone() for spec in config.state.buffers
    }


def run_graphs(folder: Path, options: BuildOptions) -> tuple[list[StepOutput], dict[str, Tensor]]:
    """The same from fused graphs, where every value has a tensor of its own."""
    weights, states = rank_weights(folder, options.tp_size), rank_states(options.tp_size)
    for state in states:
        for name, value in state.items():
            state[name] = torch.zeros_like(value[:1] if value.shape[0] == 2 else value[:4])
    graphs = {}
    for spec in engine_steps(options):
        graph = small_graph(spec, options.tp_size)
        for run_pass in PASSES:
            graph = run_pass(graph)
        graphs[spec.name] = graph
    outputs = []
    for step, given_input in steps():
        spec = graphs[step].step
        count = len(given_input.tokens)
        tokens = torch.tensor([*given_input.tokens, *[0] * (spec.num_tokens - count)])
        int32 = {
            "tokens": tokens,
            "position": torch.tensor([given_input.position]),
            "num_tokens": torch.tensor([count]),
            "slot": torch.tensor([0]),
            "page_table": torch.tensor(given_input.pages),
            "top_k": torch.tensor([0]),
        }
        inputs = {name: value.to(torch.int32) for name, value in int32.items()} | {
            "temperature": torch.tensor([given_input.sampling.temperature]),
            "top_p": torch.tensor([given_input.sampling.top_p]),
            "min_p": torch.tensor([given_input.sampling.min_p]),
            "seed": torch.tensor([given_input.sampling.seed]),
        }
        got = run_graph(graphs[step], weights, states, inputs)[0]
        outputs.append(StepOutput(got[0].numpy(), got[1].numpy()))
    return outputs, states[-1]


def assert_equal(
    got: tuple[list[StepOutput], dict[str, Tensor]],
    expected: tuple[list[StepOutput], dict[str, Tensor]],
) -> None:
    for mine, other in zip(got[0], expected[0], strict=True):
        assert np.isfinite(mine.logits).all()
        np.testing.assert_array_equal(mine.logits, other.logits)
        np.testing.assert_array_equal(mine.tokens, other.tokens)
    for name, value in got[1].items():
        assert torch.equal(value, expected[1][name]), name


@pytest.fixture(scope="module")
def engines(
    checkpoint: Path, engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    pair = tmp_path_factory.mktemp("memory") / "tp2"
    build_engine(checkpoint, pair, options_of(2))
    return {1: engine, 2: pair}


def options_of(tp_size: int) -> BuildOptions:
    return BuildOptions(
        tp_size=tp_size,
        max_verify_tokens=OPTIONS.max_verify_tokens,
        max_seq_len=OPTIONS.max_seq_len,
        towers=OPTIONS.towers,
        prefill_chunk=OPTIONS.prefill_chunk,
    )


@pytest.mark.parametrize("tp_size", [1, 2])
def test_plans_do_not_depend_on_dead_bytes(
    checkpoint: Path, engines: dict[int, Path], tp_size: int
) -> None:
    folder = engines[tp_size]
    plain = run_executor(CpuExecutor(folder, read_config(folder)))
    poisoned = PoisonedExecutor(folder, read_config(folder))
    assert_equal(run_executor(poisoned), plain)
    assert poisoned.num_poisoned > 10 * max(
        plan.arena_bytes for plan in read_plans(folder, 0).values()
    )
    assert_equal(run_graphs(checkpoint, options_of(tp_size)), plain)


FORGETFUL: dict[str, Callable[[Lifetime], Lifetime]] = {
    "all readers": lambda x: Lifetime(x.size, x.first, x.first),
    "the last reader": lambda x: Lifetime(x.size, x.first, max(x.first, x.last - 1)),
}


@pytest.mark.parametrize("forgotten", FORGETFUL)
def test_a_plan_that_forgets_readers_is_found_out(
    checkpoint: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The checks above are worth something."""
    monkeypatch.setattr(
        "inkrt.builder.lower.plan_arena",
        lambda tensors: plan_arena([FORGETFUL[forgotten](x) for x in tensors]),
    )
    build_engine(checkpoint, tmp_path / "engine", OPTIONS)
    config = read_config(tmp_path / "engine")
    with pytest.raises(AssertionError, match="writes what it reads"):
        PoisonedExecutor(tmp_path / "engine", config)
    plain = run_executor(CpuExecutor(engine, read_config(engine)))
    wrong = run_executor(CpuExecutor(tmp_path / "engine", config))
    if forgotten == "all readers":
        with pytest.raises(AssertionError):
            assert_equal(wrong, plain)
    else:  # on the CPU a launch ends before its outputs are copied to the arena
        assert_equal(wrong, plain)
