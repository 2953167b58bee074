"""The tokenizer of the tiny checkpoints: byte-level BPE and the family's special tokens.

It is trained on a short text of ours, which is enough for a vocabulary of real size ratios: bytes,
merged pieces, special tokens at the end. Special tokens have the real names at other ids.
"""

import json
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
VOCAB_SIZE = 490  # tokens with a meaning; the models pad it

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
      {%- if part.type != "text" -%}
        {{- raise_exception("this template has no content part " ~ part.type) -}}
      {%- endif -%}
      {{- message(role, "text", part.text) -}}
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


@cache
def special_ids() -> dict[str, int]:
    """Token id of every special token."""
    first = VOCAB_SIZE - len(SPECIAL_TOKENS)
    return {token: first + index for index, token in enumerate(SPECIAL_TOKENS)}


def build() -> Tokenizer:
    """Train the tokenizer; always the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    vocabulary = tokenizer.get_vocab()
    assert all(vocabulary[token] == token_id for token, token_id in special_ids().items())
    return tokenizer


def files() -> dict[str, str]:
    """Name and content of the checkpoint's files for text: tokenizer, template, defaults."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": EOS_TOKEN,
        "pad_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": special_ids()[EOS_TOKEN],
    }
    return {
        "tokenizer.json": build().to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "chat_template.jinja": _CHAT_TEMPLATE,
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
