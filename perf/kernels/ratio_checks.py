"""Checks of the ratio test's kernels against `accept_probabilistic`, on any backend.

Numbers of accepted drafts and tokens must be equal: coins and noise have the same bits, and what
float64 rounds differently decides nothing here.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from w4a16_backend import Backend, Buffer, bind

from inkrt.plugins.round.launches import ratio_test
from inkrt.plugins.tactic import Tactic
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.round_state import ROUND_STATE
from inkrt.runtime.noise import Purpose
from inkrt.runtime.sampling import draw, filtered_logits, probabilities
from inkrt.runtime.spec.accept import accept_probabilistic, thresholds

Floats = NDArray[np.float32]
Report = Callable[[str, bool, str], None]
MOST_ROWS, MOST_DRAFTS = 8, 7
FILTERS: dict[str, Sampling] = {
    "none": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.3),
    "hot": Sampling(temperature=2.5),
    "min_p": Sampling(temperature=1.0, min_p=0.05),
    "min_p 1": Sampling(temperature=1.0, min_p=1.0),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_k 1": Sampling(temperature=3.0, top_k=1),
    "top_k many": Sampling(temperature=1.0, top_k=100_000),
    "top_p": Sampling(temperature=1.0, top_p=0.9),
    "top_p tiny": Sampling(temperature=1.0, top_p=1e-6),
    "top_k top_p": Sampling(temperature=1.5, top_k=20, top_p=0.8),
    "far": Sampling(temperature=0.02, top_k=60),
    "all": Sampling(temperature=1.3, top_k=50, top_p=0.9, min_p=0.02),
}
KINDS = ("near", "same", "unrelated", "disjoint", "ties", "holes", "certain")


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    """The same filters with another seed."""
    return Sampling(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        min_p=sampling.min_p, seed=seed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """A round's drafts with everything that judges them.

    Attributes:
        logits: [n, V], of the target.
        draft_logits: [g, V].
        drafts: [g].
        width: of them that are verified.
        sampling: of the request.
        anchor: position of the anchor.
    """

    logits: Floats
    draft_logits: Floats
    drafts: NDArray[np.int32]
    width: int
    sampling: Sampling
    anchor: int

    @property
    def verdict(self) -> tuple[int, int]:
        """What the host decides: accepted drafts and the token behind them."""
        verdict = accept_probabilistic(
            self.drafts[: self.width].tolist(), self.logits[: self.width + 1],
            self.draft_logits[: self.width], self.sampling, self.anchor,
        )  # fmt: skip
        return verdict.accepted, verdict.token

    @property
    def rests(self) -> list[float]:
        """R_0 .. R_{w-1} in float64, each summed without rounding."""
        p = probabilities(self.logits[: self.width + 1], self.sampling)
        q = probabilities(self.draft_logits[: self.width], self.sampling)
        drafts = self.drafts[: self.width].astype(np.int64)
        shares = [1.0, *thresholds(drafts, p, q, self.width)[1]]
        return [
            math.fsum(np.maximum(share * p[i] - q[i], 0.0))
            for i, share in enumerate(shares[: self.width])
        ]


def make_logits(kind: str, vocab: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Rows [8, V] of a target and [7, V] of a drafter.

    near: alike; same: equal; disjoint: no token in common; ties: few values; holes: most tokens
    impossible; certain: rows with one possible token, and rows with none, which count as token 0.
    """
    wide = 3 * generator.standard_normal((MOST_ROWS, vocab)).astype(np.float32)
    other = generator.standard_normal((MOST_DRAFTS, vocab)).astype(np.float32)
    p, q = wide, wide[:MOST_DRAFTS].copy()
    if kind == "near":
        q += other
    elif kind in ("unrelated", "disjoint"):
        q = 3 * other
    elif kind == "ties":
        p, q = (p / 3).round(), (p[:MOST_DRAFTS] / 3 + other).round()
    elif kind in ("holes", "certain"):
        q += other
        p[generator.random(p.shape) < 0.7] = -np.inf
        q[generator.random(q.shape) < 0.7] = -np.inf
    if kind == "disjoint" and vocab > 1:
        is_left = generator.permutation(vocab) < vocab // 2
        p[:, is_left] = -np.inf
        q[:, ~is_left] = -np.inf
    if kind == "certain":
        for rows in (p, q):
            for row in rows[generator.random(len(rows)) < 0.7]:
                row[:] = -np.inf
            token = generator.integers(vocab, size=len(rows))
            is_sure = generator.random(len(rows)) < 0.5
            rows[is_sure] = -np.inf
            rows[is_sure, token[is_sure]] = 1.5
    return p.astype(np.float32), q.astype(np.float32)


def make_block(
    kind: str, vocab: int, sampling: Sampling, width: int, generator: np.random.Generator
) -> Block:
    """A block whose drafts were drawn from the drafter's rows."""
    p, q = make_logits(kind, vocab, generator)
    anchor = int(generator.integers(2**20))
    places = anchor + 1 + np.arange(MOST_DRAFTS)
    drafts = draw(q, sampling, places, purpose=Purpose.DRAFT, anchors=np.full(7, anchor))
    return Block(p, q, drafts, width, sampling, anchor)


