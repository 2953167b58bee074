"""Parity of an engine with the reference implementation in transformers, logit by logit.

Both sides see the same tokens in the same steps: the reference runs its own cached forward on the
chunks that the session takes, and token by token where the session takes a decode or verify step
(whose rows do not depend on the width). What is left is arithmetic, not a different order of work.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkrt.errors import CheckpointError, EngineMismatchError
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.plan import Launch

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of one row of logits to the reference's.

    Attributes:
        relative_error: ||ours - reference|| / ||reference||.
        kl: KL(reference || ours) of the next-token distributions, in nats.
        same_top1: whether the most likely tokens agree.
        same_bits: whether all logits are equal.
    """

    relative_error: float
    kl: float
    same_top1: bool
    same_bits: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """Both sides' logits of one run, to be compared with a third's.

    Attributes:
        prompt: its tokens.
        decoded: tokens that were fed after it.
        ours: float32 [1 + decoded, vocabulary], of the engine; row 0 is the prompt's last.
        reference: the same rows of the reference.
    """

    prompt: list[int]
    decoded: list[int]
    ours: NDArray[np.float32]
    reference: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptReport:
    """One prompt in one chunking, then decoded tokens.

    Attributes:
        prompt_tokens: length of the prompt.
        chunk: most tokens per prefill step; None for as many as fit.
        rows: the prompt's last row, then one per decoded token.
        first_divergence: (decoded tokens before, layer) of the first layer output that differs in
            any bit; None if none does.
        trace: the logits themselves; None if all are equal bit for bit.
    """

    prompt_tokens: int
    chunk: int | None
    rows: list[Distance]
    first_divergence: tuple[int, int] | None
    trace: Trace | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """All but the trace."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "chunk": self.chunk,
            "rows": [asdict(row) for row in self.rows],
            "first_divergence": self.first_divergence,
        }

    @property
    def max_relative_error(self) -> float:
        """Worst row; NaN if one is."""
        return float(np.max([row.relative_error for row in self.rows]))

    @property
    def mean_relative_error(self) -> float:
        """Mean over the rows."""
        return float(np.mean([row.relative_error for row in self.rows]))

    @property
    def max_kl(self) -> float:
        """Worst row, in nats."""
        return max(row.kl for row in self.rows)

    @property
    def top1_agreement(self) -> float:
        """Share of rows, 0 to 1."""
        return float(np.mean([row.same_top1 for row in self.rows]))

    @property
    def equal_rows(self) -> float:
        """Share of rows whose logits are equal bit for bit, 0 to 1."""
        return float(np.mean([row.same_bits for row in self.rows]))


def compare_logits(ours: NDArray[np.float32], reference: NDArray[np.float32]) -> Distance:
    """Compare two rows of logits in float64."""
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    log_p, log_q = _log_softmax(b), _log_softmax(a)
    return Distance(
        relative_error=float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        kl=max(float(np.sum(np.exp(log_p) * (log_p - log_q))), 0.0),
        same_top1=int(a.argmax()) == int(b.argmax()),
        same_bits=bool(np.array_equal(ours, reference)),
    )


class Reference:
    """The checkpoint in transformers, eager, in the engine's dtype or a wider one.

    Raises:
        CheckpointError: from the constructor, if transformers cannot load it.
    """

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        if not checkpoint.is_dir():
            raise CheckpointError(
                f"checkpoint {checkpoint} is not a folder; name the one that the engine was "
                f"built from"
            )
        if checkpoint.suffix == ".gguf" or any(checkpoint.glob("*.gguf")):
            raise CheckpointError(
                f"{checkpoint}: transformers does not read NVFP4 GGUF files; name a safetensors "
                f"checkpoint of the same weights"
            )
        try:
            has_vision = hasattr(AutoConfig.from_pretrained(checkpoint), "vision_config")
            model_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
            self.model = model_class.from_pretrained(
                checkpoint,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                experts_implementation="eager",
            ).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"transformers cannot load {checkpoint}: {error}") from error
        text_model = getattr(self.model.model, "language_model", self.model.model)
        # By visit: a looped model comes to a layer several times.
        self.layer_outputs: list[Tensor] = []
        for layer in text_model.layers:
            layer.register_forward_hook(self._record)
        self._cache: Any = None

    def reset(self) -> None:
        """Start a new sequence."""
        self._cache = None

    def feed(self, tokens: list[int]) -> NDArray[np.float32]:
        """Append tokens in one forward; gives the last row of logits."""
        (row,) = self.feed_rows(tokens, 1)
        logits: NDArray[np.float32] = row
        return logits

    @torch.no_grad()
    def feed_rows(self, tokens: list[int], num_rows: int) -> NDArray[np.float32]:
        """Append tokens in one forward; gives the last rows of logits, [num_rows, vocabulary]."""
        self.layer_outputs.clear()
        result = self.model(input_ids=torch.tensor([tokens]), cache=self._cache, use_cache=True)
        self._cache = result.cache
        logits: NDArray[np.float32] = result.logits[0, -num_rows:].float().numpy()
        return logits

    def _record(self, _module: object, _inputs: object, output: Tensor) -> None:
        self.layer_outputs.append(output[0, -1].clone())


# Operators that add what is before them to the residual stream and return that first. As the first
# launch of a layer, one of them completes the output of the layer before.
_ADD_FIRST = frozenset({"add_rms_norm", "norm_qkv_rope"})


@dataclass(slots=True)
class _LayerRecorder:
    """Collects the last valid row of every layer's output from the CPU executor's launches."""

    hidden_size: int
    outputs: dict[int, Tensor] = field(default_factory=dict)
    _layer: int = -1

    def __call__(self, step_input: StepInput, launch: Launch, outputs: list[Tensor]) -> None:
        root, _, rest = launch.module.partition(".")
        before, in_layers = self._layer, root == "layers"
        layer = int(rest.partition(".")[0]) if in_layers else before
        self._layer = layer
        if not outputs or not (in_layers or launch.op in _ADD_FIRST):
            return
        if launch.op in _ADD_FIRST and (layer != before or not in_layers):
            layer = layer - 1 if in_layers else before
        # A layer's output is what its last launch that gives a residual stream returns first.
        value = outputs[0]
        if layer >= 0 and value.dim() == 2 and value.shape[1] == self.hidden_size:
            self.outputs[layer] = value[len(step_input.tokens) - 1].clone()


class ParityCheck:
    """An open engine and the reference for its checkpoint.

    Raises:
        EngineMismatchError: from the constructor, if the engine is not for the CPU.
    """

    def __init__(self, engine: Engine, reference: Reference) -> None:
        from inkrt.runtime.executor.cpu import CpuExecutor

        if not isinstance(engine.executor, CpuExecutor):
            raise EngineMismatchError(
                f"parity is checked on cpu engines, this one is for {engine.config.target}"
            )
        self.engine = engine
        self.reference = reference
        self._layers = _LayerRecorder(engine.config.model.hidden_size)
        engine.executor.observer = self._layers

    def default_lengths(self, num_decoded: int) -> list[int]:
        """Prompt lengths at the edges: first tokens, around the window, several windows."""
        text_config = self.reference.model.config.get_text_config()
        key = "sliding_window_size"
        window = getattr(text_config, key if hasattr(text_config, key) else "sliding_window")
        lengths = {1, 2, 3, 5, window - 1, window, window + 1, 3 * window + 2, 7 * window}
        limit = self.engine.config.max_seq_len - num_decoded
        return sorted(length for length in lengths if 1 <= length <= limit)

    def run(self, prompt: list[int], chunk: int | None, num_decoded: int) -> PromptReport:
        """Prefill `prompt` in steps of at most `chunk` tokens, then decode greedily.

        The reference is fed the tokens that the engine chooses, so that one close call does not
        make everything after it incomparable.
        """
        self.reference.reset()
        with self.engine.session() as session:
            output = session.prefill(prompt, GREEDY, chunk=chunk)
            ours = [output.logits[-1]]
            theirs = [
                self._feed_prompt(prompt, min(chunk or session.widest_step, session.widest_step))
            ]
            divergence = self._diverging_layer(0)
            decoded: list[int] = []
            for index in range(1, num_decoded + 1):
                decoded.append(int(output.tokens[-1]))
                output = session.step(decoded[-1:], GREEDY)
                ours.append(output.logits[-1])
                theirs.append(self.reference.feed(decoded[-1:]))
                divergence = divergence or self._diverging_layer(index)
        rows = [compare_logits(a, b) for a, b in zip(ours, theirs, strict=True)]
        is_equal = all(row.same_bits for row in rows)
        trace = None if is_equal else Trace(prompt, decoded, np.stack(ours), np.stack(theirs))
        return PromptReport(len(prompt), chunk, rows, divergence, trace)

    def _feed_prompt(self, prompt: list[int], chunk: int) -> NDArray[np.float32]:
        row_widths = [
            step.num_tokens for step in self.engine.config.steps if step.num_rows == step.num_tokens
        ]
        logits: NDArray[np.float32] = np.zeros(0, np.float32)
        for start in range(0, len(prompt), chunk):
            piece = prompt[start : start + chunk]
            is_row_step = len(piece) <= max(row_widths)
            for part in [[token] for token in piece] if is_row_step else [piece]:
                logits = self.reference.feed(part)
        return logits

    def _diverging_layer(self, index: int) -> tuple[int, int] | None:
        for layer, ours in sorted(self._layers.outputs.items()):
            if not torch.equal(ours, self.reference.layer_outputs[layer]):
                return index, layer
        return None


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
