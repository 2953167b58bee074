"""Checks of the kernel `sample` against the operator's reference, on any backend.

The reference is torch on the CPU (plugins/sample/op.py). Tokens must be equal: noise has the same
bits, thresholds are exact, and where the last bit of a logarithm or a sum could decide, the inputs
here are not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from w4a16_backend import Backend, Buffer, empty, run
from w4a16_oracle import random_matrix, to_bits

from inkrt.plugins.noise import Purpose, gumbel, token_bits
from inkrt.plugins.sample.op import sample as reference
from inkrt.plugins.sample.op import sampling_arguments
from inkrt.plugins.tactic import Int32, KernelLaunch, Output, Pointer, Tactic
from inkrt.plugins.w4a16.sample_tactics import sample
from inkrt.plugins.w4a16.shapes import Dims
from inkrt.plugins.w4a16.tactics import lm_head

Floats = NDArray[np.float32]
Report = Callable[[str, bool, str], None]
MOST = 8
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0, "top_k": 3},
    "none": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "top_k": {"top_k": 40},
    "top_k 1": {"top_k": 1, "temperature": 3.0},
    "top_k many": {"top_k": 100_000},
    "top_p": {"top_p": 0.9},
    "top_p tiny": {"top_p": 1e-6},
    "top_p almost 1": {"top_p": 1 - 2.0**-24},
    "top_k top_p": {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
    "all": {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


@dataclass(slots=True)
class Sampler:
    """The kernel for one vocabulary, with the scratch of its earlier launches.

    Attributes:
        backend: where it runs.
        vocab: tokens of a row.
        parts: blocks of a row, None for the tactic's choice.
        threads: of a block.
        count: candidates of a row, as the head would give them.
    """

    backend: Backend
    vocab: int
    parts: int | None = None
    threads: int = 512
    count: int = 5
    scratch: dict[int, dict[str, Buffer]] = field(default_factory=dict)

    def tactic(self, num_rows: int, *, last_row: bool = False) -> Tactic:
        """The launch for T rows, with all but scratch as arguments."""
        # `x` is what backends know to be written by the kernel before.
        names = {"best": Pointer("best"), "row": Pointer("row"), "logits": Pointer("x")}
        kernel = sample(
            self.vocab, num_rows, self.count, last_row=last_row, parts=self.parts,
            threads=self.threads, names={**names, "tokens": Output(0)},
        )  # fmt: skip
        return Tactic("sample", (kernel,), 0, 0)

    def arguments(
        self, logits: Floats, position: int, num_tokens: int, sampling: dict[str, float]
    ) -> dict[str, Buffer]:
        """Everything that the kernel reads, on the device."""
        best, row = candidates(logits, self.count)
        parameters = {name: value.numpy() for name, value in sampling_arguments(**sampling).items()}
        arrays = {
            "best": best,
            "row": row,
            "x": logits,
            "position": np.array([position], np.int32),
            "num_tokens": np.array([num_tokens], np.int32),
            **parameters,
        }
        return {name: self.backend.upload(array) for name, array in arrays.items()}

    def draw(
        self, logits: Floats, *, position: int = 0, num_tokens: int | None = None, **sampling: float
    ) -> NDArray[np.int32]:
        """Tokens int32 [T]; with `num_tokens` the only row is the last of so many.

        Raises:
            RuntimeError: the kernel wrote past T, gave up waiting, or left its exchange dirty.
        """
        num_rows = len(logits)
        tactic = self.tactic(num_rows, last_row=num_tokens is not None)
        arguments = self.arguments(logits, position, num_tokens or num_rows, sampling)
        tokens = empty(self.backend, 4 * MOST)
        known = self.scratch.get(num_rows)
        scratch = run(self.backend, tactic, arguments, [tokens], known)
        self.scratch[num_rows] = scratch
        for name in ("exchange", "error"):
            if self.backend.download(scratch[name]).any():
                raise RuntimeError(f"{name} is not zero after a launch")
        result = self.backend.download(tokens).view(np.int32)
        if (result[num_rows:] != -1).any():
            raise RuntimeError("wrote past T")
        return result[:num_rows]


def candidates(logits: Floats, count: int) -> tuple[Floats, NDArray[np.int32]]:
    """Largest value and its row of `count` pieces, as the head hands them over: float32, int32."""
    pieces = np.array_split(np.arange(logits.shape[1]), count)
    best = np.full((len(logits), count), -np.inf, np.float32)
    row = np.zeros((len(logits), count), np.int32)
    for i, piece in enumerate(pieces):
        if len(piece):
            row[:, i] = piece[0] + logits[:, piece].argmax(axis=1)  # the first NaN, as in torch
            best[:, i] = np.take_along_axis(logits, row[:, i : i + 1], 1)[:, 0]
    return best, row


def expected(
    logits: Floats, *, position: int = 0, num_tokens: int | None = None, **sampling: float
) -> NDArray[np.int32]:
    """What the reference draws."""
    tokens: NDArray[np.int32] = reference(
        torch.from_numpy(logits),
        **sampling_arguments(**sampling),
        position=torch.tensor([position], dtype=torch.int32),
        num_tokens=torch.tensor([num_tokens or len(logits)], dtype=torch.int32),
        last_row=num_tokens is not None,
    ).numpy()
    return tokens


def rows_of(vocab: int, kind: str, seed: int = 0) -> Floats:
    """Eight rows of logits: "wide" as a model's, "flat", or "ties" of few distinct values."""
    generator = np.random.default_rng([seed, vocab])
    rows = generator.standard_normal((MOST, vocab)).astype(np.float32)
    if kind == "flat":
        return rows * np.float32(0.01)
    rows *= 3
    if kind == "ties":
        return rows.round()
    rows[:, generator.integers(0, vocab, 20)] += np.float32(6)
    return rows


