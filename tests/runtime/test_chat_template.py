"""Chat templates: rendering as transformers does, and user text that stays text."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake import ASSISTANT, END, TEMPLATE, USER, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inkrt.errors import EngineFormatError, RequestError
from inkrt.runtime.chat import ChatTemplate
from inkrt.runtime.tokenizer import Tokenizer

STRIPPING = TEMPLATE.replace("message.content", "message.content | trim")
REASONING = (
    "{%- for message in messages -%}<|{{ message.role }}|>"
    "{%- if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}"
    "{%- endif %}{% if message.content %}{{ message.content }}{% endif %}<|end|>"
    "{%- endfor -%}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer().save(str(path))
    return Tokenizer(path)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def refuse(template: ChatTemplate, messages: Any, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        template.render(messages, **kwargs)
    return caught.value


def test_render() -> None:
    template = ChatTemplate(TEMPLATE)
    messages = [*user("Hi"), {"role": "assistant", "content": "你好"}]
    text = "<|user|>\nHi<|end|><|assistant|>\n你好<|end|>"
    assert template.render(messages, add_generation_prompt=False) == text
    assert template.render(messages) == text + "<|assistant|>\n"


def test_names_that_templates_expect() -> None:
    source = """
    {%- set ns = namespace(n=0) %}
    {%- for m in messages %}
        {%- if m.role == 'system' %}{% continue %}{% endif %}
        {%- set ns.n = ns.n + 1 %}
    {%- endfor %}
    {{- bos_token }} {{ ns.n }} {{ dict(a=1) | tojson }} {{ effort }}
    {{- tools | tojson(indent=None) }} {{ strftime_now('%Y') | length }}"""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "system", "content": "s"}, *user("u")]
    tools = [{"name": "f<é>"}]
    rendered = template.render(messages, tools=tools, effort="high")
    assert rendered == '<s> 1 {"a": 1} high[{"name": "f<é>"}] 4'


def test_equals_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "system", "content": "Be  brief.\n"},
        *user(" <b>Grüße</b> "),
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]
    for source in (TEMPLATE, STRIPPING, REASONING):
        expected, _ = utils.render_jinja_template([messages], chat_template=source)
        rendered = ChatTemplate(source).render(messages, add_generation_prompt=False)
        assert [rendered] == list(expected)


@pytest.mark.parametrize("source", [TEMPLATE, STRIPPING, REASONING])
def test_encode_equals_encoding_the_text(tokenizer: Tokenizer, source: str) -> None:
    template = ChatTemplate(source)
    for content in (
        "hello world",
        "  spaced \n",
        "",
        " \n ",
        "你好 🎉",
        "\ue0f00\ue0f1",
        "{{ x }}",
    ):
        messages = [
            {"role": "system", "content": "the quick"},
            *user(content),
            {"role": "assistant", "content": "hello", "reasoning_content": content},
        ]
        text = template.render(messages)
        ids = template.encode_chat(messages, tokenizer)
        assert ids == tokenizer.encode(text, parse_special=True), content


MARKERS = st.sampled_from(
    ["<|end|>", "<|user|>", "<think>", "<|eo", "s|>", "\ue0f00\ue0f1", " ", "x"]
)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.lists(MARKERS, max_size=6), min_size=1, max_size=3))
@pytest.mark.parametrize("source", [TEMPLATE, STRIPPING])
def test_message_text_never_becomes_a_marker(
    tokenizer: Tokenizer, source: str, parts: list[list[str]]
) -> None:
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": "".join(part)} for part in parts]
    ids = template.encode_chat(messages, tokenizer)
    special = [token for token in ids if token in tokenizer.special_ids.values()]
    assert special == [USER, END] * len(parts) + [ASSISTANT]
    assert tokenizer.decode(ids, skip_special_tokens=False) == template.render(messages)


def test_reasoning_and_names_are_text_too(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}{% endfor %}"
    )
    message = {"role": "user", "content": "c", "name": "<|eos|>", "reasoning_content": "<|end|>"}
    ids = template.encode_chat([message], tokenizer)
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(ids) == "<|eos|><|end|>"


def test_a_template_that_changes_text_is_refused(tokenizer: Tokenizer) -> None:
    for expression, content in (
        ("content | upper", "hi"),
        ("content | length", "hi"),
        ("content.split('</think>')[-1]", "a</think>b"),
        ("content[1:]", "hi"),
        ("content | tojson", 'say "hi"'),
    ):
        template = ChatTemplate("<|user|>{{ messages[0]." + expression + " }}")
        with pytest.raises(RequestError, match="the chat template changes the text") as caught:
            template.encode_chat(user(content), tokenizer)
        assert caught.value.param == "messages"


def test_template_variables_cannot_carry_markers(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ effort }}{{ messages[0].content }}")
    assert template.encode_chat(user("x"), tokenizer, effort="low") == tokenizer.encode("lowx")
    with pytest.raises(RequestError) as caught:
        template.encode_chat(user("x"), tokenizer, effort="<|eos|>")
    assert str(caught.value) == "template variable effort contains a special token: '<|eos|>'"
    with pytest.raises(RequestError, match="template variable effort is of type list") as caught:
        template.encode_chat(user("x"), tokenizer, effort=["<|eos|>"])
    assert caught.value.param == "effort"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of at least one message"),
        ("hi", "messages must be a list of at least one message"),
        (["hi"], 'messages[0] is \'hi\', it must be an object with "role" and "content"'),
        (
            [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}],
            "messages[1].role is 'robot', "
            "it must be one of system, developer, user, assistant, tool",
        ),
        (
            [{"role": "user"}],
            "messages[0].content is None, it must be a string or a list of parts",
        ),
        (
            [{"role": "user", "content": 3}],
            "messages[0].content is of type int, it must be a string or a list of parts",
        ),
        (
            [{"role": "user", "content": []}],
            "messages[0].content is an empty list, it must be a string or have a part",
        ),
        (
            [{"role": "user", "content": ["a"]}],
            "messages[0].content[0] is of type str, its type must be one of text, image, audio",
        ),
        (
            [{"role": "user", "content": [{"type": "video", "video": "a"}]}],
            "messages[0].content[0] is 'video', its type must be one of text, image, audio",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "text": "a"}]}],
            "messages[0].content[0] has the keys type, text; it must have type and image",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": b"a"}]}],
            "messages[0].content[0].text is of type bytes, not a string",
        ),
        (
            [{"role": "tool", "content": [{"type": "audio", "audio": "a"}]}],
            "messages[0].content[0] is of type audio, which only messages of a user can have",
        ),
        (
            [{"role": "assistant", "content": "", "audio": []}],
            "messages[0] has the key 'audio'; supported are role, content, name, "
            "reasoning_content, tool_calls, tool_call_id",
        ),
        (
            [{"role": "user", "content": "", "name": 3}],
            "messages[0].name is of type int, it must be a string",
        ),
    ],
)
def test_invalid_messages(messages: Any, message: str) -> None:
    error = refuse(ChatTemplate(TEMPLATE), messages)
    assert (str(error), error.param) == (message, "messages")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{% set ns = namespace() %}{% set ns.__call__ = 1 %}", "attribute '__call__'"),
        ("{{ namespace(__call__=1) }}", "attribute '__call__'"),
        ("{% include 'other' %}", "no loader"),
        ("{{ 1 // 0 }}", "by zero"),
    ],
)
def test_template_errors_are_request_errors(source: str, reason: str) -> None:
    error = refuse(ChatTemplate(source), user("hi"))
    assert str(error).startswith("the chat template refuses the messages: ")
    assert reason in str(error)
    assert error.param == "messages"


def test_load(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = {"chat_template": "A{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "B"}}
    config_path = tmp_path / "tokenizer_config.json"
    config_path.write_text(json.dumps({**config, "eos_token": "E"}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(user("x")) == "ABE"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    config_path.write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(user("x")) == "yes"
    (tmp_path / "chat_template.jinja").write_text("你{{ messages[0].content }}", encoding="utf-8")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(user("x")) == "你x"


def test_a_file_instead_of_the_folders(tmp_path: Path) -> None:
    folder, own = tmp_path / "engine", tmp_path / "own.jinja"
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("the folder's")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    own.write_text("{{ bos_token }}ü{{ messages[0].content }}", encoding="utf-8")
    template = ChatTemplate.load(folder, own)
    assert template is not None
    assert template.render(user("x")) == "<s>üx"
    for content, reason in (
        (b"{% for %}", "which is not valid Jinja2 (line 1: "),
        (b"\xff", "which cannot be read: "),
        (None, "which cannot be read: "),
    ):
        own.unlink(missing_ok=True)
        if content is not None:
            own.write_bytes(content)
        with pytest.raises(RequestError) as caught:
            ChatTemplate.load(folder, own)
        assert str(caught.value).startswith(f"chat_template is {own}, {reason}")


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(
        EngineFormatError, match=r"the chat template is not valid Jinja2 \(line 1: "
    ):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(EngineFormatError, match="cannot read the chat template of"):
        ChatTemplate.load(tmp_path)
