"""Chat templates: messages to text or to token ids.

Templates are Jinja2, evaluated in its immutable sandbox with the names that published templates
expect. Text of messages never becomes a role marker: the template is rendered with placeholders,
only its own text is searched for special tokens, and the messages are put in afterwards.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from inkrt.errors import EngineFormatError, RequestError
from inkrt.runtime.jinja_environment import chat_environment
from inkrt.runtime.media.messages import check_parts, for_template
from inkrt.runtime.tokenizer import Tokenizer
from inkrt.runtime.tool_messages import check_calls, check_tools, plain_calls, refuse_special

Message = Mapping[str, object]

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_KEYS = ("content", "name", "reasoning_content")
KEYS = ("role", *TEXT_KEYS, "tool_calls", "tool_call_id")

# Private-use characters: templates hold none, and message text is not in the text they stand in.
MARK_BEGIN, MARK_END = "\ue0f0", "\ue0f1"

# What an expression of a template can raise on unexpected input.
RENDER_ERRORS = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)


class ChatTemplate:
    """The chat template of one engine. Thread-safe.

    Args:
        source: Jinja2 text.
        variables: names the template may use besides those of `render`, e.g. "bos_token".
        path: of the caller's own file that the text is from; None if it is the engine's.

    Raises:
        EngineFormatError: the text is not valid Jinja2.
        RequestError: nor is that of the caller's file.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str] | None = None, path: Path | None = None
    ) -> None:
        try:
            self._template = chat_environment().from_string(source)
        except TemplateSyntaxError as error:
            reason = f"is not valid Jinja2 (line {error.lineno}: {error.message})"
            if path is not None:
                raise RequestError(
                    f"chat_template is {path}, which {reason}; mend the file", param="chat_template"
                ) from None
            raise EngineFormatError(
                f"the chat template {reason}; mend chat_template.jinja and rebuild the engine"
            ) from None
        self._names = find_undeclared_variables(chat_environment().parse(source))
        self._variables = dict(variables or {})

    @classmethod
    def load(cls, folder: Path, path: Path | None = None) -> "ChatTemplate | None":
        """The template of a folder with tokenizer files; None if it has none.

        Args:
            folder: its tokenizer_config.json names tokens that templates use.
            path: a file with a template to take instead of the folder's.

        Raises:
            EngineFormatError: a file of the folder is damaged.
            RequestError: the file at `path` cannot be used.
        """
        config_path, template_path = (
            folder / "tokenizer_config.json",
            folder / "chat_template.jinja",
        )
        config: dict[str, Any] = {}
        try:
            if config_path.is_file():
                config = msgspec.json.decode(config_path.read_bytes(), type=dict[str, Any])
            source = config.get("chat_template") if path is None else _read(path)
            if path is None and template_path.is_file():
                source = template_path.read_text(encoding="utf-8")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise EngineFormatError(
                f"cannot read the chat template of {folder}: {error}; "
                "copy the engine again or rebuild it"
            ) from None
        if isinstance(source, list):  # older checkpoints: several named templates
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if source is None:
            return None
        tokens = {}
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
        return cls(source, tokens, path)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The conversation as text, to look at; `encode_chat` makes the prompt.

        Args:
            messages: with "role" and "content" (a string, or parts; see `media.messages`),
                optionally "name", "reasoning_content", "tool_calls" and "tool_call_id".
            add_generation_prompt: end with the beginning of an answer.
            tools: function declarations; see `tool_messages`.
            **kwargs: further template variables, e.g. reasoning_effort.

        Raises:
            RequestError: invalid messages, or the template refuses them.
        """
        check_messages(messages)
        variables = {**kwargs, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._render(messages, variables, datetime.now())

    def encode_chat(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> list[int]:
        """The conversation as token ids, in which message text stays ordinary text.

        Equal to encoding `render`'s text with special tokens parsed, wherever no message contains
        the text of one.

        Args:
            messages: as for `render`.
            tokenizer: of the same engine.
            add_generation_prompt: end with the beginning of an answer.
            tools: as for `render`.
            **kwargs: further template variables: plain values; strings must not contain special
                tokens, nor may those of tools and of tool calls.

        Raises:
            RequestError: invalid messages, the template refuses them, or it changes their text in
                a way that placeholders cannot follow.
        """
        check_messages(messages)
        self._check_tools(messages, tools, tokenizer)
        for name, value in kwargs.items():
            if not isinstance(value, str | int | float | None):
                raise RequestError(
                    f"template variable {name} is of type {type(value).__name__}, it must be "
                    "a string, a number, a flag or None",
                    param=name,
                )
            parts = tokenizer.split_special(value) if isinstance(value, str) else []
            if any(isinstance(part, int) for part in parts):
                raise RequestError(
                    f"template variable {name} contains a special token: {value!r}", param=name
                )
        variables = {**kwargs, "tools": tools, "add_generation_prompt": add_generation_prompt}
        now = datetime.now()
        marked, texts = _mark(messages)
        pieces = _split_marks(self._render(marked, variables, now), texts)
        joined = "".join(text for text, _ in pieces)
        if joined != self._render(messages, variables, now):
            raise RequestError(
                "the chat template changes the text of a message depending on what it says, which "
                "is not supported; render() the messages and generate from the text instead",
                param="messages",
            )
        return _encode_pieces(pieces, tokenizer)

    def _check_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        tokenizer: Tokenizer,
    ) -> None:
        """Refuse what would become a special token, or what the template would leave out."""
        for i, message in enumerate(messages):
            for key in ("tool_calls", "tool_call_id"):
                place = f"messages[{i}].{key}"
                refuse_special(message.get(key), tokenizer, place, "messages")
        if tools is None:
            return
        check_tools(tools)
        refuse_special(tools, tokenizer, "tools", "tools")
        if "tools" not in self._names:
            raise RequestError("the chat template knows no tools; leave tools out", param="tools")

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, object], now: datetime
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._variables,
                    **variables,
                    "messages": _plain(messages),
                    "strftime_now": now.strftime,
                }
            )
        except RENDER_ERRORS as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"chat_template is {path}, which cannot be read: {error}; name a file with Jinja2 text",
            param="chat_template",
        ) from None


def check_messages(messages: Sequence[Message]) -> None:
    """Check the form of a conversation.

    Raises:
        RequestError: names the message, what it has and what is allowed.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise _message_error(place, message, 'an object with "role" and "content"')
        if message.get("role") not in ROLES:
            raise _message_error(f"{place}.role", message.get("role"), f"one of {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            check_parts(content, f"{place}.content", message.get("role"))
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise _message_error(f"{place}.content", content, "a string or a list of parts")
        for key, value in message.items():
            if key not in KEYS:
                raise RequestError(
                    f"{place} has the key {key!r}; supported are {', '.join(KEYS)}",
                    param="messages",
                )
            if key == "tool_calls":
                check_calls(value, f"{place}.{key}")
            elif not isinstance(value, str) and key != "content":
                raise _message_error(f"{place}.{key}", value, "a string")


def _message_error(place: str, value: object, allowed: str) -> RequestError:
    got = repr(value) if isinstance(value, str | None) else f"of type {type(value).__name__}"
    return RequestError(f"{place} is {got}, it must be {allowed}", param="messages")


def _mark(messages: Sequence[Message]) -> tuple[list[dict[str, object]], list[str]]:
    """The messages with placeholders for their texts, and the texts.

    White space around a text stays in place, so that a template can strip it as it would; texts of
    white space alone stay, so that a template can test for them.
    """
    marked: list[dict[str, object]] = []
    texts: list[str] = []

    def mark(value: str) -> str:
        if not (core := value.strip()):
            return value
        head, tail = value.split(core, 1) if value != core else ("", "")
        texts.append(core)
        return f"{head}{MARK_BEGIN}{len(texts) - 1}{MARK_END}{tail}"

    for message in _plain(messages):
        fields = dict(message)
        for key in TEXT_KEYS:
            value = fields.get(key)
            if isinstance(value, str):
                fields[key] = mark(value)
            elif key == "content" and isinstance(value, list):
                fields[key] = [
                    {**part, "text": mark(part["text"])} if "text" in part else part
                    for part in value
                ]
        marked.append(fields)
    return marked, texts


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates see them: strings, parts of strings, and tool calls."""
    return [{key: _plain_value(key, value) for key, value in m.items()} for m in messages]


def _plain_value(key: str, value: Any) -> object:
    if key == "tool_calls":
        return plain_calls(value)
    if value is None:  # the content of an answer that only calls tools
        return ""
    return for_template(value) if isinstance(value, list | tuple) else str(value)


def _split_marks(rendered: str, texts: Sequence[str]) -> list[tuple[str, bool]]:
    """The rendered text as (text, is it the template's own) pieces, with placeholders resolved."""
    first, *rest = rendered.split(MARK_BEGIN)
    pieces = [(first, True)]
    for part in rest:
        number, end, own = part.partition(MARK_END)
        if not end or not number.isdecimal() or int(number) >= len(texts):
            raise RequestError(
                "the chat template changes the text of a message, which is not supported",
                param="messages",
            )
        pieces += [(texts[int(number)], False), (own, True)]
    return pieces


def _encode_pieces(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> list[int]:
    """Encode everything between two special tokens of the template as one text.

    A template's text and a message's text may form tokens together, as in training.
    """
    ids: list[int] = []
    pending = ""
    for text, is_own in pieces:
        for part in tokenizer.split_special(text) if is_own else [text]:
            if isinstance(part, str):
                pending += part
            else:
                ids += [*tokenizer.encode(pending), part]
                pending = ""
    return ids + tokenizer.encode(pending)