def make_blocks(vocab: int, count: int, seed: int = 0) -> Iterator[tuple[str, Block]]:
    """Named blocks of all kinds, filters and widths, in turns."""
    generator = np.random.default_rng([seed, vocab])
    names = list(FILTERS)
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        name = names[i // len(KINDS) % len(names)]
        width = int(generator.integers(MOST_DRAFTS + 1))
        sampling = with_seed(FILTERS[name], int(generator.integers(2**63)))
        block = make_block(kind, vocab, sampling, width, generator)
        yield f"V={vocab} {kind} {name} w={width} block {i}", block


@dataclass(slots=True)
class Judge:
    """The kernels for one vocabulary, with the scratch of their earlier launches.

    Attributes:
        backend: where they run.
        vocab: tokens of a row.
        num_rows: of the target.
        num_drafts: rows of the drafter.
        parts: see `ratio_test`, as are the others.
        blocks: likewise.
        threads: likewise.
        scratch: of earlier launches.
    """

    backend: Backend
    vocab: int
    num_rows: int = MOST_ROWS
    num_drafts: int = MOST_DRAFTS
    parts: int | None = None
    blocks: int | None = None
    threads: int = 512
    scratch: dict[str, Buffer] = field(default_factory=dict)

    @property
    def tactic(self) -> Tactic:
        """Both launches."""
        kernels = ratio_test(
            self.vocab, self.num_rows, self.num_drafts, parts=self.parts, blocks=self.blocks,
            threads=self.threads,
        )  # fmt: skip
        return Tactic("ratio", kernels, 0, 0)

    def arguments(self, block: Block) -> dict[str, Buffer]:
        """Everything that the kernels read, on the device."""
        sampling = block.sampling
        state = np.full(ROUND_STATE.itemsize, 0xFF, np.uint8).view(ROUND_STATE)
        state["width"] = block.width
        num_drafts = max(self.num_drafts, 1)
        arrays: dict[str, NDArray[np.generic]] = {
            "p_logits": block.logits[: self.num_rows],
            "q_logits": block.draft_logits[:num_drafts],
            "drafts": block.drafts[:num_drafts].astype(np.int32),
            "state": state.view(np.uint8),
            "temperature": np.array([sampling.temperature], np.float32),
            "top_k": np.array([sampling.top_k], np.int32),
            "top_p": np.array([sampling.top_p], np.float32),
            "min_p": np.array([sampling.min_p], np.float32),
            "seed": np.array([sampling.seed], np.int64),
            "position": np.array([block.anchor], np.int32),
        }
        return {name: self.backend.upload(array) for name, array in arrays.items()}

    def verdict(self, block: Block) -> tuple[int, int]:
        """Accepted drafts and the token behind them.

        Raises:
            RuntimeError: a kernel gave up waiting, left its exchange dirty, or wrote elsewhere into
                the state.
        """
        arguments = self.arguments(block)
        for bound in bind(self.backend, self.tactic, arguments, [], self.scratch):
            late = [arguments["p_logits"], arguments["q_logits"]]
            if bound.kernel.entry == "ratio_test":
                late.append(self.scratch["rows"])
            self.backend.launch(bound.kernel, bound.values, late)
        for name in ("exchange", "error"):
            if self.backend.download(self.scratch[name]).any():
                raise RuntimeError(f"{name} is not zero after a launch")
        if self.backend.download(self.scratch["arrivals"])[-8:-4].any():
            raise RuntimeError("arrivals are not zero after a launch")
        state = self.backend.download(arguments["state"]).view(ROUND_STATE)[0]
        found = int(state["accepted"]), int(state["token"])
        for name in ("width", "accepted", "token"):
            state[name] = -1
        if (state.tobytes()) != b"\xff" * ROUND_STATE.itemsize:
            raise RuntimeError("wrote elsewhere into the state")
        return found

    def rests(self, width: int) -> list[float]:
        """R_0 .. R_{w-1} of the latest block, as its blocks of threads have left them."""
        blocks = self.tactic.kernels[1].grid[0]
        raw = self.backend.download(self.scratch["arrivals"])
        sums = raw[: width * blocks * 8].view(np.float64).reshape(width, blocks)
        return [math.fsum(row) for row in sums]

    def wrong_filters(self, block: Block) -> int:
        """Rows of the latest block of which the kernels keep other tokens than the host."""
        num_drafts = min(self.num_drafts, self.num_rows - 1)
        raw = self.backend.download(self.scratch["rows"])
        num_rows = self.num_rows + num_drafts
        floors = raw[-(-raw.size // 8) * 8 - 8 * (-(-num_rows // 2)) :].view(np.uint32)[:num_rows]
        wrong = 0
        for i, logits in enumerate((*block.logits[: self.num_rows], *block.draft_logits)):
            is_target = i < self.num_rows
            is_read = i <= block.width if is_target else i - self.num_rows < block.width
            if not is_read or not np.isfinite(logits.max()):
                continue
            scaled = logits / np.float32(block.sampling.temperature)
            bits = (scaled + np.float32(0)).view(np.uint32)
            keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
            kept = filtered_logits(logits, block.sampling) > -np.inf
            wrong += bool((((keys >= floors[i]) & (scaled > -np.inf)) != kept).any())
        return wrong


def check_blocks(judge: Judge, count: int, report: Report, seed: int = 0) -> None:
    """Verdicts and filters are the host's, and R is that of float64."""
    for name, block in make_blocks(judge.vocab, count, seed):
        if block.width >= judge.num_rows or block.width > judge.num_drafts:
            continue
        try:
            found, wanted = judge.verdict(block), block.verdict
            report(name, found == wanted, f"{found} for {wanted}")
            wrong = judge.wrong_filters(block)
            report(f"{name}: filters", wrong == 0, f"of {wrong} rows")
            if block.width:
                error = np.abs(np.subtract(judge.rests(block.width), block.rests)).max()
                report(f"{name}: R", bool(error < 1e-12), f"off by {error:.2g}")
        except RuntimeError as failure:
            report(name, False, str(failure))
