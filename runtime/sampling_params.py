"""What a caller may ask of one generation, validated at construction."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from inkrt.errors import RequestError
from inkrt.runtime.grammar import Grammar

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
# Temperatures below are greedy. At this one the likeliest token wins already, unless its logit is
# within 0.0003 of the next; far below, and above the other, scaled logits leave float32.
LEAST_TEMPERATURE = 1e-5
_MOST_TEMPERATURE = 1e30
_SHOWN = 100  # characters of an invalid value that a message repeats


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one generation.

    Logits are changed first, then come temperature and filters. Each token is drawn with all that
    was generated before it taken into account, whoever drafts; `runtime/logits.py` has the order.

    Attributes:
        temperature: 0..1e30; below 0.00001 is greedy.
        top_k: sample among the k most likely tokens; 0 is off.
        top_p: sample among the most likely tokens that reach this probability; 0 < top_p <= 1.
        min_p: drop tokens below this share of the most likely one's probability; 0..1.
        seed: 0 <= seed < 2**63; None draws a fresh one for every generation.
        repetition_penalty: logits of tokens in prompt and output are divided by it where they are
            positive, multiplied where they are negative; 0.01..100, 1 is off.
        frequency_penalty: taken off a logit for each time its token is in the output; -2..2.
        presence_penalty: taken off the logits of all tokens in the output; -2..2.
        logit_bias: added to the logits of token ids; each -100..100.
        allowed_token_ids: no other token is drawn; None allows all.
        bad_words: never generated; each a text, banned at the beginning of a word and elsewhere, or
            a sequence of token ids. The last token is banned where the others were generated.
        max_tokens: most tokens to generate; None goes on to the end of the context.
        min_tokens: so many tokens come before an end token may, and before stop strings count; at
            most max_tokens.
        stop: generation ends at the first of these strings; one string or several.
        stop_token_ids: generation ends after one of these tokens.
        ignore_eos: go on after the model's own end tokens.
        include_stop_str_in_output: keep the stop string, or the text of the token that ended
            generation, in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: give the log-probability of each token, and of so many of the likeliest; at most
            MAX_LOGPROBS. None gives none.
        grammar: what the answer must be made of; None leaves it free. It ends the answer, so
            min_tokens and ignore_eos do not go with it.

    Raises:
        RequestError: a value is out of range; `param` is the name of the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not _is_finite(self.temperature) or not 0 <= self.temperature <= _MOST_TEMPERATURE:
            raise _error("temperature", self.temperature, "a number from 0 to 1e30")
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
        # Copies, so that what the caller keeps cannot change a validated object.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        for name, flag in (
            ("ignore_eos", self.ignore_eos),
            ("include_stop_str_in_output", self.include_stop_str_in_output),
            ("skip_special_tokens", self.skip_special_tokens),
        ):
            if not isinstance(flag, bool):
                raise _error(name, flag, "True or False")
        self._check_processing()

    def _check_processing(self) -> None:
        penalty = self.repetition_penalty
        if not _is_finite(penalty) or not 0.01 <= penalty <= 100:
            raise _error("repetition_penalty", penalty, "a number from 0.01 to 100 (1 is off)")
        for name, penalty in (
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
        ):
            if not _is_finite(penalty) or not -2 <= penalty <= 2:
                raise _error(name, penalty, "a number from -2 to 2 (0 is off)")
        if not _is_integer(self.min_tokens) or self.min_tokens < 0:
            raise _error("min_tokens", self.min_tokens, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.logprobs is not None and (
            not _is_integer(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS
        ):
            allowed = f"an integer from 0 to {MAX_LOGPROBS}, or None"
            raise _error("logprobs", self.logprobs, allowed)
        if self.grammar is not None:
            if not isinstance(self.grammar, Grammar):
                raise _error("grammar", self.grammar, "a Grammar, or None")
            if self.ignore_eos or self.min_tokens:
                name = "ignore_eos" if self.ignore_eos else "min_tokens"
                message = f"{name} does not go with a grammar, which ends the answer; leave it out"
                raise RequestError(message, param=name)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        ids = self.allowed_token_ids
        if ids is not None:
            if not isinstance(ids, list | tuple) or not ids or not _are_ids(ids):
                allowed = "a list of at least one token id (integers of at least 0), or None"
                raise _error("allowed_token_ids", ids, allowed)
            object.__setattr__(self, "allowed_token_ids", tuple(ids))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Defaults that a model's `generation_config.json` recommends.

        Reads temperature, top_k, top_p, min_p, repetition_penalty and bad_words_ids; `do_sample:
        false` means greedy. Limits on length are not taken over, and end tokens stand in the
        engine's own configuration.

        Raises:
            RequestError: a value is out of range.
        """
        names = {"repetition_penalty": "repetition_penalty", "bad_words_ids": "bad_words"}
        if config.get("do_sample") is False:
            found: dict[str, Any] = {"temperature": 0.0}
        else:
            found = {}
            names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
        found |= {names[key]: config[key] for key in names if config.get(key) is not None}
        return cls(**found)


def _error(name: str, value: object, allowed: str, *, param: str | None = None) -> RequestError:
    message = f"{name} is {_shown(value)}, it must be {allowed}"
    return RequestError(message, param=param or name)


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # Python prints no integers of more than 4300 digits
        return "a value with thousands of digits"
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list | tuple) and all(isinstance(s, str) and s for s in strings):
        return tuple(strings)
    raise _error("stop", value, "a non-empty string or a list of non-empty strings")


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and _are_ids(value):
        return tuple(value)
    raise _error("stop_token_ids", value, "a list of token ids (integers of at least 0)")


def _are_ids(values: Sequence[object]) -> bool:
    return all(isinstance(id_, int) and _is_integer(id_) and id_ >= 0 for id_ in values)


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _error("logit_bias", value, "an object of token ids and numbers")
    for token, bias in value.items():
        if not _is_integer(token) or token < 0:
            allowed = "an integer of at least 0"
            raise _error("a token id of logit_bias", token, allowed, param="logit_bias")
        if not _is_finite(bias) or not -100 <= bias <= 100:
            allowed = "a number from -100 to 100"
            raise _error(f"logit_bias[{_shown(token)}]", bias, allowed, param="logit_bias")
    return dict(value)


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        raise _error("bad_words", value, "a list of texts and of lists of token ids")
    words: list[str | tuple[int, ...]] = []
    for place, word in enumerate(value):
        if isinstance(word, str) and word and _is_unicode(word):
            words.append(word)
        elif isinstance(word, list | tuple) and word and _are_ids(word):
            words.append(tuple(word))
        else:
            allowed = "a non-empty text or list of token ids (integers of at least 0)"
            raise _error(f"bad_words[{place}]", word, allowed, param="bad_words")
    return tuple(words)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        return False
    return True
