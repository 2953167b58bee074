"""Finding the DSpark drafter that an engine is built with: bundled with the target, or in a folder.

What a drafter's settings and tensors mean is the business of `engines/dspark`; this module opens
the files, compares tables with the target's and makes one checkpoint of two.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from inkrt.builder.checkpoint import Checkpoint, CheckpointSource
from inkrt.builder.mapped import Span
from inkrt.engines.dspark.config import DSparkConfig
from inkrt.engines.dspark.flavours import BUNDLED_KEYS, Layout
from inkrt.engines.dspark.layouts import (
    DraftLayout,
    bundled_places,
    read_bundled,
    read_folder,
)
from inkrt.engines.dspark.weights import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    FIRST_TABLE,
    KNOWN_UNUSED,
    TARGET_TO_DRAFT,
    UNEMBED,
    DraftTensors,
    check_trimming,
    draft_tensors,
    is_bundled,
    is_copy_of_target,
    sources_of_rank,
    unused_tensors,
    weight_sources,
)
from inkrt.engines.interface import (
    Definition,
    Drafting,
    ModelConfig,
    Part,
    Sharding,
    WeightSource,
)
from inkrt.errors import CheckpointError, ConfigError
from inkrt.runtime.engine_file import DraftSpec

# In front of the names of a drafter's tensors where its folder and the target's read as one.
DRAFT_ROOT = "draft checkpoint: "


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A DSpark drafter, ready to be traced and packed.

    Attributes:
        method: kind of drafter.
        config: what it is.
        layout: of its checkpoint.
        sources: of its whole parameters ("drafter.*"); their parts are tensors of `checkpoint`.
            Empty if there are no weights.
        decisions: what was decided without its configuration saying so, one line each.
        checkpoint: reads the target's tensors and the drafter's.
        left_out: tensors of `checkpoint` that are the drafter's and not its parameters.
        num_tokens: of the target's that can be sampled.
    """

    method: Literal["dspark"]
    config: DSparkConfig
    layout: Layout
    sources: dict[str, WeightSource]
    decisions: tuple[str, ...]
    checkpoint: CheckpointSource
    left_out: frozenset[str]
    num_tokens: int

    @property
    def has_folder(self) -> bool:
        """Whether it has a checkpoint folder of its own."""
        return self.layout != "embedded"

    @property
    def spec(self) -> DraftSpec:
        """What an engine says of it."""
        config = self.config
        return DraftSpec(self.method, config.block_size, config.head, config.has_confidence)

    def summary(self) -> str:
        """One line about it."""
        config = self.config
        taps = ", ".join(map(str, config.taps))
        return (
            f"drafter: {self.method} in the layout {self.layout}, {len(config.layers)} layers, "
            f"{config.block_size} drafts, head {config.head} of rank {config.markov_rank}, "
            f"taps {taps}"
        )

    def sources_of(self, rank: int, tp_size: int) -> dict[str, WeightSource]:
        """Of the parameters of a rank."""
        return sources_of_rank(self.config, self.sources, self.num_tokens, rank, tp_size)

    def check_sharding(self, tp_size: int) -> None:
        """Raise ConfigError if so many ranks cannot share it."""
        self.config.check_sharding(tp_size)

    def drafting(self, definition: Definition) -> Drafting:
        """How it gets into engines; `require_buildable` has seen that it can."""
        assert definition.drafting is not None
        return definition.drafting


