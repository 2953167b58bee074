"""What a rank needs for every number of ranks, from the configuration alone.

Modules stand on the meta device, so no weights are needed and nothing is traced. Weights have the
layout of the references; kernels may pad theirs.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inkrt.builder.build import Prepared, state_options
from inkrt.builder.choose_drafter import AnyDrafter
from inkrt.builder.options import TP_SIZES, BuildOptions
from inkrt.builder.pack import packed_tensors
from inkrt.builder.steps import state_layout, step_modules
from inkrt.builder.towers import TowerStep
from inkrt.engines.interface import Definition, ModelConfig, Sharding
from inkrt.engines.tower import Tower
from inkrt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankSize:
    """Bytes of each of `tp_size` ranks.

    Attributes:
        weights: of all parameters.
        position: of keys and values of one position.
        rings: of what does not grow with the context, of all sessions.
        refusal: why ranks cannot share the model so; the sizes are then 0.
    """

    tp_size: int
    weights: int = 0
    position: int = 0
    rings: int = 0
    refusal: str = ""

    @property
    def held(self) -> int:
        """Whatever the length of the context."""
        return self.weights + self.rings


def sizes_of(prepared: Prepared) -> list[RankSize]:
    """For every number of ranks, with the options of a build otherwise."""
    return rank_sizes(
        prepared.definition,
        prepared.model,
        prepared.options,
        prepared.dtype,
        prepared.drafter,
        prepared.towers,
    )


def rank_sizes(
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    dtype: torch.dtype,
    drafter: AnyDrafter | None = None,
    towers: Sequence[Tower] = (),
) -> list[RankSize]:
    """For every number of ranks.

    Args:
        definition: of the model.
        model: its configuration.
        options: with 0 replaced by what it stands for.
        dtype: compute dtype.
        drafter: that is built in.
        towers: that are; every rank has all of them.
    """
    sizes = []
    further = [TowerStep(tower, dtype) for tower in towers]
    for tp_size in TP_SIZES:
        try:
            model.check_sharding(Sharding(tp_size, options.moe_split))
            if drafter is not None:
                drafter.check_sharding(tp_size)
        except ConfigError as error:
            sizes.append(RankSize(tp_size, refusal=str(error)))
            continue
        sums = options.sums if tp_size > 1 else "mix"
        own = dataclasses.replace(options, tp_size=tp_size, sums=sums)
        state = state_options(own)
        _, module = next(step_modules(definition, model, own, dtype, state, drafter))
        layout = state_layout(module, state)
        held = {"paged": 0, "ring": 0}
        for spec in layout.buffers:
            size = torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
            held[spec.kind] += size
        sizes.append(
            RankSize(
                tp_size,
                sum(tensor.num_bytes for tensor in packed_tensors(module, None, further)),
                held["paged"] // max(layout.num_pages * layout.page_tokens, 1),
                held["ring"],
            )
        )
    return sizes
