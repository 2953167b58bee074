"""How the rows of a drafter's layers attend, read from its configuration.

Source: dspark.md section 2.4.
"""

from collections.abc import Mapping

from inkrt.engines.dspark.config import DraftLayerConfig
from inkrt.engines.dspark.reading import Reading
from inkrt.engines.dspark.settings import Default, Place, Settings


def read_layers(of: Reading) -> tuple[DraftLayerConfig, ...]:
    """How the rows of every layer attend.

    Raises:
        ConfigError: a setting is invalid or the tensors have another number of layers.
    """
    get = of.get
    stored = of.tensors.num_layers
    number = get.integer(
        "num_hidden_layers",
        needed="it is the number of the drafter's layers",
        default=Default(stored, "as many as there are tensors of")
        if stored and of.is_embedded
        else None,
    )
    if of.has_tensors and stored != number:
        raise get.error(f"num_hidden_layers = {number}, but there are tensors of {stored}")
    kinds = _layer_kinds(of, number)
    window = None
    if "sliding_attention" in kinds:
        window = get.integer(
            "swa_window_size", "sliding_window", needed="sliding layers have a window"
        )
    causal = {kind: _is_causal(of, kind) for kind in sorted(set(kinds))}
    return tuple(
        DraftLayerConfig(causal[kind], window if kind == "sliding_attention" else None)
        for kind in kinds
    )


def _layer_kinds(of: Reading, number: int) -> list[str]:
    get = of.get
    uses_window = get.boolean("use_swa", default=Default(False))
    found = get.find("layer_types")
    if found is None:
        if get.boolean("use_sliding_window", default=Default(False)) and not uses_window:
            raise get.missing("layer_types", "use_sliding_window does not say which layers")
        kind = "sliding_attention" if uses_window else "full_attention"
        reason = f"use_swa is {str(uses_window).lower()}"
        get.decide("layer_types", Default(kind, f"in all layers, as {reason}"))
        return [kind] * number
    kinds = found.value
    if not isinstance(kinds, list) or len(kinds) != number:
        raise get.error(f"{found.spelling} must list {number} layers, got {kinds!r}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise get.error(
                f"{found.spelling}: layer type {kind!r} is not supported, only "
                f"'full_attention' and 'sliding_attention'"
            )
    if uses_window and "sliding_attention" not in kinds:
        raise get.error(f"use_swa is true, but {found.spelling} has no 'sliding_attention'")
    return kinds


def _is_causal(of: Reading, kind: str) -> bool:
    """Explicit, else the nested spelling, else only sliding layers are."""
    get = of.get
    for key in ("is_causal", "causal"):
        if found := get.find(key):
            return get.as_boolean(found)
    if kind == "full_attention":
        reason = "rows of full layers see their whole block"
    elif get.boolean("sliding_window_non_causal", default=Default(False)):
        return False
    else:
        reason = "rows of sliding layers see their block up to themselves"
    return bool(get.decide("is_causal", Default(kind != "full_attention", reason)))


def read_rope_theta(of: Reading) -> float:
    """The base of the rotation.

    Raises:
        ConfigError: it is missing, or positions are scaled.
    """
    get = of.get
    plain = get.find("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        if (found := get.find(key)) is None:
            continue
        if not isinstance(found.value, Mapping):
            raise get.error(f"{found.spelling} must be an object, got {found.value!r}")
        kind = found.value.get("rope_type", found.value.get("type", "default"))
        partial = found.value.get("partial_rotary_factor", 1.0)
        if kind != "default" or partial != 1.0:
            raise get.error(
                f"{found.spelling} = {dict(found.value)!r} is not supported, only rope_type "
                f"'default' over whole heads"
            )
        inner = found.value.get("rope_theta")
        if inner is not None and plain is not None and inner != plain.value:
            raise get.error(
                f"{plain.spelling} = {plain.value!r} and {found.spelling}.rope_theta = {inner!r} "
                f"contradict each other"
            )
        if inner is not None:
            place = Place(found.value, f"{found.spelling}.")
            return Settings(get.where, [place], place).number("rope_theta")
    return get.number(
        "rope_theta", needed="it is the base of the rotation", default=of.qwen3(10000.0)
    )


def read_sinks(of: Reading, layers: tuple[DraftLayerConfig, ...]) -> bool:
    """Whether the heads have sinks.

    Raises:
        ConfigError: some layers have them and some have not.
    """
    get = of.get
    stored = [of.tensors.sinks_name(layer) is not None for layer in range(len(layers))]
    sliding = get.boolean("add_swa_attention_sink_bias", default=Default(False))
    reason = "there are tensors of sinks" if any(stored) else None
    asked = get.boolean("attention_sink_bias", default=Default(any(stored) or sliding, reason))
    if asked and sliding and any(layer.window is None for layer in layers):
        raise get.error(
            "add_swa_attention_sink_bias with layers of both types is not supported; all "
            "layers must have sinks or none"
        )
    if of.has_tensors and stored != [asked] * len(layers):
        raise get.error(
            f"attention_sink_bias is {str(asked).lower()}, but {sum(stored)} of {len(layers)} "
            f"layers have sinks; all must have them or none"
        )
    return asked
