"""The tokenizer of the trained checkpoint: byte-level BPE with digits apart, and the markers."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from inkrt.engines.nano.chat import CHAT_TEMPLATE
from inkrt.engines.tiny.tokenizer import EOS_TOKEN, INKLING

NUM_ORDINARY = 4096
SPECIAL_TOKENS = INKLING.special_tokens
VOCAB_SIZE = NUM_ORDINARY + len(SPECIAL_TOKENS)  # tokens with a meaning
PADDED_VOCAB_SIZE = (VOCAB_SIZE // 64 + 1) * 64  # ids from VOCAB_SIZE on are never text
END_OF_TEXT = "<|endoftext|>"


def train(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """Train on texts; the same texts give the same tokenizer.

    Raises:
        ValueError: the texts are too few for the vocabulary.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_ORDINARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != NUM_ORDINARY:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, they must give {NUM_ORDINARY}; "
            "train on more text"
        )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_files(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write the checkpoint's files for text: tokenizer, template, defaults."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": EOS_TOKEN,
        "pad_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    generation = {
        "do_sample": True,
        **dict(INKLING.sampling),
        "eos_token_id": tokenizer.token_to_id(EOS_TOKEN),
    }
    for name, content in (
        ("tokenizer.json", tokenizer.to_str(pretty=True)),
        ("tokenizer_config.json", json.dumps(settings, indent=2) + "\n"),
        ("chat_template.jinja", CHAT_TEMPLATE),
        ("generation_config.json", json.dumps(generation, indent=2) + "\n"),
    ):
        (folder / name).write_text(content, encoding="utf-8")


class TextEncoder:
    """Text and markers to ids; markers in text stay text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._special = {token: vocabulary[token] for token in SPECIAL_TOKENS}

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """`encode` of every text."""
        return [e.ids for e in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def special(self, name: str) -> int:
        """Id of the marker `<|name|>`."""
        return self._special[f"<|{name}|>"]

    def decode(self, tokens: list[int]) -> str:
        """Text of ordinary tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
