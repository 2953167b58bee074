"""The options about speculation, the same wherever a command generates text."""

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from inkrt.runtime.spec.config import SpeculativeConfig

Spec = Annotated[
    str,
    typer.Option(
        help="Who drafts tokens: dspark or mtp (the engine's own drafter), ngram (what followed "
        "before), none, or auto: the engine's own if it has one."
    ),
]
DraftTokens = Annotated[
    int | None, typer.Option(help="Most tokens to draft.  [default: as many as fit a step]")
]
Accept = Annotated[
    str,
    typer.Option(
        help="How drafts are accepted: coupled (the tokens that come without drafts) or "
        "probabilistic (others of the same distribution, more drafts accepted)."
    ),
]
Width = Annotated[
    str,
    typer.Option(
        help="How many drafts to verify: fixed (all), confidence (those that the drafter is sure "
        "of), cost (as many as pay, by ink-bench engine --costs), or auto: cost if that was "
        "measured, else fixed."
    ),
]
ConfidenceThreshold = Annotated[
    float, typer.Option(help="Least confidence of a draft, for width confidence; 0 to 1.")
]


# By what `SpeculativeConfig` calls them.
API_NAMES = {"method": "spec", "num_draft_tokens": "draft_tokens"}


def speculative_config(
    spec: str, draft_tokens: int | None, accept: str, width: str, confidence_threshold: float
) -> "SpeculativeConfig":
    """The configuration that the options stand for.

    Raises:
        RequestError: an option has no such value.
    """
    from inkrt.runtime.spec.config import SpeculativeConfig

    # It checks the names itself.
    return SpeculativeConfig(
        cast("Any", spec),
        draft_tokens,
        cast("Any", accept),
        cast("Any", width),
        confidence_threshold,
    )
