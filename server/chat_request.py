"""A body of /v1/chat/completions, judged: the prompt, the parameters, the tools."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inkrt.runtime.answer.format import answer_format, make_parser, require_tool_format
from inkrt.runtime.answer.reader import AnswerReader
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.tokenizer import Tokenizer
from inkrt.runtime.tool_messages import check_tools
from inkrt.server.errors import ApiError, unsupported
from inkrt.server.messages import runtime_messages
from inkrt.server.params import sampling_params
from inkrt.server.protocol import ChatRequest
from inkrt.server.structured import grammar_of

Tools = Sequence[dict[str, Any]]
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a request for a chat comes to.

    Attributes:
        prompt: for the engine.
        params: as asked for.
        tools: that may be called; None if none may.
        single_call: whether an answer ends with its first tool call.
    """

    prompt: dict[str, Any]
    params: SamplingParams
    tools: Tools | None
    single_call: bool

    def engine_params(self) -> SamplingParams:
        """Those of the generations: stop strings are the reader's, which knows what is text."""
        return replace(self.params, stop=())

    def reader(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> AnswerReader:
        """Reads one answer to the prompt of these token ids."""
        parser = make_parser(
            answer_format(tokenizer),
            tokenizer,
            prompt,
            tools=self.tools,
            skip_special_tokens=self.params.skip_special_tokens,
        )
        return AnswerReader(parser, self.params, single_call=self.single_call)


def plan_chat(body: ChatRequest, llm: LLM, tokenizer: Tokenizer) -> ChatPlan:
    """Judge a request; renders and encodes its messages, which may take long.

    Raises:
        RequestError: a value or the messages are invalid.
        ApiError: something is not supported.
    """
    params = sampling_params(body, llm.default_params)
    tools, must_call = _tools(body, tokenizer)
    if (grammar := grammar_of(body, "text", must_call)) is not None:
        params = replace(params, grammar=grammar)
    prompt = llm.chat_prompt(
        runtime_messages(body.messages),
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=_variables(body, tokenizer),
    )
    return ChatPlan(prompt, params, tools, body.parallel_tool_calls is False)


def _tools(body: ChatRequest, tokenizer: Tokenizer) -> tuple[Tools | None, Tools | None]:
    """Those that the model is told of, and those of which it must call one."""
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice != "none":
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None, None
    require_tool_format(answer_format(tokenizer))
    check_tools(body.tools)
    if choice == "none":
        return None, None
    must_call = _required(choice, body.tools)
    for i, tool in enumerate(body.tools):
        if must_call is None and tool["function"].get("strict"):
            reason = "only a required call follows its schema; leave it out or require a call"
            raise unsupported(f"tools[{i}].function.strict", reason)
    return body.tools, must_call


def _required(choice: object, tools: Tools) -> Tools | None:
    """Those of which one must be called."""
    if choice is None or choice == "auto":
        return None
    if choice == "required":
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise ApiError(
            400,
            "tool_choice must be none, auto, required or the function of one of the tools",
            param="tool_choice",
        )
    return named[:1]


def _variables(body: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of the chat template."""
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if isinstance(effort, str) and effort not in _EFFORTS:
        raise ApiError(
            400,
            f"reasoning_effort is {effort[:50]!r}, it must be one of {', '.join(_EFFORTS)} or a "
            "number that the model's chat template knows",
            param="reasoning_effort",
        )
    variables.setdefault("reasoning_effort", effort)
    if answer_format(tokenizer) == "glm":
        variables.setdefault("enable_thinking", effort not in ("none", 0))
    return variables
