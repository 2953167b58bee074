"""The chat format of the trained checkpoint: the Jinja template, and the same in Python.

The template is what the checkpoint ships. Training data is rendered by `render`, which also knows
which tokens are the model's own; that both agree is for tests to show.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Declared tools, then the first system messages, then the effort, then the conversation; one
# message per part, nothing between messages.
CHAT_TEMPLATE = """\
{%- set roles = {"system": "system", "developer": "system", "user": "user", "tool": "tool",
  "assistant": "model"} -%}
{%- set efforts = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9,
  "xhigh": 0.99, "max": 0.99} -%}
{%- macro message(role, kind, text, author="") -%}
<|message_{{ role }}|>{{ author }}<|content_{{ kind }}|>{{ text }}<|end_message|>
{%- endmacro -%}
{%- macro content(role, item, author="") -%}
  {%- if item.content is string -%}
    {%- if item.content -%}
      {{- message(role, "text", item.content, author) -}}
    {%- endif -%}
  {%- else -%}
    {%- for part in item.content or [] -%}
      {%- if part.type != "text" -%}
        {{- raise_exception("this template has no content part " ~ part.type) -}}
      {%- endif -%}
      {{- message(role, "text", part.text, author) -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro effort_line() -%}
  {%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort is not none
    else 0.9 -%}
  {%- set effort = efforts.get(effort) if effort is string else effort -%}
  {%- if effort is number and effort is not boolean -%}
    {%- if effort < 0 or effort > 0.99 -%}
      {{- raise_exception("reasoning_effort must be between 0 and 0.99") -}}
    {%- endif -%}
    {{- message("system", "text", "Thinking effort level: " ~ (effort * 100) | round / 100) -}}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  {%- set declared = namespace(items=[]) -%}
  {%- for tool in tools -%}
    {%- set function = tool.function or tool -%}
    {%- set declared.items = declared["items"] + [{"description": function.description or "",
      "name": function.name, "parameters": function.parameters or {}, "type": "function"}] -%}
  {%- endfor -%}
  {{- message("system", "xml",
    declared["items"] | tojson(separators=(",", ":"), sort_keys=true), "tool_declare") -}}
{%- endif -%}
{%- set state = namespace(began=false) -%}
{%- for item in messages -%}
  {%- if item.role not in roles -%}
    {{- raise_exception("this template has no role " ~ item.role) -}}
  {%- endif -%}
  {%- set role = roles[item.role] -%}
  {%- if role != "system" and not state.began -%}
    {%- set state.began = true -%}
    {{- effort_line() -}}
  {%- endif -%}
  {%- if role == "tool" -%}
    {%- set caller = namespace(name=item.name or "") -%}
    {%- if not caller.name and item.tool_call_id -%}
      {%- for earlier in messages -%}
        {%- for call in earlier.tool_calls or [] -%}
          {%- if call.id == item.tool_call_id -%}
            {%- set caller.name = call.function.name -%}
          {%- endif -%}
        {%- endfor -%}
      {%- endfor -%}
    {%- endif -%}
    {{- content(role, item, caller.name) -}}
  {%- elif role == "model" -%}
    {%- if item.reasoning_content -%}
      {{- message(role, "thinking", item.reasoning_content) -}}
    {%- endif -%}
    {{- content(role, item) -}}
    {%- for call in item.tool_calls or [] -%}
      {%- set arguments = call.function.arguments -%}
      {%- if arguments is not string -%}
        {%- set arguments = arguments | tojson(separators=(",", ":"), sort_keys=true) -%}
      {%- endif -%}
      {{- message(role, "invoke_tool_json", '{"name":' ~ call.function.name | tojson
        ~ ',"args":' ~ (arguments or "{}") ~ "}", call.function.name) -}}
    {%- endfor -%}
    {{- "<|content_model_end_sampling|>" -}}
  {%- else -%}
    {{- content(role, item) -}}
  {%- endif -%}
{%- endfor -%}
{%- if not state.began -%}
  {{- effort_line() -}}
{%- endif -%}
{%- if add_generation_prompt -%}
  {{- "<|message_model|>" -}}
{%- endif -%}
"""

DEFAULT_EFFORT = 0.9


class Encoder(Protocol):
    """What rendering needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text, in which nothing becomes a marker."""

    def special(self, name: str) -> int:
        """Id of the marker `<|name|>`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as the chat API has them.

    Attributes:
        messages: with role and content; an assistant's with reasoning_content and tool_calls
            (arguments as objects), a tool's with name.
        tools: function declarations.
        effort: number in the prompt.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    effort: float = DEFAULT_EFFORT


@dataclass(slots=True)
class Rendered:
    """Tokens, and 1 for each that the model has to predict."""

    tokens: list[int] = field(default_factory=list)
    loss: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], loss: int) -> None:
        """Append tokens of one kind."""
        self.tokens += tokens
        self.loss += [loss] * len(tokens)


def compact_json(value: object) -> str:
    """JSON as the format writes it: sorted keys, no spaces, any characters."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def call_json(name: str, arguments: Mapping[str, Any]) -> str:
    """Payload of a tool call."""
    return f'{{"name":{json.dumps(name, ensure_ascii=False)},"args":{compact_json(arguments)}}}'


def render(
    chat: Conversation, encoder: Encoder, *, add_generation_prompt: bool = False
) -> Rendered:
    """Token ids of a conversation; only an assistant's messages are to be predicted.

    The marker that begins an answer is part of the prompt: it is not predicted. Those that begin
    its further messages are.
    """
    out = Rendered()

    def message(role: str, kind: str, text: str, author: str = "", *, loss: int = 0) -> None:
        tokens = [*encoder.encode(author), encoder.special(f"content_{kind}")]
        tokens += [*encoder.encode(text), encoder.special("end_message")]
        out.add([encoder.special(f"message_{role}")], loss)
        out.add(tokens, loss)

    if chat.tools:
        declared = [
            {
                "description": tool["function"].get("description", ""),
                "name": tool["function"]["name"],
                "parameters": tool["function"].get("parameters", {}),
                "type": "function",
            }
            for tool in chat.tools
        ]
        message("system", "xml", compact_json(declared), "tool_declare")
    began = False
    for item in chat.messages:
        if item["role"] != "system" and not began:
            began = True
            message("system", "text", f"Thinking effort level: {round(chat.effort * 100) / 100}")
        if item["role"] == "assistant":
            first = len(out.tokens)
            if item.get("reasoning_content"):
                message("model", "thinking", item["reasoning_content"], loss=1)
            if item.get("content"):
                message("model", "text", item["content"], loss=1)
            for call in item.get("tool_calls", ()):
                function = call["function"]
                payload = call_json(function["name"], function["arguments"])
                message("model", "invoke_tool_json", payload, function["name"], loss=1)
            out.loss[first] = 0
            out.add([encoder.special("content_model_end_sampling")], 1)
        elif item["content"]:
            message(item["role"], "text", item["content"], item.get("name", ""))
    if add_generation_prompt:
        out.add([encoder.special("message_model")], 0)
    return out
