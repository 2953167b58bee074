"""The stream of row tiles on the CPU, thread by thread, against float64."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from w4a16_backend import Buffer, empty, run  # noqa: E402

from inkrt.builder.tactics import find_tactics  # noqa: E402
from inkrt.plugins.tactic import CallArgs, Tactic, TensorArg  # noqa: E402
from inkrt.plugins.w4a16 import ring_tactics  # noqa: E402
from inkrt.plugins.w4a16.packing import pack_bf16  # noqa: E402
from inkrt.plugins.w4a16.shapes import Dims  # noqa: E402
from inkrt.plugins.w4a16.tactics import linear  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")
BF16 = torch.bfloat16
TARGET = "sm_90a"
MOST = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def upload(emulator: Emulator, tensor: torch.Tensor) -> Buffer:
    raw = tensor.view(torch.int16) if tensor.dtype is BF16 else tensor
    return emulator.upload(raw.numpy())


def download(emulator: Emulator, buffer: Buffer, dtype: torch.dtype, width: int) -> torch.Tensor:
    return torch.from_numpy(emulator.download(buffer)).view(dtype).view(-1, width)


def arg(*shape: int) -> TensorArg:
    return TensorArg(shape, BF16)


class Group:
    """Data of a group for the widest step."""

    def __init__(self, width: int, rows: tuple[int, ...], input_of: tuple[int, ...]) -> None:
        self.width, self.rows, self.input_of = width, rows, input_of
        self.xs = [normal(i, 16, width) for i in range(max(input_of) + 1)]
        self.weights = [normal(50 + i, n, width) * width**-0.5 for i, n in enumerate(rows)]

    def tactics(self, num_tokens: int) -> list[Tactic]:
        args: CallArgs = {
            "xs": [arg(num_tokens, self.width) for _ in self.xs],
            "weights": [arg(n, self.width) for n in self.rows],
            "input_of": list(self.input_of),
        }
        return find_tactics("linear_group", TARGET, args)

    def run(self, emulator: Emulator, tactic: Tactic, valid: int = 0) -> list[torch.Tensor]:
        """Results [16, rows] in which what is not written is 0xFFFF."""
        arguments = {"num_tokens": emulator.upload(np.array([valid], np.int32))}
        for name, values in (("xs", self.xs), ("weights", [pack_bf16(w) for w in self.weights])):
            for i, value in enumerate(values):
                arguments[f"{name}.{i}" if i else name] = upload(emulator, value)
        outputs = [empty(emulator, 16 * n * 2) for n in self.rows]
        scratch = run(emulator, tactic, arguments, outputs)
        assert "error" not in scratch or not emulator.download(scratch["error"]).any()
        return [
            download(emulator, out, torch.int16, n)
            for out, n in zip(outputs, self.rows, strict=True)
        ]

    def expected(self) -> list[torch.Tensor]:
        return [
            self.xs[i].double() @ w.double().T
            for i, w in zip(self.input_of, self.weights, strict=True)
        ]


def assert_near(bits: torch.Tensor, expected: torch.Tensor) -> None:
    got = bits.view(BF16).double()
    assert torch.linalg.vector_norm(got - expected) <= 4e-3 * torch.linalg.vector_norm(expected)


GROUPS = [
    (256, (50, 16, 4), (0, 1, 0)),
    (200, (33, 6), (1, 0)),  # a width that is no whole chunk, nor vector
    pytest.param(64, (4, 40, 17), (0, 0, 0), marks=pytest.mark.slow),
    # two vectors a warp, which are one stage; three, each a stage
    pytest.param(1536, (20, 40, 1), (2, 0, 1), marks=pytest.mark.slow),
    pytest.param(2304, (100,), (0,), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("width", "rows", "input_of"), GROUPS)
@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_groups(
    folder: Path, width: int, rows: tuple[int, ...], input_of: tuple[int, ...], reverse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Blocks of several tiles, rings shorter and longer than a tile, stages ahead; T = 1, 3, 8."""
    monkeypatch.setattr(ring_tactics, "MULTIPROCESSORS", 2)
    stage = replace(ring_tactics.rings(width, 1)[0], stages=1).num_bytes
    monkeypatch.setattr(ring_tactics, "RING_BYTES", (2 * stage, stage))
    group, emulator = Group(width, rows, input_of), Emulator(folder, reverse=reverse)
    first, *others = group.tactics(MOST)
    assert others
    wide = group.run(emulator, first)
    for got, expected in zip(wide, group.expected(), strict=True):
        assert_near(got[:MOST], expected[:MOST])
        assert (got[MOST:] == -1).all()
    for tactic, count in [(t, c) for c in (1, 3) for t in group.tactics(c)[-1:]]:
        for got, expected in zip(group.run(emulator, tactic), wide, strict=True):
            assert torch.equal(got[:count], expected[:count]), (tactic.name, count)
            assert (got[count:] == -1).all()
    (kernel,) = first.kernels
    macros = [dict(kernel.defines) | {"PACE": pace} for pace in (0, 1, 5)]
    paced = [replace(first, kernels=(replace(kernel, defines=tuple(m.items())),)) for m in macros]
    for tactic in [*others, *paced]:
        for got, expected in zip(group.run(emulator, tactic), wide, strict=True):
            assert torch.equal(got, expected), tactic.name


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_no_warp_waits_for_a_stage_that_has_been_used_twice(
    folder: Path, stages: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps that are late to wait for others' first stages, in rings shorter than a tile."""
    monkeypatch.setattr(ring_tactics, "MULTIPROCESSORS", 1)
    width, rows = 2560, (16 * stages,)  # the last stage of a place is its second
    one = replace(ring_tactics.rings(width, 1)[0], stages=1).num_bytes
    monkeypatch.setattr(ring_tactics, "RING_BYTES", (stages * one,))
    group = Group(width, rows, (0,))
    (tactic,) = group.tactics(1)
    (kernel,) = tactic.kernels
    defines = dict(kernel.defines)
    assert (defines["NUM_WARPS"], defines["STAGES"]) == (10, stages)
    paced = replace(kernel, defines=tuple((defines | {"PACE": 4}).items()))
    (got,) = group.run(Emulator(folder, seed=seed, rest=True), replace(tactic, kernels=(paced,)))
    (expected,) = group.run(Emulator(folder), tactic)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("width", [256, 1280])
def test_a_single_matrix_has_the_bits_of_the_kernel_of_one_tile_a_block(
    folder: Path, width: int
) -> None:
    group, emulator = Group(width, (24,), (0,)), Emulator(folder)
    (bits,) = group.run(emulator, group.tactics(3)[0])
    tactic = linear(Dims(bf16=True), 3, rows=24, width=width)
    codes = upload(emulator, pack_bf16(group.weights[0]))
    arguments = {"x": upload(emulator, group.xs[0]), "codes": codes, "global_scale": codes}
    out = empty(emulator, 16 * 24 * 2)
    run(emulator, tactic, arguments, [out])
    assert torch.equal(download(emulator, out, torch.int16, 24), bits)


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 128), (8, 512), (13, 136)])
def test_partial_sums_are_not_rounded(folder: Path, num_tokens: int, width: int) -> None:
    emulator = Emulator(folder)
    x, weight = normal(1, num_tokens, width), normal(2, 20, width)
    args: CallArgs = {"x": arg(num_tokens, width), "weight": arg(20, width), "partial": True}
    arguments = {
        "x": upload(emulator, x),
        "weight": upload(emulator, pack_bf16(weight)),
        "num_tokens": emulator.upload(np.array([num_tokens], np.int32)),
    }
    for tactic in find_tactics("linear", TARGET, args):
        out = empty(emulator, num_tokens * 20 * 4)
        run(emulator, tactic, arguments, [out])
        got = download(emulator, out, torch.float32, 20)
        torch.testing.assert_close(
            got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize(
    ("width", "rows", "input_of"), [(256, (50, 16, 4), (0, 1, 0)), (200, (33, 6), (1, 0))]
)
def test_wide_steps(
    folder: Path, width: int, rows: tuple[int, ...], input_of: tuple[int, ...]
) -> None:
    """A step of 16 tokens of which 11 are real."""
    group, emulator = Group(width, rows, input_of), Emulator(folder)
    (tactic,) = group.tactics(16)
    results = group.run(emulator, tactic, valid=11)
    for got, expected in zip(results, group.expected(), strict=True):
        assert_near(got[:11], expected[:11])
        assert (got[11:] == -1).all()


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_head(folder: Path, cap: float, is_rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and greedy tokens of a vocabulary that fills no tile, in a weight of more rows."""
    monkeypatch.setattr(ring_tactics, "MULTIPROCESSORS", 3)
    emulator, vocab, width = Emulator(folder), 133, 264
    x, weight = normal(1, MOST, width), normal(2, vocab + 9, width) * 0.2
    weight[vocab:] = 100  # would win, were it read
    logits = x.double() @ weight.double()[:vocab].T
    logits = logits.bfloat16().double() if is_rounded else logits
    expected = cap * torch.tanh(logits / cap) if cap else logits
    seen = {}
    for count in (8, 3, 1):
        args: CallArgs = {
            "x": arg(count, width), "weight": arg(vocab + 9, width), "scales": None,
            "vocab_size": vocab, "cap": cap, "tp_size": 1, "last_row": False,
            "logits_dtype": BF16 if is_rounded else torch.float32,
        }  # fmt: skip
        arguments = {
            "x": upload(emulator, x),
            "weight": upload(emulator, pack_bf16(weight)),
            "temperature": emulator.upload(np.zeros(1, np.float32)),
            "top_k": emulator.upload(np.zeros(1, np.int32)),
            "top_p": emulator.upload(np.ones(1, np.float32)),
            "min_p": emulator.upload(np.zeros(1, np.float32)),
            "seed": emulator.upload(np.zeros(1, np.int64)),
            "position": emulator.upload(np.zeros(1, np.int32)),
            "num_tokens": emulator.upload(np.full(1, count, np.int32)),
        }
        for tactic in find_tactics("lm_head_sample", TARGET, args)[-1:]:
            outputs = [empty(emulator, 4 * count), empty(emulator, 4 * count * vocab)]
            run(emulator, tactic, arguments, outputs)
            seen[count] = download(emulator, outputs[1], torch.float32, vocab)
            # A rounding of the product that lies at the border may fall to the other side.
            bound = 2e-2 if is_rounded else 1e-4
            torch.testing.assert_close(
                seen[count].double(), expected[:count], rtol=bound, atol=bound
            )
            tokens = download(emulator, outputs[0], torch.int32, 1)[:, 0]
            assert torch.equal(tokens.long(), seen[count].argmax(dim=1))
    assert torch.equal(seen[8][:3], seen[3])
    assert torch.equal(seen[8][:1], seen[1])
