"""Which format a model's answers have, and the parser of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from inkrt.errors import RequestError
from inkrt.runtime.answer.glm import GlmParser, speaks_glm
from inkrt.runtime.answer.inkling import InklingParser, speaks_inkling
from inkrt.runtime.answer.parts import AnswerParser
from inkrt.runtime.answer.plain import PlainParser
from inkrt.runtime.tokenizer import Tokenizer

AnswerFormat = Literal["inkling", "glm", "plain"]


def answer_format(tokenizer: Tokenizer) -> AnswerFormat:
    """The format of a model by the marker tokens that its vocabulary has."""
    if speaks_inkling(tokenizer):
        return "inkling"
    return "glm" if speaks_glm(tokenizer) else "plain"


def require_tool_format(kind: AnswerFormat) -> None:
    """Check that tool calls can be told apart from text.

    Raises:
        RequestError: they cannot.
    """
    if kind == "plain":
        raise RequestError(
            "tools are not supported: this model's vocabulary has the markers of no format of tool "
            "calls that is known here; leave them out",
            param="tools",
        )


def make_parser(
    kind: AnswerFormat,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    skip_special_tokens: bool = True,
) -> AnswerParser:
    """A parser for one answer.

    Args:
        kind: of the model.
        tokenizer: of the model.
        prompt: token ids that the answer follows.
        tools: declarations that may be called, checked; None if none may: calls are dropped.
        skip_special_tokens: leave special tokens out of the text; markers are left out anyhow.
    """
    if kind == "inkling":
        return InklingParser(
            tokenizer,
            prompt,
            keeps_calls=tools is not None,
            skip_special_tokens=skip_special_tokens,
        )
    if kind == "glm":
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {}
            for tool in tools or ()
        }
        return GlmParser(
            tokenizer,
            prompt,
            tools=None if tools is None else schemas,
            skip_special_tokens=skip_special_tokens,
        )
    return PlainParser(tokenizer, skip_special_tokens=skip_special_tokens)
