"""The trained nano as engines of both targets, and the prompts of tests/system in its tokens."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.nano import export
from inkrt.runtime.engine import Engine
from inkrt.runtime.tokenizer import Tokenizer

CHECKPOINT = Path(export.__file__).parent / "checkpoint"
PROMPTS = Path(__file__).parents[1] / "system/nano_prompts.json"


@contextlib.contextmanager
def open_nano(folder: Path, **options: Any) -> Iterator[dict[str, Engine]]:
    """Build and open an engine for each target that keeps what launches wrote, by target."""
    with contextlib.ExitStack() as opened:
        engines = {}
        for target in ("cpu", "sm_90a"):
            chosen = BuildOptions(
                target=target, prefill_chunk=64, keep_intermediates=True, **options
            )
            build_engine(CHECKPOINT, folder / target, chosen)
            engines[target] = opened.enter_context(Engine.open(folder / target))
        yield engines


def nano_prompts(longest: int) -> list[list[int]]:
    """The twenty prompts, or their first tokens."""
    tokenizer = Tokenizer(CHECKPOINT / "tokenizer.json")
    given = json.loads(PROMPTS.read_text())
    made = []
    for prompt in given["prompts"]:
        text = given["texts"][prompt["text"]] if prompt["kind"] == "text" else prompt["text"]
        made.append(tokenizer.encode(text, parse_special=True)[: prompt.get("length")][:longest])
    assert len(made) == 20
    return made
