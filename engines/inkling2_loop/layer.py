"""Layers in the later passes of a looped Inkling-2: weights of a former visit, state of their own.

Messages of the pass before come into what queries, keys, values and experts read; the residual
stream itself has no gate. Shape letters: see `inkling2.model`; g inputs of a sub-layer.
"""

from functools import partial

import torch
from torch import Tensor, nn

from inkrt.engines.dspark.config import TapPoint
from inkrt.engines.inkling2.model import MIX_EPS, Layer, MixedInput
from inkrt.engines.inkling2_loop.config import Inkling2LoopConfig
from inkrt.engines.interface import Sharding, StateOptions, StepInputs
from inkrt.engines.parts import ink, parameter

# Sources [T, D] of a layer's messages; their queries [4, D]: for queries, keys, values, experts.
Messages = tuple[list[Tensor], Tensor]


class GatedInput(MixedInput):
    """Mixtures as `MixedInput` makes them, through a gate each.

    Args:
        config: of the model.
        num_queries: mixtures; one may be the input of all gates.
        num_gates: results.
        first: message of the first gate.
        dtype: compute dtype.
    """

    def __init__(
        self,
        config: Inkling2LoopConfig,
        num_queries: int,
        num_gates: int,
        first: int,
        dtype: torch.dtype,
    ) -> None:
        hidden, rank = config.hidden_size, config.gate_rank
        super().__init__(hidden, num_queries, config.rms_norm_eps, dtype, has_mix=True)
        self.first = first
        self.down = parameter(num_gates, rank, 2 * hidden, dtype=dtype)
        self.forget = parameter(num_gates, hidden, rank, dtype=dtype)
        self.gain = parameter(num_gates, hidden, rank, dtype=dtype)

    def forward(
        self, blocks: list[Tensor], current_TD: Tensor, messages: Messages | None = None
    ) -> list[Tensor]:
        """[T, D] sources, and those of messages, to one normed [T, D] per gate."""
        assert messages is not None
        former, queries_MD = messages
        mixed = ink.residual_mix([*blocks, current_TD], self.queries, MIX_EPS)
        gated_gTD = ink.gated_input(
            mixed, former, queries_MD, self.down, self.forget, self.gain, list(self.norms),
            self.first, MIX_EPS, self.eps, self.eps,
        )  # fmt: skip
        return [gated_gTD[index] for index in range(len(self.down))]


class GatedLayer(Layer):
    """A layer that messages enter: one input for queries, one for keys, one for values."""

    def __init__(
        self,
        config: Inkling2LoopConfig,
        layer: int,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
        tap: TapPoint | None,
    ) -> None:
        super().__init__(config, layer, sharding, dtype, state, tap)
        num_queries = 1 if config.is_sliding[layer] else 3
        self.attn_input = GatedInput(config, num_queries, 3, 0, dtype)
        self.mlp_input = GatedInput(config, 1, 1, 3, dtype)
        self.message_queries = parameter(4, config.hidden_size, dtype=torch.float32)

    def forward(
        self,
        h_TD: Tensor,
        blocks: list[Tensor],
        step: StepInputs,
        former: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """As `Layer.forward`; `former` are the block sums [T, D] of the pass before."""
        assert former is not None
        messages = (former, self.message_queries)
        inputs = (partial(part, messages=messages) for part in (self.attn_input, self.mlp_input))
        return self.visit(h_TD, blocks, step, *inputs)


def share_parameters(visit: nn.Module, earlier: nn.Module) -> None:
    """Let a visit have the very parameters of an earlier one, all that this one has."""
    for path, shared in earlier.named_parameters():
        owner, _, name = path.rpartition(".")
        setattr(visit.get_submodule(owner), name, shared)
