"""Which weights of a checkpoint are quantized, and how: its `quantization_config`, read.

ModelOpt writes it, in config.json or as hf_quant_config.json beside it. `quant_algo` is that of all
experts but those of modules that `exclude_modules` (in config.json: `ignore`) names, or it is
MIXED_PRECISION: then `quantized_layers` maps names of modules to objects with a `quant_algo` each.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal

from inkrt.errors import ConfigError

QuantizedForm = Literal["nvfp4", "mxfp8"]
# "scaled" is made by a build, never stored: the values of an NVFP4 weight without its global scale,
# which bfloat16 holds exactly, and the global scale beside them.
WeightForm = Literal["plain", "nvfp4", "mxfp8", "scaled"]
# Columns that share a scale.
SCALE_BLOCK: Mapping[str, int] = MappingProxyType({"nvfp4": 16, "mxfp8": 32})
# By what a quantization_config calls them.
_FORMS: dict[str, QuantizedForm] = {"NVFP4": "nvfp4", "MXFP8": "mxfp8"}
_EXPERTS_OF_LAYER = re.compile(r"layers\.(\d+)\.mlp\.experts\b")
# Nobody numbers layers with more digits, and Python refuses to read numbers of very many.
_MOST_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a quantization_config says.

    Attributes:
        experts: form of all experts but the excluded; None if `modules` lists what is quantized.
        excluded: names or patterns of modules.
        modules: forms by name.
    """

    experts: QuantizedForm | None = None
    excluded: tuple[str, ...] = ()
    modules: Mapping[str, QuantizedForm] = field(default_factory=dict)


def read_quantization(
    family: str,
    places: tuple[Mapping[str, Any], ...],
    forms: tuple[QuantizedForm, ...],
    what: str,
) -> Quantization:
    """Read the first `quantization_config` of some objects; with none, nothing is quantized.

    Args:
        family: of the model, for messages.
        places: the configuration and objects in it.
        forms: that the family's definition implements.
        what: weights that it can have in these forms, for messages.

    Raises:
        ConfigError: it is invalid, or asks for something else.
    """
    found = (place.get("quantization_config") for place in places)
    value = next((entry for entry in found if entry is not None), None)
    if value is None:
        return Quantization()
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    allowed = [name for name, form in _FORMS.items() if form in forms]
    if method != "modelopt":
        raise ConfigError(
            f"config.json: quantization_config with quant_method {method!r} is not supported; "
            f"this version reads BF16 and FP32 weights of {family}, and of quant_method 'modelopt' "
            f"{' and '.join(allowed)} {what}"
        )
    cache = value.get("kv_cache_quant_algo")
    if cache not in (None, "none", "NONE"):
        raise ConfigError(
            f"config.json: kv_cache_quant_algo {cache!r} is not supported, only null; keys and "
            f"values stay in the compute dtype"
        )
    algorithm = value.get("quant_algo")
    if algorithm != "MIXED_PRECISION":
        form = _form_of(algorithm, allowed)
        _require_block(value, form, "quantization_config")
        return Quantization(form, _excluded(value))
    entries = value.get("quantized_layers")
    if not isinstance(entries, Mapping):
        raise ConfigError("config.json: quantized_layers of quantization_config must be an object")
    modules = {}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"config.json: quantized module {name!r} must be an object with a quant_algo, got "
                f"{entry!r}"
            )
        modules[name] = _form_of(entry.get("quant_algo"), allowed)
        _require_block(entry, modules[name], f"quantized module {name!r}")
    return Quantization(modules=modules)


def layer_of_experts(module: str, num_layers: int) -> int | None:
    """The layer whose experts a name of a module means; None for another module."""
    match = _EXPERTS_OF_LAYER.search(module)
    return None if match is None else layer_number(match[1], num_layers)


def layer_number(digits: str, num_layers: int) -> int | None:
    """The layer that digits mean; None if the model has no such layer."""
    layer = int(digits) if len(digits) <= _MOST_DIGITS else num_layers
    return layer if layer < num_layers else None


def expert_forms(
    quantization: Quantization, num_layers: int, root: str = "model.llm."
) -> tuple[WeightForm, ...]:
    """The forms of every layer's experts, whose module is `<root>layers.N.mlp.experts`.

    Raises:
        ConfigError: experts of a layer are quantized in two ways.
    """
    forms: list[WeightForm] = [quantization.experts or "plain"] * num_layers
    for layer in range(num_layers) if quantization.excluded else ():
        if _is_excluded(f"{root}layers.{layer}.mlp.experts", quantization.excluded):
            forms[layer] = "plain"
    for name, form in quantization.modules.items():
        of_layer = layer_of_experts(name, num_layers)
        if of_layer is None:
            continue
        if forms[of_layer] not in ("plain", form):
            raise ConfigError(f"config.json: experts of layer {of_layer} are quantized in two ways")
        forms[of_layer] = form
    return tuple(forms)


def dequantized(forms: tuple[WeightForm, ...]) -> tuple[WeightForm, ...]:
    """What becomes of weights in these forms if a build decodes them."""
    plain: dict[WeightForm, WeightForm] = {"nvfp4": "scaled", "mxfp8": "plain"}
    return tuple(plain.get(form, form) for form in forms)


def require_blocks(form: WeightForm, columns: int, what: str, next_step: str) -> None:
    """Raise ConfigError unless columns make whole blocks that share a scale."""
    block = SCALE_BLOCK.get(form, 1)
    if columns % block:
        raise ConfigError(
            f"{what}, which is no multiple of the {block} that share a scale in {form}; {next_step}"
        )


def require_expert_blocks(
    forms: tuple[WeightForm, ...], hidden: int, units: int, tp_size: int
) -> None:
    """Raise ConfigError unless experts of these forms divide into blocks on every rank.

    Args:
        forms: of every layer.
        hidden: columns of gate and up.
        units: columns of a rank's down projections.
        tp_size: number of ranks.
    """
    for form in sorted(set(forms)):
        require_blocks(
            form, hidden, f"config.json: hidden_size is {hidden}", "take the model's own config"
        )
        require_blocks(
            form,
            units,
            f"tp size {tp_size} gives ranks {units} units of every expert",
            "choose a smaller tp size or split whole experts",
        )


def _is_excluded(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the module, one that it is part of, or one of its own parts."""
    parts = module.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(
        pattern.startswith(f"{module}.") or any(fnmatchcase(name, pattern) for name in around)
        for pattern in patterns
    )


def _excluded(value: Mapping[str, Any]) -> tuple[str, ...]:
    for key in ("exclude_modules", "ignore"):
        names = value.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"config.json: {key} must list names of modules, got {names!r}")
        return tuple(names)
    return ()


def _form_of(algorithm: Any, allowed: list[str]) -> QuantizedForm:
    if not isinstance(algorithm, str) or algorithm not in allowed:
        raise ConfigError(
            f"config.json: quant_algo {algorithm!r} is not supported, only "
            f"{' and '.join(allowed)} experts"
        )
    return _FORMS[algorithm]


def _require_block(value: Mapping[str, Any], form: QuantizedForm, where: str) -> None:
    """The size of a block, wherever ModelOpt has put it, must be that of the form."""
    groups = value.get("config_groups")
    inner = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    for entry in (value, *inner):
        size = entry.get("group_size") if isinstance(entry, Mapping) else None
        if size not in (None, SCALE_BLOCK[form]):
            raise ConfigError(
                f"config.json: group_size {size!r} in {where} is not supported, {form} has a scale "
                f"per {SCALE_BLOCK[form]} columns; take a release of the model with such blocks"
            )
