"""How an LLM speculates."""

from dataclasses import dataclass
from typing import Literal, get_args

from inkrt.errors import RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.rebuild import rebuild_with
from inkrt.runtime.spec.drafter import Drafter, NgramDrafter

Method = Literal["none", "ngram"]

WIDEST_STEP = 8  # that ink-build makes
OPTION = "--max-verify-tokens"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Who proposes tokens and how many.

    Attributes:
        method: "none", or "ngram": what followed the same words earlier in the conversation.
        num_draft_tokens: most tokens to propose at once; None takes as many as the widest verify
            step of the engine reads.

    Raises:
        RequestError: a value is out of range; `param` is the name of the field.
    """

    method: Method = "none"
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            allowed = ", ".join(get_args(Method))
            raise RequestError(
                f"method is {self.method!r}, it must be one of {allowed}", param="method"
            )
        number = self.num_draft_tokens
        if number is not None and (
            not isinstance(number, int) or isinstance(number, bool) or number < 1
        ):
            raise RequestError(
                f"num_draft_tokens is {number!r}, it must be an integer of at least 1, or None",
                param="num_draft_tokens",
            )

    def make_drafter(self) -> Drafter | None:
        """A drafter for one session; None for the method "none"."""
        return NgramDrafter() if self.method == "ngram" else None

    def width(self, config: EngineConfig) -> int:
        """Most drafts of a round on this engine.

        Raises:
            RequestError: the engine has no verify step, or none that is wide enough.
        """
        widest = max((s.num_tokens for s in config.steps if s.num_rows == s.num_tokens), default=1)
        wanted = self.num_draft_tokens or max(widest - 1, 1)
        if self.method != "none" and wanted > widest - 1:
            mend = f"draft at most {widest - 1}" if widest > 1 else "leave speculation off"
            if wanted < WIDEST_STEP:
                command = config.rebuild_command
                mend += f" or rebuild with: {rebuild_with(command, OPTION, wanted + 1)}"
            raise RequestError(
                f"{wanted} draft tokens need a verify step of {wanted + 1}, the widest of this "
                f"engine takes {widest}; {mend}",
                param="num_draft_tokens",
            )
        return wanted
