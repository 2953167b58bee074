"""What runs steps: the protocol of executors and the choice of one by an engine's target.

An executor owns the device memory of one engine (weights, state, scratch) and runs one step at a
time. It knows slots and pages as numbers only; which of them belong to whom is `runtime.state`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import EngineMismatchError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.rebuild import rebuild_with

if TYPE_CHECKING:
    from inkrt.runtime.executor.peers import RankSlice
    from inkrt.runtime.executor.round_queue import RoundQueue
    from inkrt.runtime.media.rows import FeatureRows


# Inputs of prefill steps of engines with towers, see `StepInput.features`.
FEATURE_INPUTS = ("features", "is_feature")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the rows of one step are sampled. Plain numbers, already validated.

    Noise is keyed by `seed` and the position of the token being drawn, so a draw does not depend
    on the width of the step.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: 0 <= seed < 2**63.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepInput:
    """One call of a step.

    Attributes:
        tokens: 1 to `Plan.num_tokens` token ids, for positions position..position+len(tokens)-1.
        position: of the first token, counted from 0.
        slot: ring slot of the session.
        pages: page table of the session: entry i holds positions i*page_tokens and up. It may be
            longer than needed and is valid only during the call.
        sampling: for every row.
        is_coupled: whether drafts are drawn with the noise of the target's draws at their
            positions; for the draft step.
        features: rows in place of the embeddings of some tokens; for prefill steps of engines with
            towers.
    """

    tokens: Sequence[int]
    position: int
    slot: int
    pages: Sequence[int]
    sampling: Sampling
    is_coupled: bool = False
    features: "FeatureRows | None" = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step returns.

    One row per token for decode and verify, the last row for prefill, a row per draft for draft.

    Attributes:
        tokens: int32 [rows], the token drawn after each row.
        logits: float32 [rows, vocabulary]; without rows if the caller wanted none.
        confidences: float32 [rows], of a draft step whose drafter has them; else None.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    confidences: NDArray[np.float32] | None = None


class Executor(Protocol):
    """Runs the steps of one engine: one call at a time, from any thread."""

    @property
    def rounds(self) -> "RoundQueue | None":
        """Rounds of speculation that the device runs by itself; None where it cannot.

        Calls of it are calls of the executor. A round writes the state of the positions that it is
        given, and so may the round that runs ahead of it.
        """

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        """Run a step; writes the state of its positions and reads state at or below them.

        The draft step reads below its position and writes none. If a step raises, the state of
        the positions it was to write is undefined.
        """

    def decode(self, step_input: StepInput, num_ahead: int) -> int:
        """Run the decode step on one token and give the token drawn after it.

        It may also start up to `num_ahead` steps more, each on the token that the step before
        draws, because the caller is likely to ask for just these next. They write the state of
        positions up to `position + num_ahead`, which the page table must cover, and before any
        later call does; nothing else tells whether they have run.

        Args:
            step_input: one token.
            num_ahead: most steps to run ahead of this one.
        """

    def encode(
        self, step: str, inputs: Mapping[str, NDArray[np.generic]], num_rows: int
    ) -> NDArray[np.float32]:
        """Run a step of a tower and give its feature rows, float32 [num_rows, D].

        Args:
            step: of the tower.
            inputs: by name, each of the shape that the step takes, or shorter in the first
                dimension; floating values are rounded to the input's dtype.
            num_rows: from 1 to the rows of the step.
        """

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all ring buffers of a slot."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every paged buffer."""

    @property
    def can_refit(self) -> bool:
        """Whether weights can be replaced on this device."""

    def refit(self, folder: Path, config: EngineConfig) -> None:
        """Replace all weights by those of another folder with the same plans, or change nothing.

        Not called where `can_refit` is false.

        Args:
            folder: of an engine that differs in its weights only.
            config: of that engine.
        """

    def close(self) -> None:
        """Release all memory; the executor must not be used afterwards."""


def open_executor(
    folder: Path, config: EngineConfig, rank_slice: "RankSlice | None" = None
) -> Executor:
    """Open the executor for the engine's target, with weights loaded and ready to run.

    Args:
        folder: of the engine.
        config: of the engine.
        rank_slice: the one rank that is to run, on a GPU and for times only; None for all.

    Raises:
        EngineMismatchError: this version has no executor for the target, or torch is missing.
    """
    if config.target.startswith("sm_"):
        return _open_cuda(folder, config, rank_slice)
    if rank_slice is not None:
        raise EngineMismatchError(
            f"engine {folder} is for {config.target}; a rank slice is for times on a GPU"
        )
    if config.target != "cpu":
        raise EngineMismatchError(
            f"engine {folder} was built for {config.target}, this version of inkrt runs cpu and "
            "sm_* engines; rebuild it with: "
            + rebuild_with(config.rebuild_command, "--target", "cpu")
        )
    try:
        from inkrt.runtime.executor.cpu import CpuExecutor
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise EngineMismatchError(
            f"engine {folder} was built for cpu, which needs torch: pip install 'inkrt[cpu]'"
        ) from None
    return CpuExecutor(folder, config)


def _open_cuda(folder: Path, config: EngineConfig, rank_slice: "RankSlice | None") -> Executor:
    from inkrt.runtime.executor.cuda import CudaExecutor

    try:
        return CudaExecutor(folder, config, rank_slice=rank_slice)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("cuda"):
            raise
        raise EngineMismatchError(
            f"engine {folder} was built for {config.target}, which needs cuda-core: "
            "pip install 'inkrt[cuda]'"
        ) from None
