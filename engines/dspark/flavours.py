"""Which layout a drafter's configuration has, and the drafters that are recognized to be refused.

Source: dspark.md sections 2.9 and 4.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from inkrt.errors import ConfigError

Layout = Literal["embedded", "deepspec", "speculators", "specforge"]

SUPPORTED = (
    "this version builds drafters of the Qwen3 flavour: Qwen3DSparkModel (DeepSpec), "
    "speculators_model_type 'dspark', DSparkDraftModel (SpecForge, SGLang), or dspark_* keys in "
    "the target's config.json"
)
# Any of these marks a target that bundles a drafter.
BUNDLED_KEYS = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)

# Flavour, pattern of `model_type` and `architectures`, keys, pattern of tensor names.
_OTHERS = (
    (
        "DeepSeek-V4",
        r"deepseek",
        ("n_mtp_layers",),
        r"(.*\.)?(main_proj|main_norm|hc_head_\w+)(\..*)?|\d+\.attn\..*",
    ),
    (
        "Kimi-K3",
        r"k3_dspark|kimi|\bk3",
        (),
        r"(context_proj|context_norm|final_norm)(\..*)?",
    ),
    ("MiniMax", r"minimax", ("dspark_ffn_hidden_size",), r"(?!)"),
    (
        "Gemma4",
        r"gemma",
        (),
        r"layers\.\d+\.(pre_feedforward_layernorm|post_feedforward_layernorm|layer_scalar).*",
    ),
    (
        "Muse",
        r"muse",
        ("correction_output_mode", "enable_correction_head", "output_multiplier"),
        r"correction_head\..*",
    ),
)


def find_layout(config: Mapping[str, Any], names: Iterable[str], where: str) -> Layout:
    """The layout of a drafter folder's config.json.

    Args:
        config: the whole of it.
        names: plain names of the drafter's tensors.
        where: the file, for messages.

    Raises:
        ConfigError: it is of a flavour or a kind that is not supported.
    """
    refuse_others(config, config, names, where)
    kind = config.get("speculators_model_type")
    architectures = _words(config.get("architectures"))
    if kind is not None:
        if kind != "dspark":
            raise ConfigError(
                f"{where}: speculators_model_type {kind!r} is not supported; {SUPPORTED}"
            )
        return "speculators"
    if any(isinstance(config.get(key), Mapping) for key in ("dspark_config", "dflash_config")):
        return "specforge"
    if "Qwen3DSparkModel" in architectures:
        return "deepspec"
    if "DSparkDraftModel" in architectures:
        return "specforge"
    raise ConfigError(
        f"{where} describes no drafter that is known: architectures {architectures}, "
        f"model_type {config.get('model_type')!r}; {SUPPORTED}"
    )


def refuse_others(
    config: Mapping[str, Any], backbone: Mapping[str, Any], names: Iterable[str], where: str
) -> None:
    """Refuse a drafter whose flavour is known and not supported.

    Args:
        config: where the drafter's keys stand; may be a target's, whose own kind says nothing.
        backbone: where `model_type` and `architectures` are the drafter's; empty for a target's.
        names: plain names of its tensors.
        where: the file, for messages.

    Raises:
        ConfigError: naming what it was recognized by.
    """
    nested = backbone.get("transformer_layer_config")
    kinds: dict[str, list[Any]] = {
        "model_type": [backbone.get("model_type")],
        "architectures": _words(backbone.get("architectures")),
        "transformer_layer_config.model_type": [
            nested.get("model_type") if isinstance(nested, Mapping) else None
        ],
    }
    ordered = sorted(names)
    evidence: list[str]
    for flavour, pattern, keys, tensors in _OTHERS:
        evidence = [
            f"{key} {word!r}"
            for key, words in kinds.items()
            for word in words
            if isinstance(word, str) and re.search(pattern, word.lower())
        ]
        evidence += [f"key {key}" for key in keys if config.get(key) is not None]
        evidence += [f"tensor {name}" for name in ordered if re.fullmatch(tensors, name)][:1]
        if evidence:
            raise ConfigError(
                f"{where}: the drafter is of the {flavour} flavour ({', '.join(evidence)}), which "
                f"is not supported; {SUPPORTED}"
            )


def _words(value: object) -> list[str]:
    return [x for x in value if isinstance(x, str)] if isinstance(value, list) else []
