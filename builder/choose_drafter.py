"""Which drafter an engine is built with: a DSpark drafter, MTP heads or none.

DSpark drafters are found by `builder/drafter.py`, MTP heads by `builder/mtp.py`.
"""

from collections.abc import Callable
from pathlib import Path

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.drafter import FoundDrafter, find_drafter
from inkrt.builder.mtp import FoundMtp, choose_mtp
from inkrt.builder.options import BuildOptions
from inkrt.engines.dspark.flavours import BUNDLED_KEYS
from inkrt.engines.dspark.layouts import bundled_places
from inkrt.engines.dspark.weights import is_bundled
from inkrt.engines.interface import Definition, ModelConfig
from inkrt.errors import CheckpointError, ConfigError

AnyDrafter = FoundDrafter | FoundMtp


def choose_drafter(
    target: CheckpointSource,
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    folder: Path | None,
    progress: Callable[[str], None],
) -> AnyDrafter | None:
    """The drafter that a build is asked for; tells what it is and what was decided about it.

    Args:
        target: the model's checkpoint.
        definition: of the model.
        model: its configuration.
        options: of the build; see `BuildOptions.spec`.
        folder: of the drafter; None for one that the target may bundle.
        progress: called with a line each.

    Raises:
        InkError: see `find_drafter`, or the drafter that is asked for is not there.
    """
    if options.spec == "none":
        if folder is not None:
            raise ConfigError(
                f"draft checkpoint {folder} is not used with --spec none; leave out one of them"
            )
        return None
    found: AnyDrafter | None = None
    if options.spec != "mtp":
        found = _choose_dspark(target, definition, model, options, folder)
    elif folder is not None:
        raise ConfigError(
            f"MTP heads come with the model's own checkpoint, not from {folder}; leave out "
            f"--draft-checkpoint or --spec mtp"
        )
    if found is None:
        found = choose_mtp(target, definition, model, options, progress)
    if found is None:
        return None
    progress(found.summary())
    for decision in found.decisions:
        progress(f"drafter: {decision}")
    return found


def _choose_dspark(
    target: CheckpointSource,
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    folder: Path | None,
) -> FoundDrafter | None:
    """See `choose_drafter`; None if nothing is asked for and nothing is there."""
    has_weights = options.weights == "real"
    try:
        found = find_drafter(target, definition, model, folder, has_weights=has_weights)
    except (ConfigError, CheckpointError) as error:
        if folder is not None:
            raise
        raise type(error)(f"{error}; to build without the drafter: --spec none") from None
    if found is None and options.spec == "dspark":
        raise ConfigError(
            f"checkpoint {target.folder} bundles no drafter ({', '.join(BUNDLED_KEYS)} are "
            f"absent from its config.json); name one with --draft-checkpoint"
        )
    return found


def require_buildable(
    drafter: AnyDrafter, definition: Definition, target: str, tp_size: int
) -> None:
    """Check that an engine can have the drafter.

    Raises:
        ConfigError: its target, its ranks or the model family cannot.
    """
    if target != "cpu" and drafter.method != "dspark":
        raise ConfigError(
            f"the drafter ({drafter.method}) cannot be built for target {target} by this version, "
            f"only for cpu; leave it out with --spec none"
        )
    drafter.check_sharding(tp_size)
    if drafter.method == "dspark" and definition.drafting is None:
        raise ConfigError(
            f"a drafter ({drafter.method}) cannot be built into engines of this model by this "
            f"version; leave it out with --spec none"
        )


def unpacked_tensors(target: CheckpointSource, drafter: AnyDrafter | None) -> frozenset[str]:
    """Tensors that are a drafter's and are left out on purpose, of a target and of a drafter.

    Args:
        target: the model's checkpoint, which may bundle a drafter that is not built in.
        drafter: what is built in.
    """
    left_out = drafter.left_out if drafter else frozenset()
    is_built = drafter is not None and not drafter.has_folder
    if is_built or not bundled_places(target.config):
        return left_out
    return left_out | {name for name in target.names if is_bundled(name)}
