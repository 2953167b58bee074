"""The tokenizer of the tiny checkpoints: byte-level BPE and a family's special tokens.

It is trained on a short text of ours, which is enough for a vocabulary of real size ratios: bytes,
merged pieces, special tokens at the end. Special tokens have the real names at other ids; the chat
templates are short ones of ours in the family's format. Flint's own tokenizer and template are not
known to us: it is given the markers of GLM-4.7, whose output format it has.
"""

import dataclasses
import json
from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS_TOKEN = "<|content_model_end_sampling|>"
IMAGE_TOKEN = "<|unused_image|>"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|message_user|>",
    "<|message_model|>",
    "<|message_system|>",
    "<|message_tool|>",
    "<|content_text|>",
    "<|content_image|>",
    EOS_TOKEN,
    "<|content_thinking|>",
    "<|end_message|>",
    "<|content_tool_error|>",
    "<|content_xml|>",
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    IMAGE_TOKEN,
)
AUDIO_TOKEN = "<|unused_audio|>"
# Of models that hear.
AUDIO_TOKENS = ("<|content_audio_input|>", "<|audio_end|>", AUDIO_TOKEN)
VOCAB_SIZE = 490  # tokens with a meaning; some models pad it

_TEXT = """\
A lighthouse keeper writes down the weather every morning. On Monday the wind came from the north
and the waves were higher than the wall. On Tuesday there was fog, and nobody could see the harbor.
She counts the ships that pass: one, two, three, sometimes seven, never more than twelve. When the
lamp fails she climbs the stairs, cleans the glass, and waits until the light turns again.
"What do you do all day?" her brother asks. "I answer questions," she says, "and I keep a list."
The list has numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 50, 100. It has names of birds, prices of
oil, and a short program that prints them:
    for bird in birds:
        print(bird, count[bird])
In winter the model of the ship on her table is the only thing that moves. You are a helpful
assistant, she tells it; please explain why the sea is blue. The ship thinks for a while. It does
not know, but it would like to find out, and this is how most good explanations begin.
Grüße aus dem Norden, schreibt ein Freund; à bientôt, écrit une amie.
"""

# One message per part, nothing between messages, and the model's own turn ends with the stop token.
_CHAT_TEMPLATE = """\
{%- set media = {
  "image": ("image", "<|unused_image|>"),
  "audio": ("audio_input", "<|unused_audio|><|audio_end|>"),
} -%}
{%- set roles =
  {"system": "system", "developer": "system", "user": "user", "assistant": "model"} -%}
{%- macro message(role, kind, text) -%}
<|message_{{ role }}|><|content_{{ kind }}|>{{ text }}<|end_message|>
{%- endmacro -%}
{%- for item in messages -%}
  {%- if item.role not in roles -%}
    {{- raise_exception("this template has no role " ~ item.role) -}}
  {%- endif -%}
  {%- set role = roles[item.role] -%}
  {%- if item.reasoning_content -%}
    {{- message(role, "thinking", item.reasoning_content) -}}
  {%- endif -%}
  {%- if item.content is string -%}
    {{- message(role, "text", item.content) -}}
  {%- else -%}
    {%- for part in item.content or [] -%}
      {%- if part.type == "text" -%}
        {{- message(role, "text", part.text) -}}
      {%- elif part.type in media -%}
        {{- message(role, media[part.type][0], media[part.type][1]) -}}
      {%- else -%}
        {{- raise_exception("this template has no content part " ~ part.type) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if role == "model" -%}
    {{- "<|content_model_end_sampling|>" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|message_model|>" -}}
{%- endif -%}
"""


# Markers of roles on lines of their own; the answer begins inside the reasoning.
_GLM_CHAT_TEMPLATE = """\
{{- "[gMASK]<sop>" -}}
{%- for item in messages -%}
  {%- if item.role == "tool" -%}
    {{- "<|observation|>\\n" ~ item.content -}}
  {%- elif item.role in ("system", "developer") -%}
    {{- "<|system|>\\n" ~ item.content -}}
  {%- elif item.role == "user" -%}
    {{- "<|user|>\\n" ~ item.content -}}
  {%- elif item.role == "assistant" -%}
    {{- "<|assistant|>\\n<think>" ~ (item.reasoning_content or "") ~ "</think>" -}}
    {{- item.content or "" -}}
  {%- else -%}
    {{- raise_exception("this template has no role " ~ item.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|assistant|>\\n<think>" -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Style:
    """A family's way of marking up text.

    Attributes:
        special_tokens: in the order of their ids, which are the last ones.
        visible_tokens: those that stay in decoded text, though they are single tokens.
        eos_tokens: any of them ends an answer; the first is the tokenizer's end token.
        chat_template: Jinja.
        sampling: names and values of recommended settings, for generation_config.json.
    """

    special_tokens: tuple[str, ...]
    visible_tokens: frozenset[str]
    eos_tokens: tuple[str, ...]
    chat_template: str
    sampling: tuple[tuple[str, float], ...]


INKLING = Style(
    SPECIAL_TOKENS,
    frozenset(),
    (EOS_TOKEN,),
    _CHAT_TEMPLATE,
    (("temperature", 1.0),),
)
INKLING_AUDIO = dataclasses.replace(INKLING, special_tokens=(*SPECIAL_TOKENS, *AUDIO_TOKENS))
GLM = Style(
    (
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ),
    frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"}),
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
    _GLM_CHAT_TEMPLATE,
    (("temperature", 1.0), ("top_p", 0.95), ("top_k", 20)),
)


@cache
def special_ids(style: Style = INKLING) -> dict[str, int]:
    """Token id of every special token."""
    first = VOCAB_SIZE - len(style.special_tokens)
    return {token: first + index for index, token in enumerate(style.special_tokens)}


def build(style: Style = INKLING) -> Tokenizer:
    """Train the tokenizer; always the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(style.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token not in style.visible_tokens, normalized=False)
            for token in style.special_tokens
        ]
    )
    vocabulary = tokenizer.get_vocab()
    assert all(vocabulary[token] == token_id for token, token_id in special_ids(style).items())
    return tokenizer


def files(style: Style = INKLING) -> dict[str, str]:
    """Name and content of the checkpoint's files for text: tokenizer, template, defaults."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": style.eos_tokens[0],
        "pad_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    eos_ids = [special_ids(style)[token] for token in style.eos_tokens]
    generation = {
        "do_sample": True,
        **dict(style.sampling),
        "eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0],
    }
    return {
        "tokenizer.json": build(style).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "chat_template.jinja": style.chat_template,
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
