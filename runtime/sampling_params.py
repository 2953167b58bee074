"""What a caller may ask of one generation, validated at construction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from inkrt.errors import RequestError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one generation.

    Attributes:
        temperature: at least 0; 0 is greedy.
        top_k: sample among the k most likely tokens; 0 is off.
        top_p: sample among the most likely tokens that reach this probability; 0 < top_p <= 1.
        min_p: drop tokens below this share of the most likely one's probability; 0..1.
        seed: 0 <= seed < 2**63; None draws a fresh one for every generation.
        max_tokens: most tokens to generate; None goes on to the end of the context.
        stop: generation ends at the first of these strings; one string or several.
        stop_token_ids: generation ends after one of these tokens.
        ignore_eos: go on after the model's own end tokens.
        include_stop_str_in_output: keep the stop string, or the text of the token that ended
            generation, in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value is out of range; `param` is the name of the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if not _is_finite(self.temperature) or self.temperature < 0:
            raise _error("temperature", self.temperature, "a number of at least 0")
        if not _is_integer(self.top_k) or not 0 <= self.top_k < 2**31:
            raise _error("top_k", self.top_k, "an integer from 0 (off) to 2147483647")
        if not _is_finite(self.top_p) or not 0 < self.top_p <= 1:
            raise _error("top_p", self.top_p, "a number above 0 and at most 1 (1 is off)")
        if not _is_finite(self.min_p) or not 0 <= self.min_p <= 1:
            raise _error("min_p", self.min_p, "a number from 0 to 1 (0 is off)")
        if self.seed is not None and (not _is_integer(self.seed) or not 0 <= self.seed <= MAX_SEED):
            raise _error("seed", self.seed, f"an integer from 0 to {MAX_SEED}, or None")
        if self.max_tokens is not None and (
            not _is_integer(self.max_tokens) or self.max_tokens < 1
        ):
            raise _error("max_tokens", self.max_tokens, "an integer of at least 1, or None")
        # Tuples, so that the caller's list cannot change a validated object.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        for name, flag in (
            ("ignore_eos", self.ignore_eos),
            ("include_stop_str_in_output", self.include_stop_str_in_output),
            ("skip_special_tokens", self.skip_special_tokens),
        ):
            if not isinstance(flag, bool):
                raise _error(name, flag, "True or False")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Defaults that a model's `generation_config.json` recommends.

        Reads temperature, top_k, top_p and min_p; `do_sample: false` means greedy. Limits on length
        are not taken over, and end tokens stand in the engine's own configuration.

        Raises:
            RequestError: a value is out of range.
        """
        if config.get("do_sample") is False:
            return cls(temperature=0.0)
        names = ("temperature", "top_k", "top_p", "min_p")
        return cls(**{name: config[name] for name in names if config.get(name) is not None})


def _error(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is {value!r}, it must be {allowed}", param=name)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list | tuple) and all(isinstance(s, str) and s for s in strings):
        return tuple(strings)
    raise _error("stop", value, "a non-empty string or a list of non-empty strings")


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and all(_is_integer(id_) and id_ >= 0 for id_ in value):
        return tuple(value)
    raise _error("stop_token_ids", value, "a list of token ids (integers of at least 0)")