class WithDrafter:
    """A target's checkpoint and a drafter's as one; see `CheckpointSource`.

    Args:
        target: gives the folder, the configuration and the tensors under their own names.
        drafter: gives the tensors under names that begin with DRAFT_ROOT.
    """

    def __init__(self, target: CheckpointSource, drafter: CheckpointSource) -> None:
        self._target = target
        self._drafter = drafter
        self.folder = target.folder
        self.config = target.config

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of both."""
        return self._target.names | {DRAFT_ROOT + name for name in self._drafter.names}

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over both fingerprints."""
        both = f"{self._target.fingerprint}\0{self._drafter.fingerprint}"
        return hashlib.sha256(both.encode()).hexdigest()

    def require_shards(self) -> None:
        """Raise CheckpointError if one of them has no tensors at all."""
        self._target.require_shards()
        self._drafter.require_shards()

    def dtype_of(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        source, name = self._find(name)
        return source.dtype_of(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor."""
        source, name = self._find(name)
        return source.shape_of(name)

    def check(self, part: Part) -> None:
        """Compare the header of a tensor with what is expected of it; reads no data."""
        source, name = self._find(part.name)
        source.check(dataclasses.replace(part, name=name))

    def read(self, part: Part) -> Tensor:
        """The piece of a tensor."""
        source, name = self._find(part.name)
        return source.read(dataclasses.replace(part, name=name))

    def span(self, part: Part) -> Span:
        """What `read` reads."""
        source, name = self._find(part.name)
        return source.span(dataclasses.replace(part, name=name))

    def file_states(self) -> list[tuple[str, int, int]]:
        """Of the files of both."""
        own = self._drafter.file_states()
        renamed = [(DRAFT_ROOT + name, size, changed) for name, size, changed in own]
        return [*self._target.file_states(), *renamed]

    def _find(self, name: str) -> tuple[CheckpointSource, str]:
        if name.startswith(DRAFT_ROOT):
            return self._drafter, name.removeprefix(DRAFT_ROOT)
        return self._target, name


def find_drafter(
    target: CheckpointSource,
    definition: Definition,
    model: ModelConfig,
    folder: Path | None,
    *,
    has_weights: bool = True,
) -> FoundDrafter | None:
    """The drafter of a folder if one is named, else the one that the target bundles, if any.

    Args:
        target: the model's checkpoint.
        definition: of the model.
        model: its configuration.
        folder: the drafter's own, if it has one.
        has_weights: whether its tensors are read; without, its configuration alone describes it.

    Raises:
        InkError: a drafter is there, but damaged, not supported or another model's.
    """
    if folder is None:
        own, reader = target, target
        where = str(target.folder / "config.json")
        if not bundled_places(target.config):
            _require_no_tensors(target, where)
            return None
    else:
        own = _open(folder)
        reader = WithDrafter(target, own)
        where = str(folder / "config.json")
    tensors: DraftTensors | None = None
    if has_weights:
        own.require_shards()
        shapes = {
            name: own.shape_of(name) for name in own.names if folder is not None or is_bundled(name)
        }
        if not shapes:
            raise CheckpointError(
                f"{where} names a bundled drafter, but no tensor stands under dspark., "
                f"mtp_dspark. or mtp.; download its shard"
            )
        tensors = draft_tensors(shapes, str(own.folder), bundled=folder is None)
    read = read_bundled if folder is None else read_folder
    fits = definition.draft_target(model)
    num_tokens = fits.unpadded_vocab_size
    found = read(own.config, tensors, fits, where)
    if tensors is None:
        return FoundDrafter(
            "dspark",
            found.config,
            found.layout,
            {},
            found.decisions,
            reader,
            frozenset(),
            num_tokens,
        )
    found = _alias_copies(found, tensors, target, own, definition, model)
    sources = weight_sources(found.config, tensors, str(own.folder), num_tokens)
    for source in sources.values():
        own.check(source.parts[0])
    _check_trimming(found.config, tensors, own, num_tokens)
    unknown = unused_tensors(found.config, tensors, KNOWN_UNUSED)
    decisions = [*found.decisions]
    decisions += [f"unknown tensor {tensors.stored[name]} is left out" for name in unknown]
    root = "" if folder is None else DRAFT_ROOT
    sources = {name: _under(root, source) for name, source in sources.items()}
    used = {part.name for source in sources.values() for part in source.parts}
    every = {root + name for name in tensors.stored.values()}
    return FoundDrafter(
        "dspark",
        found.config,
        found.layout,
        sources,
        tuple(decisions),
        reader,
        frozenset(every - used),
        num_tokens,
    )


def _open(folder: Path) -> Checkpoint:
    """A drafter's folder."""
    if folder.is_dir() and any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"draft checkpoint {folder} holds a GGUF file; this version reads drafters from "
            f"safetensors, take such a release"
        )
    if (folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"draft checkpoint {folder} has a mask embedding of its own (mask_embedding.pt), which "
            f"is not supported; rows without a token must have the embedding of mask_token_id"
        )
    return Checkpoint(folder)


def _require_no_tensors(target: CheckpointSource, where: str) -> None:
    """A drafter's tensors without its settings are a damaged checkpoint."""
    bundled = {name: (1,) for name in target.names if is_bundled(name)}
    tensors = draft_tensors(bundled, str(target.folder), bundled=True)
    if FIRST_TABLE in tensors.stored:
        raise ConfigError(
            f"{where} has none of {', '.join(BUNDLED_KEYS)}, but the checkpoint has a drafter's "
            f"tensor {tensors.stored[FIRST_TABLE]}; take the config.json that belongs to it"
        )


def _alias_copies(
    found: DraftLayout,
    tensors: DraftTensors,
    target: CheckpointSource,
    own: CheckpointSource,
    definition: Definition,
    model: ModelConfig,
) -> DraftLayout:
    """Take the target's embedding and projection where the drafter's are the same."""
    config, decisions = found.config, [*found.decisions]
    shared = set()
    sources = definition.weight_sources(model, target.names, 0, Sharding(1, "experts"))
    fits = definition.draft_target(model)
    whole = (fits.vocab_size, fits.unpadded_vocab_size)  # with or without rows of padding
    for plain, parameter in ((EMBEDDING, "embed"), (UNEMBED, fits.unembed)):
        if plain not in tensors.stored:
            continue
        name = tensors.stored[plain]
        shape = tensors.shapes[plain]
        is_copy = False
        source = sources[parameter]
        trimmed = plain == UNEMBED and config.is_trimmed
        if not trimmed and len(shape) == 2 and shape[0] in whole:
            table = own.read(Part(name, shape, (slice(None),) * 2))
            is_copy = is_copy_of_target(table, target.read(source.parts[0]))
        if not is_copy:
            decisions.append(f"{name} is the drafter's own: it is not the target's")
            continue
        decisions.append(f"{name} equals the target's, which is used")
        shared.add(plain)
    config = dataclasses.replace(
        config,
        has_own_embedding=config.has_own_embedding and EMBEDDING not in shared,
        has_own_unembed=config.has_own_unembed and UNEMBED not in shared,
    )
    return dataclasses.replace(found, config=config, decisions=tuple(decisions))


def _check_trimming(
    config: DSparkConfig, tensors: DraftTensors, own: CheckpointSource, num_tokens: int
) -> None:
    """Compare the tensors that name the drafted tokens with each other and with the target."""
    where = str(own.folder)

    def read(name: str) -> Tensor | None:
        if name not in tensors.stored:
            return None
        shape = tensors.shapes[name]
        part = Part(tensors.stored[name], shape, (slice(None),) * len(shape), is_ids=True)
        return own.read(part)

    d2t, t2d = read(DRAFT_TO_TARGET), read(TARGET_TO_DRAFT)
    if d2t is not None and config.is_trimmed:
        check_trimming(config, d2t, t2d, where, num_tokens)
    elif d2t is not None and d2t.any():
        raise CheckpointError(
            f"{where}: d2t moves tokens, but all {config.draft_vocab_size} tokens can be drafted; "
            f"draft_vocab_size belongs to another drafter"
        )


def _under(root: str, source: WeightSource) -> WeightSource:
    parts = (dataclasses.replace(part, name=root + part.name) for part in source.parts)
    return dataclasses.replace(source, parts=tuple(parts))