def check(sampler: Sampler, report: Report) -> None:
    """All filters on all kinds of rows, for T = 8, and rows alone."""
    position = 1_000_003
    for kind in ("wide", "flat", "ties"):
        rows = rows_of(sampler.vocab, kind)
        for number, (name, filters) in enumerate(FILTERS.items()):
            sampling = {"seed": 2**62 + 2**33 + number, **filters}
            label = f"sample V={sampler.vocab} parts={sampler.parts} {kind} {name}"
            try:
                got = sampler.draw(rows, position=position, **sampling)
                want = expected(rows, position=position, **sampling)
                same = bool((got == want).all())
                report(label, same, "" if same else f"{got.tolist()} for {want.tolist()}")
                for first, last in ((0, 1), (3, 5), (5, 8)):
                    part = sampler.draw(rows[first:last], position=position + first, **sampling)
                    same = bool((part == got[first:last]).all())
                    report(f"{label} rows {first}..{last - 1} alone", same, str(part.tolist()))
            except RuntimeError as error:
                report(label, False, str(error))


def check_noise(backend: Backend, report: Report, count: int = 4096) -> None:
    """Words and noise of noise.cuh are those of noise.py, bit for bit, in both tails too."""
    seed, position = 2**62 + 2**40 + 17, 1_048_575
    words = token_bits(seed, torch.tensor([position]), Purpose.SAMPLE, count)[0]
    near = torch.arange(count // 4)
    given = torch.cat([words[: count // 2], near, 2**32 - 1 - near])
    names = ("seed", "position", "given")
    kernel = KernelLaunch(
        source=Path(__file__).parent / "noise_probe.cu",
        entry="noise_probe",
        defines=(("THREADS", 128),),
        grid=(1, 1, 1),
        block=(128, 1, 1),
        params=(*map(Pointer, names), Output(0), Output(1), Int32(count)),
    )
    arrays = (np.array([seed]), np.array([position], np.int32), given.numpy().astype(np.uint32))
    arguments = {name: backend.upload(value) for name, value in zip(names, arrays, strict=True)}
    outputs = [empty(backend, 4 * count), empty(backend, 4 * count)]
    run(backend, Tactic("noise", (kernel,), 0, 0), arguments, outputs)
    got = [backend.download(output) for output in outputs]
    same = np.array_equal(got[0].view(np.uint32), words.numpy().astype(np.uint32))
    report("noise words", same, "")
    wrong = int((got[1].view(np.float32) != gumbel(given).numpy()).sum())
    report("noise values", wrong == 0, f"{wrong} of {count} differ")


def special_rows(vocab: int) -> Floats:
    """Rows with NaN, infinities, zeros of both signs, and values that overflow when scaled."""
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    rows = rows_of(vocab, "wide", seed=1)
    rows[0, [vocab // 3, vocab // 2]] = -nan, inf
    rows[1, [vocab - 1, vocab // 4]] = inf
    rows[2] = -inf
    rows[3, : vocab // 2] = -inf
    rows[4] = np.where(np.arange(vocab) % 3, np.float32(-0.0), np.float32(0.0))
    rows[5] *= np.float32(1e37)
    rows[6] = nan
    rows[6, 0] = 0
    rows[7] *= np.float32(1e-40)  # subnormal
    return rows


def check_special(sampler: Sampler, report: Report) -> None:
    """Rows whose largest logit is not finite, and others at the ends of float32."""
    rows = special_rows(sampler.vocab)
    scaled = {"tiny temperature": {"temperature": 1e-4}, **FILTERS}
    for seed, (name, filters) in enumerate(scaled.items()):
        got = sampler.draw(rows, position=5, seed=seed, **filters)
        want = expected(rows, position=5, seed=seed, **filters)
        same = bool((got == want).all())
        label = f"sample V={sampler.vocab} special rows {name}"
        report(label, same, "" if same else f"{got.tolist()} for {want.tolist()}")


def check_head(backend: Backend, dims: Dims, report: Report) -> None:
    """The head with its draw: tokens are the reference's on the logits that the head wrote."""
    generator = torch.Generator().manual_seed(2)
    matrix = random_matrix(generator, dims.vocab, dims.hidden, bf16=dims.bf16)
    x = to_bits(2 * torch.randn(MOST, dims.hidden, generator=generator).double().numpy())
    x[6, 0] = 0x7FC0  # NaN: so are all logits of the row
    arrays = {"x": x, "delta": x, "norm_weight": x, "codes": matrix.packed()}
    weights = {name: backend.upload(array) for name, array in arrays.items()}
    weights["global_scale"] = backend.upload(matrix.unit)
    for name in ("greedy", "none", "all"):
        wide: NDArray[np.int32] | None = None
        for width in (8, 1, 3):
            tactic = lm_head(
                dims, width, eps=1e-6, logits=True, greedy=True, sampled=True, norm=False,
                has_delta=False,
            )  # fmt: skip
            sampling = {"seed": 77, **FILTERS[name]}
            step = {key: backend.upload(value.numpy())
                    for key, value in sampling_arguments(**sampling).items()}  # fmt: skip
            step["position"] = backend.upload(np.array([9], np.int32))
            step["num_tokens"] = backend.upload(np.array([width], np.int32))
            outputs = [empty(backend, 4 * MOST), empty(backend, 4 * MOST * dims.vocab)]
            run(backend, tactic, {**weights, **step}, outputs)
            got = backend.download(outputs[0]).view(np.int32)[:width]
            logits = backend.download(outputs[1]).view(np.float32).reshape(MOST, -1)[:width]
            same = bool((got == expected(logits, position=9, **sampling)).all())
            wide = got if wide is None else wide
            report(f"head V={dims.vocab} {name} T={width}", same, str(got.tolist()))
            report(
                f"head V={dims.vocab} {name} T={width} as T=8",
                bool((got == wide[:width]).all()),
                "",
            )
