"""The looped Inkling-2 text model of one rank, written to be traced.

    prelude             layers before the core, once
    core, pass 1        as if the layers followed the prelude
    core, pass 2, ...   from where the prelude ended, again; of the pass before come messages only
    coda                layers behind the core, after the last pass

`layers` are visits of layers in the order in which a token passes them. Each has keys, values and
convolution inputs of its own; visits of a layer share its parameters, which stand under the first
visit's name, and those of the gates under the second's.
"""

from collections.abc import Iterator

from torch import Tensor

from inkrt.engines.dspark.config import DSparkConfig
from inkrt.engines.inkling2.model import Inkling2, Layer
from inkrt.engines.inkling2_loop.config import Inkling2LoopConfig
from inkrt.engines.inkling2_loop.layer import GatedLayer, share_parameters
from inkrt.engines.interface import Sharding, StateOptions, StepInputs


class Inkling2Loop(Inkling2):
    """Token ids to sampled tokens and logits, for one step of one rank; see `Inkling2`."""

    config: Inkling2LoopConfig

    def make_layers(
        self, sharding: Sharding, state: StateOptions, drafter: DSparkConfig | None
    ) -> Iterator[Layer]:
        """All visits, in order."""
        former: dict[int, Layer] = {}  # the last visit of a layer so far
        for index, visit in enumerate(self.config.visits):
            tap = drafter.tap_point if drafter and index in drafter.taps else None
            kind = GatedLayer if visit.number else Layer
            module = kind(self.config, visit.layer, sharding, self.dtype, state, tap)
            if visit.number:
                share_parameters(module, former[visit.layer])
            former[visit.layer] = module
            yield module

    def run_layers(
        self, h_TD: Tensor, step: StepInputs
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Embedded tokens [T, D] to the last partial sum, the finished blocks and all taps."""
        blocks: list[Tensor] = []
        features: list[Tensor] = []
        start, messages = (h_TD, blocks), []
        for visit, layer in zip(self.config.visits, self.layers, strict=True):
            if visit.layer == self.config.core_start and visit.number == 0:
                start = (h_TD, blocks)
            elif visit.layer == self.config.core_start:
                # The sum of the prelude, which this pass has itself, is no message.
                messages = [*blocks[len(start[1]) + 1 :], h_TD]
                h_TD, blocks = start
            more = (messages,) if visit.number else ()
            h_TD, blocks, tap_TD = layer(h_TD, blocks, step, *more)
            if tap_TD is not None:
                features.append(tap_TD)
        return h_TD, blocks, features
