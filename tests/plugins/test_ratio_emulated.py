"""The ratio test's kernels on the CPU, thread by thread, decide as `accept_probabilistic` does."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cubin import stacks

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from ratio_checks import (  # noqa: E402
    FILTERS,
    Block,
    Judge,
    check_blocks,
    make_block,
    with_seed,
)

from inkrt.builder.compile import compile_cubin  # noqa: E402
from inkrt.errors import BuildError  # noqa: E402
from inkrt.plugins.round.launches import ratio_test  # noqa: E402
from inkrt.plugins.tactic import GPU_TARGETS, Scratch  # noqa: E402
from inkrt.runtime.executor import Sampling  # noqa: E402
from inkrt.runtime.noise import Purpose  # noqa: E402
from inkrt.runtime.sampling import draw, probabilities  # noqa: E402

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


class Failures(list[str]):
    """Takes reports; holds those of failed checks, and counts all."""

    count = 0

    def __call__(self, name: str, ok: bool, detail: str) -> None:
        self.count += 1
        if not ok:
            self.append(f"{name}: {detail}")


# Odd sizes, tokens that do not fill a quad, parts and blocks with nothing to do, several warps.
# 91 blocks have every kind of logits with every filter.
@emulated
@pytest.mark.parametrize(
    ("vocab", "parts", "blocks", "threads", "reverse", "count"),
    [
        (131, 1, 1, 32, False, 91),
        (7, 2, 3, 32, True, 28),
        pytest.param(7, 2, 3, 32, False, 1000, marks=pytest.mark.slow),
        pytest.param(1, 1, 1, 32, False, 91, marks=pytest.mark.slow),
        pytest.param(131, 1, 1, 32, True, 2000, marks=pytest.mark.slow),
        pytest.param(26, 2, 2, 32, False, 2000, marks=pytest.mark.slow),
        pytest.param(301, 2, 3, 32, False, 1000, marks=pytest.mark.slow),
        pytest.param(1003, 3, 2, 64, True, 182, marks=pytest.mark.slow),
        pytest.param(300, 8, 5, 32, False, 182, marks=pytest.mark.slow),
        # More equal keys than a part or a row lists.
        pytest.param(1003, 1, 2, 64, False, 91, marks=pytest.mark.slow),
        pytest.param(4001, 8, 2, 32, False, 91, marks=pytest.mark.slow),
    ],
)
def test_verdicts_are_those_of_the_host(
    folder: Path, vocab: int, parts: int, blocks: int, threads: int, reverse: bool, count: int
):
    failed = Failures()
    judge = Judge(
        Emulator(folder, reverse=reverse), vocab, parts=parts, blocks=blocks, threads=threads
    )
    check_blocks(judge, count, failed, seed=count)
    assert failed == []
    assert failed.count >= count


@emulated
@pytest.mark.parametrize(
    ("num_rows", "num_drafts"),
    [(1, 7), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 7), (4, 3), (8, 5)))],
)
def test_narrow_steps_and_short_drafters(folder: Path, num_rows: int, num_drafts: int):
    failed = Failures()
    judge = Judge(Emulator(folder), 37, num_rows, num_drafts, parts=1, blocks=2, threads=32)
    check_blocks(judge, 210, failed)
    assert failed == []
    assert failed.count > 40


@emulated
def test_edges(folder: Path):
    judge = Judge(Emulator(folder), 131, parts=1, blocks=1, threads=32)
    generator = np.random.default_rng(3)
    for name in ("none", "top_k", "all"):
        accepted = set()
        for width in (1, 2, 4, 7):
            # Equal distributions: every draft stays, and the token behind them is the target's own.
            block = make_block("same", 131, FILTERS[name], width, generator)
            assert judge.verdict(block) == block.verdict
            assert judge.verdict(block)[0] == width
            # No token in common: none stays, and the token is the target's.
            block = make_block("disjoint", 131, FILTERS[name], width, generator)
            found = judge.verdict(block)
            assert found == block.verdict
            assert found[0] == 0
            assert block.logits[0, found[1]] > -np.inf
            for _ in range(6):
                block = make_block("near", 131, FILTERS[name], 7, generator)
                accepted.add(judge.verdict(block)[0])
        assert len(accepted) > 3  # so it is no constant that is compared
    # One token is possible in each row of the drafter, several in those of the target.
    block = make_block("near", 131, Sampling(temperature=1.0, top_k=1, seed=5), 7, generator)
    assert judge.verdict(block) == block.verdict
    # Without a draft: a draw from the first row, with the noise of the residual.
    for seed in range(5):
        block = make_block("near", 131, with_seed(FILTERS["top_p"], seed), 0, generator)
        place = block.anchor + 1
        wanted = draw(
            block.logits[0], block.sampling, place, purpose=Purpose.RESIDUAL, anchors=block.anchor
        )
        assert judge.verdict(block) == (0, int(wanted))


V, NUM_DRAFTS = 6, 2


def _p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-square test; cells with fewer than 5 expected count as one."""
    wanted = expected.ravel() * counts.sum()
    seen = counts.ravel()
    assert seen[wanted == 0].sum() == 0, "a token that cannot be drawn"
    is_large = wanted >= 5
    seen = np.append(seen[is_large], seen[~is_large].sum())
    wanted = np.append(wanted[is_large], wanted[~is_large].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = torch.tensor(float(((seen - wanted) ** 2 / wanted).sum()) / 2).double()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic))


