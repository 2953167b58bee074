"""The options about speculation, the same wherever a command generates text."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from inkrt.errors import UsageError

if TYPE_CHECKING:
    from inkrt.runtime.llm import LLM
    from inkrt.runtime.spec.config import SpeculativeConfig

# By what `SpeculativeConfig` calls them.
API_NAMES = {"method": "spec", "num_draft_tokens": "draft_tokens"}


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """What was typed about speculation; None is not typed. Fields have help texts as metadata.

    Raises:
        UsageError: an option has nothing to do beside the others.
    """

    spec: str | None = field(
        default=None,
        metadata={
            "help": "Who drafts tokens: dspark or mtp (the engine's own drafter), ngram (what "
            "followed before), none, or auto: the engine's own if it has one.  [default: auto]"
        },
    )
    draft_tokens: int | None = field(
        default=None, metadata={"help": "Most tokens to draft.  [default: as many as fit a step]"}
    )
    accept: str | None = field(
        default=None,
        metadata={
            "help": "How drafts are accepted: coupled (the tokens that come without drafts) or "
            "probabilistic (others of the same distribution, more drafts accepted).  "
            "[default: coupled]"
        },
    )
    width: str | None = field(
        default=None,
        metadata={
            "help": "How many drafts to verify: fixed (all), confidence (those that the drafter is "
            "sure of), cost (as many as pay, by ink-bench engine --costs), or auto: cost if that "
            "was measured, else fixed.  [default: auto]"
        },
    )
    confidence_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Least confidence of a draft, for width confidence; 0 to 1.  [default: 0.4]"
        },
    )

    def __post_init__(self) -> None:
        if self.spec == "none" and (others := [name for name in self.typed() if name != "--spec"]):
            raise UsageError(f"{others[0]}: of no use with --spec none; leave one of them out")
        if self.confidence_threshold is not None and self.width != "confidence":
            raise UsageError(
                "--confidence-threshold: only --width confidence has a use for it; add that or "
                "leave it out"
            )

    def typed(self) -> list[str]:
        """The options that were typed."""
        return [f"--{name.replace('_', '-')}" for name in self._values()]

    def config(self) -> "SpeculativeConfig":
        """What they stand for.

        Raises:
            RequestError: an option has no such value.
        """
        from inkrt.runtime.spec.config import SpeculativeConfig

        api_names = {name: api for api, name in API_NAMES.items()}
        # It checks the values itself.
        return SpeculativeConfig(
            **{api_names.get(name, name): value for name, value in self._values().items()}
        )

    def require_use(self, llm: "LLM") -> None:
        """Check that somebody drafts, if an option says how.

        Raises:
            UsageError: the engine has no drafter that `auto` could take.
        """
        if llm.method == "none" and (how := [name for name in self.typed() if name != "--spec"]):
            raise UsageError(f"{how[0]}: of no use, since {nobody_drafts(llm)}, or leave it out")

    def _values(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def nobody_drafts(llm: "LLM") -> str:
    """Why nobody drafts with --spec auto, and what to do about it."""
    from inkrt.runtime.rebuild import rebuild_with
    from inkrt.runtime.spec.config import OPTION, WIDEST_STEP

    config = llm.engine.config
    if config.widest_verify == 1:
        again = rebuild_with(config.rebuild_command, OPTION, WIDEST_STEP)
        return f"engine {llm.engine.folder} has no verify step; rebuild it with: {again}"
    return f"engine {llm.engine.folder} has no drafter of its own; add --spec ngram"
