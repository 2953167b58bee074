"""The bodies of requests. Types only: what values mean and which are allowed, others decide.

Fields that are not here go to `model_extra`; `fields.py` says what becomes of them.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class StreamOptions(BaseModel):
    """What a stream has besides the answer."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    include_accepted: bool | None = None  # of chats: what of each piece came out with drafts


class SamplingFields(BaseModel):
    """How tokens are chosen, and when an answer ends, on all routes; None is not given."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None


class GenerationRequest(SamplingFields):
    """What requests for chats and for completions share."""

    n: Count | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    structured_outputs: dict[str, Any] | None = None


class ChatRequest(GenerationRequest):
    """A body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(GenerationRequest):
    """A body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None


class ReasoningOptions(BaseModel):
    """Of /v1/responses: how much the model is to think."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | float | None = None


class TextOptions(BaseModel):
    """Of /v1/responses: what the text is made of."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None


class ResponseRequest(SamplingFields):
    """A body of /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(BaseModel):
    """A body of /tokenize: either a text or a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(BaseModel):
    """A body of /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[int]
