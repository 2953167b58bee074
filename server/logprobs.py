"""Log-probabilities in the two forms that the API has."""

from collections.abc import Sequence
from typing import Any

from inkrt.runtime.output import TokenLogprob
from inkrt.runtime.tokenizer import REPLACEMENT, Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(items: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """Of /v1/chat/completions."""
    content = [
        {
            **_entry(item.token, item.logprob, tokenizer),
            "top_logprobs": [_entry(token, value, tokenizer) for token, value in item.top],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    items: Sequence[TokenLogprob], tokenizer: Tokenizer, start: int
) -> dict[str, Any]:
    """Of /v1/completions.

    Args:
        items: of tokens in order.
        tokenizer: of the model.
        start: characters of the answer in front of them.
    """
    tokens = [_text(item.token, tokenizer) for item in items]
    offsets, place = [], start
    for text in tokens:
        offsets.append(place)
        place += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [max(item.logprob, _LEAST) for item in items],
        # Several tokens may have one text; the first written is overwritten by the likelier.
        "top_logprobs": [
            {_text(token, tokenizer): max(value, _LEAST) for token, value in reversed(item.top)}
            for item in items
        ],
        "text_offset": offsets,
    }


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = _text(token, tokenizer)
    # A token of a part of a character has no text, so its bytes cannot be told from it.
    own = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": own}


def _text(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)
