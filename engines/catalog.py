"""The model families that can be built, by `model_type` of the checkpoint's config.json."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from inkrt.engines.interface import (
    EXACT_PARITY,
    Definition,
    Drafting,
    MtpHeads,
    ParityBound,
)
from inkrt.errors import ConfigError


def _flint() -> Definition:
    from inkrt.engines.flint.config import draft_target, parse_config
    from inkrt.engines.flint.model import Flint
    from inkrt.engines.flint.weights import is_ignored, weight_sources

    # In bfloat16 the operators round where the author's reference does, which is elsewhere than in
    # transformers, and a rounding that tips the choice between two experts moves a whole row: a
    # tiny model's rows are within 0.03 in the mean and 0.18 at worst, as far as transformers in
    # bfloat16 is from itself in float32.
    parity = {"float32": EXACT_PARITY["float32"], "bfloat16": ParityBound(0.3, 0.6)}
    return Definition(
        parse_config,
        Flint,
        weight_sources,
        is_ignored,
        draft_target,
        parity=parity,
        dequantize_experts=lambda config: (
            replace(config, decodes_experts=config.has_nvfp4),
            config.has_nvfp4,
        ),
    )


def _inkling() -> Definition:
    from inkrt.engines.inkling.config import dequantize_experts, draft_target, parse_config
    from inkrt.engines.inkling.model import Inkling
    from inkrt.engines.inkling.mtp import ChainStep
    from inkrt.engines.inkling.towers import towers
    from inkrt.engines.inkling.weights import is_ignored, is_mtp, mtp_sources, weight_sources

    # Experts round less often than in transformers, and logits not at all. A tiny model's rows in
    # bfloat16 are within 0.02 in the mean and 0.04 at worst, as far as transformers in bfloat16 is
    # from itself in float32.
    parity = {"float32": EXACT_PARITY["float32"], "bfloat16": ParityBound(6e-2, 0.6)}
    mtp = MtpHeads(lambda config: config.mtp, is_mtp, mtp_sources, Drafting(Inkling, ChainStep))
    return Definition(
        parse_config,
        Inkling,
        weight_sources,
        is_ignored,
        draft_target,
        mtp=mtp,
        parity=parity,
        towers=towers,
        dequantize_experts=dequantize_experts,
    )


def _inkling2() -> Definition:
    from inkrt.engines.inkling2.config import (
        dequantize_experts,
        draft_target,
        parse_config,
        quantize_projections,
    )
    from inkrt.engines.inkling2.model import Inkling2, draft_step
    from inkrt.engines.inkling2.towers import towers
    from inkrt.engines.inkling2.weights import is_ignored, weight_sources

    drafting = Drafting(Inkling2, draft_step)
    return Definition(
        parse_config,
        Inkling2,
        weight_sources,
        is_ignored,
        draft_target,
        drafting,
        quantize_projections=quantize_projections,
        towers=towers,
        dequantize_experts=dequantize_experts,
    )


def _inkling2_loop() -> Definition:
    from inkrt.engines.inkling2.config import dequantize_experts, quantize_projections
    from inkrt.engines.inkling2.model import draft_step
    from inkrt.engines.inkling2.towers import towers
    from inkrt.engines.inkling2_loop.config import draft_target, parse_config
    from inkrt.engines.inkling2_loop.model import Inkling2Loop
    from inkrt.engines.inkling2_loop.weights import is_ignored, weight_sources

    return Definition(
        parse_config,
        Inkling2Loop,
        weight_sources,
        is_ignored,
        draft_target,
        Drafting(Inkling2Loop, draft_step),
        quantize_projections=quantize_projections,
        towers=towers,
        dequantize_experts=dequantize_experts,
    )


_DEFINITIONS: dict[str, Callable[[], Definition]] = {
    "flint": _flint,
    "inkling_mm_model": _inkling,
    "inkling_model": _inkling,
    "inkling_text": _inkling,
    "inkling2": _inkling2,
    "inkling2_text": _inkling2,
    "inkling2_loop": _inkling2_loop,
    "inkling2_loop_text": _inkling2_loop,
}


def find_definition(config: Mapping[str, Any]) -> Definition:
    """The definition for a checkpoint's config.json.

    Raises:
        ConfigError: `model_type` is absent or none of ours.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFINITIONS:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; "
            f"this version builds {', '.join(sorted(_DEFINITIONS))}"
        )
    return _DEFINITIONS[model_type]()
