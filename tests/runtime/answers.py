"""Answers as token ids, and how they are read, for tests of their formats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake import make_tokenizer
from tokenizers import AddedToken

from inkrt.runtime.answer.format import answer_format, make_parser
from inkrt.runtime.answer.reader import AnswerReader
from inkrt.runtime.output import Delta, FinishReason
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.tokenizer import Tokenizer


def write_tokenizer(path: Path, markers: Sequence[str]) -> None:
    """A tokenizer whose special tokens are these and some more."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(marker, special=True) for marker in markers])
    tokenizer.save(str(path))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of an answer with markers written out."""
    return tokenizer.encode(text, parse_special=True)


@dataclass(slots=True)
class Read:
    """What was read of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    end: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0
    num_reasoning: int = 0


def read(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    sizes: Iterable[int],
    *,
    prompt: Sequence[int] = (),
    tools: Sequence[dict[str, Any]] | None = None,
    params: SamplingParams | None = None,
    finish: FinishReason = "stop",
    single_call: bool = False,
) -> Read:
    """Read an answer in deltas of so many tokens; the last token ends it."""
    parser = make_parser(answer_format(tokenizer), tokenizer, prompt, tools=tools)
    reader = AnswerReader(parser, params or SamplingParams(), single_call=single_call)
    made, place, number = Read(), 0, iter(sizes)
    while place < len(ids) and reader.end is None:
        size = next(number)
        is_last = place + size >= len(ids)
        piece = reader.push(
            Delta("", tuple(ids[place : place + size]), finish if is_last else None)
        )
        place += size
        for part in piece.parts:
            assert sum(map(bool, (part.reasoning, part.content, part.call))) == 1
            made.reasoning += part.reasoning
            made.content += part.content
            if part.call is not None and part.call.name is not None:
                assert part.call.index == len(made.calls)
                made.calls.append([part.call.name, part.call.arguments])
            elif part.call is not None:
                made.calls[part.call.index][1] += part.call.arguments
    made.end, made.stop_reason = reader.end, reader.stop_reason
    made.num_tokens, made.num_reasoning = reader.num_tokens, reader.num_reasoning_tokens
    return made