@emulated
@pytest.mark.parametrize(
    ("name", "num_samples"),
    [
        ("none", 150),
        pytest.param("none", 3000, marks=pytest.mark.slow),
        pytest.param("all", 3000, marks=pytest.mark.slow),
    ],
)
def test_chains_of_rounds_follow_the_targets_distribution(
    folder: Path, name: str, num_samples: int
):
    """Three tokens behind token 0, by as many rounds as they take, of every width."""
    sampling = {
        "none": Sampling(temperature=1.0),
        "all": Sampling(temperature=1.4, top_k=4, top_p=0.85, min_p=0.1),
    }[name]
    generator = np.random.default_rng(11)
    table = (1.5 * generator.standard_normal((V, V))).astype(np.float32)
    draft_table = table + 1.2 * generator.standard_normal((V, V)).astype(np.float32)
    judge = Judge(Emulator(folder), V, NUM_DRAFTS + 1, NUM_DRAFTS, 1, 1, 32)
    samples = np.zeros((num_samples, 3), int)
    for sample in range(num_samples):
        own = with_seed(sampling, 2_654_435_761 * sample + 12345)
        tokens = [0]
        while len(tokens) < 4:
            anchor = len(tokens) - 1
            block = tokens[-1:]
            for place in range(NUM_DRAFTS):
                drawn = draw(
                    draft_table[block[-1]], own, anchor + 1 + place, purpose=Purpose.DRAFT,
                    anchors=anchor,
                )  # fmt: skip
                block.append(int(drawn))
            drafts = np.array(block[1:], np.int32)
            width = (sample + anchor) % (NUM_DRAFTS + 1)
            accepted, token = judge.verdict(
                Block(table[block], draft_table[block[:-1]], drafts, width, own, anchor)
            )
            tokens += [*block[1 : 1 + accepted], token]
        samples[sample] = tokens[1:4]
    target = probabilities(table, sampling)
    at, values = np.eye(V)[0], []
    for place in range(3):
        joint = at[:, None] * target
        at = joint.sum(0)
        values.append(_p_value(np.bincount(samples[:, place], minlength=V), at))
        if place:
            pairs = samples[:, place - 1] * V + samples[:, place]
            values.append(_p_value(np.bincount(pairs, minlength=V * V), joint))
    assert min(values) > 1e-3, values


def test_blocks_that_wait_for_each_other_fit_a_gpu():
    for vocab in (200_058, 201_024, 150_144, 32_000, 97):
        for num_rows in range(1, 9):
            first, second = ratio_test(vocab, num_rows, 7)
            assert first.grid[0] <= 132
            assert second.grid[0] <= 132
            filled = {
                param.name
                for kernel in (first, second)
                for param in kernel.params
                if isinstance(param, Scratch) and param.fill == 0
            }
            assert filled == {"exchange", "arrivals", "error"}


def test_sizes_that_the_kernels_do_not_take():
    for sizes, message in (
        ((2**18, 8, 7), "ratio test: 262144 tokens, expected 1 to 262143"),
        ((0, 8, 7), "ratio test: 0 tokens, expected 1 to 262143"),
        ((100, 9, 7), "ratio test: 9 rows, expected 1 to 8"),
        ((100, 8, 8), "ratio test: 8 drafts, expected 0 to 7"),
    ):
        with pytest.raises(BuildError, match=f"^{message}$"):
            ratio_test(*sizes)


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize(
    ("vocab", "num_rows"),
    [
        (200_058, 8),
        *(
            pytest.param(vocab, num_rows, marks=pytest.mark.slow)
            for vocab in (200_058, 201_024)
            for num_rows in (1, 2, 4, 8)
            if (vocab, num_rows) != (200_058, 8)
        ),
    ],
)
def test_code_has_no_spills(target: str, vocab: int, num_rows: int):
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    kernel, _ = ratio_test(vocab, num_rows, 7)
    found = stacks(compile_cubin(kernel.source, kernel.defines, target))
    assert {"ratio_rows", "ratio_test"} <= set(found)
    assert found["ratio_rows"] == found["ratio_test"] == 0
