"""Text to token ids and back, over the `tokenizers` library.

All added tokens of `tokenizer.json` (role markers, tool markers, ...) are treated alike: they are
parsed out of text only on request. Text of a user never becomes a marker.
"""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tokenizers

from inkrt.errors import EngineFormatError, RequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of one engine. Thread-safe.

    Args:
        path: a `tokenizer.json`.

    Attributes:
        special_ids: id of every added token by its text.

    Raises:
        EngineFormatError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = msgspec.json.decode(path.read_bytes())
            added = content.get("added_tokens") or []
            self.special_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
            self._skipped = frozenset(token["id"] for token in added if token["special"])
            # The library leaves only "special" tokens unparsed on request; some models declare
            # their markers as ordinary added tokens, which text could then forge.
            content["added_tokens"] = [{**token, "special": True} for token in added]
            self._source = msgspec.json.encode(content).decode()
            self._library = tokenizers.Tokenizer.from_str(self._source)
        except Exception as error:  # the library raises bare Exception for damaged files
            raise EngineFormatError(
                f"cannot read {path}: {error}; copy the file again or rebuild the engine"
            ) from error
        # `encode_special_tokens` is state of the library's object, set before every use.
        self._lock = threading.Lock()
        self._for_grammars: dict[tuple[int, tuple[int, ...]], LLTokenizer] = {}

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a text; none is put before or after it.

        Args:
            text: anything.
            parse_special: turn the text of added tokens into their ids; only for trusted text.

        Raises:
            RequestError: the text is not Unicode (it has an unpaired surrogate).
        """
        ids: list[int] = self._encode(text, parse_special).ids
        return ids

    def split_special(self, text: str) -> list[int | str]:
        """The text cut at added tokens: their ids, and the ordinary text before and after them."""
        encoding = self._encode(text, parse_special=True)
        special = set(self.special_ids.values())
        parts: list[int | str] = []
        done = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in special:
                parts += [text[done:start], token]
                done = end
        parts.append(text[done:])
        return [part for part in parts if part != ""]

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens; bytes that are no valid UTF-8 become U+FFFD.

        Args:
            tokens: ids; those that the tokenizer does not know have no text.
            skip_special_tokens: leave out tokens that the tokenizer declares special.
        """
        kept = [t for t in tokens if not (skip_special_tokens and t in self._skipped)]
        text: str = self._library.decode(kept, skip_special_tokens=False)
        return text

    def grammar_tokenizer(self, vocab_size: int, end_ids: tuple[int, ...]) -> "LLTokenizer":
        """What llguidance makes of this tokenizer, made once: large ones take a second.

        Args:
            vocab_size: of the model's logits.
            end_ids: tokens that may come when a grammar is complete.
        """
        from llguidance import LLTokenizer

        with self._lock:
            key = vocab_size, end_ids
            if key not in self._for_grammars:
                made = LLTokenizer(self._source, n_vocab=vocab_size, eos_token=list(end_ids))
                self._for_grammars[key] = made
            return self._for_grammars[key]

    def _encode(self, text: str, parse_special: bool) -> tokenizers.Encoding:
        with self._lock:
            self._library.encode_special_tokens = not parse_special
            try:
                return self._library.encode(text, add_special_tokens=False)
            except TypeError:  # what the library raises for it
                raise RequestError(
                    "a text holds an unpaired surrogate, it must be valid Unicode", param="prompt"
                ) from None


class IncrementalDecoder:
    """Decodes tokens one by one; never gives out part of a character.

    For byte-level tokenizers, all that `push` and `flush` return joined is `Tokenizer.decode` of
    all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The window: tokens since the last but one place where the text was whole. The tokens up to
        # the last such place are context, because some decoders treat the first token differently.
        self._window: list[int] = []
        self._num_context = 0
        self._num_given = 0  # characters of the window's text that were given out

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain now, often more or less than the token."""
        self._window.append(token)
        text = self._decode(self._window)
        # An unfinished character decodes to U+FFFD; so does garbage, which the next token reveals.
        certain = text.rstrip(REPLACEMENT)
        delta = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if len(certain) == len(text):
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._num_given = len(self._decode(self._window))
        return delta

    def flush(self) -> str:
        """End of the tokens: return what was held back, with U+FFFD for unfinished characters."""
        delta = self._decode(self._window)[self._num_given :]
        self._window.clear()
        self._num_context = self._num_given = 0
        return delta

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
