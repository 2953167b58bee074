"""From fields of a request to the sampling parameters of its answers."""

import dataclasses
from typing import Any

from inkrt.errors import RequestError
from inkrt.runtime.sampling_params import MAX_SEED, SamplingParams
from inkrt.server.errors import ApiError
from inkrt.server.protocol import ChatRequest, CompletionRequest, GenerationRequest

# Fields of the same name and meaning.
_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def sampling_params(body: GenerationRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a request; what it does not give is the model's.

    Raises:
        RequestError: a value is out of range.
        ApiError: fields that do not go together.
    """
    given: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == -1 else body.top_k  # both mean all, to others
    if body.stop is not None:
        given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if given["stop"] == [""]:
            given["stop"] = []
    if body.logit_bias is not None:
        given["logit_bias"] = _biases(body.logit_bias)
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            given["max_tokens"] = body.max_completion_tokens
        given |= _chat_logprobs(body)
    elif isinstance(body, CompletionRequest) and body.logprobs is not None:
        given["logprobs"] = body.logprobs
    try:
        return dataclasses.replace(defaults, **given)
    except RequestError as error:
        is_newer = isinstance(body, ChatRequest) and body.max_completion_tokens is not None
        renamed = {"max_tokens": "max_completion_tokens"} if is_newer else {}
        if isinstance(body, ChatRequest):
            renamed["logprobs"] = "top_logprobs"
        if name := renamed.get(error.param):
            message = str(error).replace(error.param, name, 1)
            raise RequestError(message, param=name) from None
        raise


def params_of_choices(params: SamplingParams, num_choices: int) -> list[SamplingParams]:
    """One for each answer; a seed gives each another, and all of them again."""
    if params.seed is None:
        return [params] * num_choices
    return [
        dataclasses.replace(params, seed=(params.seed + i) % (MAX_SEED + 1))
        for i in range(num_choices)
    ]


def num_choices(body: GenerationRequest, num_prompts: int, most: int) -> int:
    """Answers to each prompt.

    Raises:
        ApiError: more than the server gives at once.
    """
    number = 1 if body.n is None else body.n
    if number * num_prompts > most:
        raise ApiError(
            400,
            f"{number} answers to each of {num_prompts} prompts are asked for, this server gives "
            f"{most} at once; ask for fewer",
            param="n",
        )
    return number


def _chat_logprobs(body: ChatRequest) -> dict[str, Any]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    return {"logprobs": body.top_logprobs or 0} if body.logprobs else {}


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not token.isascii() or not token.isdecimal() or len(token) > 18:
            message = f"logit_bias has the key {token[:50]!r}, keys must be token ids"
            raise ApiError(400, message, param="logit_bias")
        biases[int(token)] = bias
    return biases
