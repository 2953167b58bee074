"""How an LLM speculates: what a user may choose, and what that means on one engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from inkrt.errors import RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.rebuild import rebuild_with
from inkrt.runtime.spec.costs import CostTable
from inkrt.runtime.spec.drafter import Drafter, EngineDrafter, NgramDrafter
from inkrt.runtime.spec.round import AcceptRule, Speculator
from inkrt.runtime.spec.width import ConfidenceThreshold, CostAware, FixedWidth, WidthPolicy

Method = Literal["auto", "none", "ngram", "dspark", "mtp"]
Width = Literal["auto", "fixed", "confidence", "cost"]

WIDEST_STEP = 8  # that ink-build makes
OPTION = "--max-verify-tokens"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one engine speculates; made by `SpeculativeConfig.resolve`.

    Attributes:
        method: who drafts.
        num_draft_tokens: most drafts of a round.
        accept: how drafts are accepted.
        make_drafter: a drafter for one session.
        make_policy: a choice of widths for one session.
    """

    method: Literal["ngram", "dspark", "mtp"]
    num_draft_tokens: int
    accept: AcceptRule
    make_drafter: Callable[[], Drafter]
    make_policy: Callable[[], WidthPolicy]

    def speculator(self) -> Speculator:
        """Rounds for one session."""
        return Speculator(
            self.make_drafter(), self.make_policy(), self.num_draft_tokens, self.accept
        )


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Who proposes tokens, how many, and what becomes of them.

    Attributes:
        method: "ngram": what followed the same words earlier in the conversation; "dspark" or
            "mtp": the drafter of that kind that was built into the engine; "auto": that one if
            there is one and a verify step, else "none".
        num_draft_tokens: most tokens to propose at once; None takes as many as the drafter gives
            and the widest verify step of the engine reads.
        accept: "coupled": the same tokens as without speculation; "probabilistic": other tokens of
            the same distribution, more of the drafts are accepted.
        width: how many of the drafts to verify. "fixed": all; "confidence": those before the first
            of which the drafter is less sure than `confidence_threshold`; "cost": as many as are
            expected to give the most tokens per second, by times measured on this machine; "auto":
            "cost" if such times are in the engine folder, else "fixed".
        confidence_threshold: 0..1.

    Raises:
        RequestError: a value is out of range; `param` is the name of the field.
    """

    method: Method = "auto"
    num_draft_tokens: int | None = None
    accept: AcceptRule = "coupled"
    width: Width = "auto"
    confidence_threshold: float = 0.4

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("method", self.method, Method),
            ("accept", self.accept, AcceptRule),
            ("width", self.width, Width),
        ):
            if value not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                raise RequestError(f"{name} is {value!r}, it must be one of {allowed}", param=name)
        number = self.num_draft_tokens
        if number is not None and (
            not isinstance(number, int) or isinstance(number, bool) or number < 1
        ):
            raise RequestError(
                f"num_draft_tokens is {number!r}, it must be an integer of at least 1, or None",
                param="num_draft_tokens",
            )
        threshold = self.confidence_threshold
        if (
            not isinstance(threshold, int | float)
            or isinstance(threshold, bool)
            or not 0 <= threshold <= 1
        ):
            raise RequestError(
                f"confidence_threshold is {threshold!r}, it must be a number from 0 to 1",
                param="confidence_threshold",
            )

    def resolve(self, folder: Path, config: EngineConfig) -> Speculation | None:
        """What this means on an engine; None if nobody drafts.

        Args:
            folder: of the engine; its table of costs is read if widths go by it.
            config: of the engine.

        Raises:
            RequestError: the engine has no such drafter, no verify step that is wide enough, or
                nothing that the widths could go by.
            EngineFormatError: the table of costs is damaged.
        """
        method = self.method
        if method == "auto":
            method = config.draft.method if config.draft and config.widest_verify > 1 else "none"
        if method == "none":
            return None
        if method != "ngram":
            _require_drafter(method, config)
        most = self._most(method, config)
        make_drafter = NgramDrafter if method == "ngram" else EngineDrafter
        make_policy = self._policy(folder, config, method, most)
        return Speculation(method, most, self.accept, make_drafter, make_policy)

    def _most(self, method: Method, config: EngineConfig) -> int:
        """Most drafts of a round."""
        widest = config.widest_verify
        wanted = self.num_draft_tokens or max(widest - 1, 1)
        if method != "ngram":
            assert config.draft is not None
            block = config.draft.block_size
            if self.num_draft_tokens is None:
                wanted = min(wanted, block)
            elif wanted > block:
                raise RequestError(
                    f"num_draft_tokens is {wanted}, the drafter of this engine gives {block} at "
                    f"once; ask for at most {block}",
                    param="num_draft_tokens",
                )
        if wanted > widest - 1:
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

    def _policy(
        self, folder: Path, config: EngineConfig, method: Method, most: int
    ) -> Callable[[], WidthPolicy]:
        if self.width == "fixed":
            return FixedWidth
        if self.width == "confidence":
            if method == "ngram" or config.draft is None or not config.draft.has_confidence:
                raise RequestError(
                    f"drafts of {method} come without confidences here; choose width=fixed or "
                    "width=cost",
                    param="width",
                )
            return lambda: ConfidenceThreshold(self.confidence_threshold)
        table = CostTable.read(folder, config)
        if self.width == "auto" and table is None:
            return FixedWidth
        if table is None:
            raise RequestError(
                f"width cost goes by times measured on this machine, and {folder} has none; "
                f"measure them with: ink-bench engine {folder} --costs",
                param="width",
            )
        costs = table.costs(most, with_draft_step=method != "ngram")
        on_device = None if method == "ngram" else table.device_costs(most) or costs
        return lambda: CostAware(costs, on_device=on_device)


def _require_drafter(method: Method, config: EngineConfig) -> None:
    """Raise RequestError unless the engine has a drafter of that kind."""
    if config.draft is None:
        raise RequestError(
            "this engine has no drafter of its own; choose method=ngram, or rebuild it from a "
            f"checkpoint with one: {config.rebuild_command}",
            param="method",
        )
    if config.draft.method != method:
        raise RequestError(
            f"the drafter of this engine is {config.draft.method}, not {method}; choose "
            f"method={config.draft.method} or method=auto",
            param="method",
        )
