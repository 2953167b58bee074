"""What an answer must be made of: a JSON schema, a regular expression, a grammar, one of several.

`llguidance` reads them all and says which tokens may come next; `grammar_mask.py` asks it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from inkrt.errors import RequestError, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Where in an answer: all of it; its text, in the model's format; or one tool call.
GrammarPlace = Literal["all", "text", "call"]
_MOST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar; made by one of its class methods.

    Attributes:
        source: as llguidance takes it.
        place: where it holds. Reasoning before the text or the call is free.
    """

    source: str
    place: GrammarPlace = "all"

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any], place: GrammarPlace = "all") -> Self:
        """JSON of a schema, without white space between its parts: some models never end it.

        Raises:
            RequestError: it is no JSON value.
        """
        try:
            text = json.dumps(schema, ensure_ascii=False)
            text.encode()
            source = _matcher_class().grammar_from_json_schema(
                text, overrides={"whitespace_flexible": False}
            )
            return cls(source, place)
        except (ValueError, RecursionError, TypeError) as error:
            raise _error(str(error)) from None

    @classmethod
    def of_regex(cls, pattern: str, place: GrammarPlace = "all") -> Self:
        """A text that a regular expression matches as a whole."""
        return cls(_matcher_class().grammar_from_regex(_unicode(pattern)), place)

    @classmethod
    def of_lark(cls, text: str, place: GrammarPlace = "all") -> Self:
        """A context-free grammar in Lark's notation, beginning with `start`."""
        return cls(_matcher_class().grammar_from_lark(_unicode(text)), place)

    @classmethod
    def of_choice(cls, texts: Sequence[str], place: GrammarPlace = "all") -> Self:
        """One of some texts.

        Raises:
            RequestError: there is none, or one is empty.
        """
        if not texts or not all(texts):
            raise _error("a choice needs at least one text, and none may be empty")
        return cls.of_regex("|".join(map(_escaped, texts)), place)

    def matcher(self, tokenizer: Any) -> "LLMatcher":
        """A matcher at its beginning.

        Args:
            tokenizer: llguidance's.

        Raises:
            RequestError: it is no grammar, or one that is too large.
        """
        matcher = _matcher_class()(tokenizer, self.source, log_level=0)
        if matcher.is_error():
            raise _error(matcher.get_error())
        return matcher


def _matcher_class() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise UsageError(
            'grammars need llguidance, which is not installed: pip install "inkrt[serve]"'
        ) from None
    return LLMatcher


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _error("it holds an unpaired surrogate") from None
    return text


def _escaped(text: str) -> str:
    # Python escapes more than the library's syntax knows, e.g. a space.
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", text)


def _error(reason: str) -> RequestError:
    shown = " ".join(reason.split())[:_MOST_MESSAGE]
    return RequestError(f"grammar cannot be used: {shown}", param="grammar")
