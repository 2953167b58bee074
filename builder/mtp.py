"""The chained MTP heads of a checkpoint as the drafter that an engine is built with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.options import BuildOptions
from inkrt.engines.interface import Definition, Drafting, ModelConfig, MtpConfig, WeightSource
from inkrt.errors import CheckpointError, ConfigError
from inkrt.runtime.engine_file import DraftSpec


@dataclass(frozen=True, slots=True)
class FoundMtp:
    """MTP heads, ready to be traced and packed; beside `FoundDrafter`.

    Attributes:
        method: kind of drafter.
        config: the depths that are built in.
        num_stored: depths that the checkpoint has.
        sources: of their parameters ("drafter.*"), the same on all ranks. Empty if there are no
            weights.
        decisions: what was decided about them, one line each.
        checkpoint: of the model, and so of the heads.
        left_out: tensors that are none of their parameters and need not be told: none, as the model
            knows all that belongs to its heads.
        has_folder: whether they have a checkpoint folder of their own: never.
    """

    config: MtpConfig
    num_stored: int
    sources: dict[str, WeightSource]
    decisions: tuple[str, ...]
    checkpoint: CheckpointSource
    method: Literal["mtp"] = "mtp"
    left_out: frozenset[str] = frozenset()
    has_folder: Literal[False] = False

    @property
    def spec(self) -> DraftSpec:
        """What an engine says of them."""
        return DraftSpec(self.method, self.config.num_depths, None, has_confidence=False)

    def summary(self) -> str:
        """One line about them."""
        sliding = [str(depth) for depth, is_one in enumerate(self.config.is_sliding) if is_one]
        windows = f"window in depths {', '.join(sliding)}" if sliding else "no windows"
        return f"drafter: mtp, {self.config.num_depths} of {self.num_stored} depths, {windows}"

    def sources_of(self, rank: int, tp_size: int) -> dict[str, WeightSource]:  # noqa: ARG002
        """Of the parameters of a rank, which has all of them."""
        return self.sources

    def check_sharding(self, tp_size: int) -> None:
        """Nothing to check: every rank has whole heads."""

    def drafting(self, definition: Definition) -> Drafting:
        """How they get into engines."""
        assert definition.mtp is not None
        return definition.mtp.drafting


def choose_mtp(
    target: CheckpointSource,
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    progress: Callable[[str], None],
) -> FoundMtp | None:
    """The MTP heads that a build asks for, or that are there: as many depths as can be verified.

    Args:
        target: the model's checkpoint.
        definition: of the model.
        model: its configuration.
        options: of the build; `spec` is "mtp" or "auto".
        progress: called with a line where heads are left out.

    Raises:
        InkError: heads are asked for and cannot be had, or they are damaged.
    """
    heads = definition.mtp
    stored = heads.config(model) if heads else None
    lacks = None
    if heads is None or stored is None:
        lacks = f"checkpoint {target.folder} has no MTP heads (its config.json names none)"
    elif options.max_verify_tokens < 2:
        lacks = "MTP heads need a verify step; give --max-verify-tokens of at least 2"
    elif options.weights == "real" and not any(map(heads.is_weight, target.names)):
        lacks = (
            f"config.json names {stored.num_depths} MTP depths, but the checkpoint has none of "
            f"their tensors (transformers does not save them); add their file"
        )
    if lacks is not None or heads is None or stored is None:
        if options.spec == "mtp":
            raise ConfigError(f"{lacks}; or leave out --spec mtp")
        if stored is not None:
            progress(f"drafter: none: {lacks}")
        return None
    config = stored.first(options.max_verify_tokens - 1)
    if options.weights != "real":
        return FoundMtp(config, stored.num_depths, {}, (), target)
    sources = heads.weight_sources(model, config)
    every = heads.weight_sources(model, stored)
    known = {part.name for source in every.values() for part in source.parts}
    unknown = {name for name in target.names if heads.is_weight(name)} - known
    try:
        for source in sources.values():
            for part in source.parts:
                target.check(part)
    except CheckpointError as error:
        if options.spec == "mtp":
            raise
        raise CheckpointError(f"{error}; to build without the drafter: --spec none") from None
    decisions = tuple(f"unknown tensor {name} is left out" for name in sorted(unknown))
    return FoundMtp(config, stored.num_depths, sources, decisions, target)
