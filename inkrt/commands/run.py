"""ink-run: generate text with an engine, once or in a dialog.

Output goes to stdout as it comes; everything else goes to stderr.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inkrt.commands import console, spec_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inkrt.runtime.chat import Message
    from inkrt.runtime.llm import LLM, Prompt
    from inkrt.runtime.output import Delta
    from inkrt.runtime.sampling_params import SamplingParams
    from inkrt.runtime.spec.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Stats:
    """Times of one generation, as a user sees them.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: tokens generated, the end token included.
        first_token_s: from asking to the first token, reading of the prompt included.
        total_s: from asking to the last token.
        speculation: what speculation did.
    """

    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    total_s: float
    speculation: "SpeculationStats | None" = None

    def __str__(self) -> str:
        line = (
            f"{self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens, "
            f"first token after {self.first_token_s * 1e3:.1f} ms"
        )
        decode_s = self.total_s - self.first_token_s
        if self.output_tokens > 1 and decode_s > 0:
            line += f", then {(self.output_tokens - 1) / decode_s:.1f} tokens/s"
        spec = self.speculation
        if spec is not None and spec.rounds:
            of_rounds = " ".join(f"{share:.0%}" for share in spec.acceptance_at)
            of_reached = " ".join(f"{share:.0%}" for share in spec.conditional_acceptance_at)
            by = f", {spec.on_device} of both by the device alone" if spec.on_device else ""
            line += (
                f"\n{spec.rounds} rounds of {spec.acceptance_length:.2f} tokens and "
                f"{spec.plain_steps} plain steps{by}; {spec.accepted} of {spec.drafted} verified "
                f"drafts accepted, {spec.proposed} proposed; by place {of_rounds} of the rounds, "
                f"{of_reached} of those that came to it"
            )
        return line


def run(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder.")],
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; without it, stdin is read.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="A dialog; Ctrl-D ends it.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Use the chat template, or the bare text.")
    ] = True,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="An image before the prompt; may be given several times."
        ),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A recording before the prompt; may be repeated."),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and times.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate.  [default: as many as fit]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.  [default: the model's]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Share of probability to draw from; 1 is all.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from the k likeliest tokens; 0 is all.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens below this share of the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a generation.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: less of what prompt and output have; 1 is off.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Off a logit for each time its token is in the output.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Off the logits of all tokens in the output.")
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Never generated; may be given several times.")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate before it may end.  [default: 0]")
    ] = None,
    options: spec_options.SpecOptions,
) -> None:
    """Generate text with an engine.

    Sampling options that are not given follow the model's generation_config.json. The answer does
    not depend on who drafts. In a dialog on a terminal, accepted drafts are green; with NO_COLOR=1
    they are not.
    """
    if prompt is None and not interactive:
        if sys.stdin.isatty():
            raise typer.BadParameter("give a prompt with -p, or ask for a dialog with -i")
        prompt = sys.stdin.read()

    from inkrt.runtime.llm import LLM

    choices = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "bad_words": bad_word or None,
        "min_tokens": min_tokens,
    }
    given: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    with LLM(engine, speculative=options.config()) as llm:
        options.require_use(llm)
        dialog = Dialog(
            llm,
            replace(llm.default_params, **given),
            is_chat=chat,
            show_stats=stats,
            marks_drafts=interactive and console.can_color(sys.stdout),
            media={"images": list(image or ()), "audio": list(audio or ())},
        )
        line = _read_line() if prompt is None else prompt
        while line is not None:
            try:
                dialog.say(line)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                sys.stdout.write("\n")  # stops this answer, not the dialog
            line = _read_line() if interactive else None


class Dialog:
    """Prompts and answers in turn, printed as they come.

    Args:
        llm: what answers.
        params: for every answer.
        is_chat: whether earlier turns are part of the prompt, through the chat template; otherwise
            every prompt stands alone and is continued.
        show_stats: print counts and times of each answer to stderr.
        marks_drafts: print accepted drafts in green.
        media: paths of "images" and "audio" that go with the first prompt.
    """

    def __init__(
        self,
        llm: "LLM",
        params: "SamplingParams",
        *,
        is_chat: bool,
        show_stats: bool,
        marks_drafts: bool = False,
        media: "Mapping[str, Sequence[Path]] | None" = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._is_chat = is_chat
        self._show_stats = show_stats
        self._marks_drafts = marks_drafts
        self._messages: list[Message] = []
        self._media = {name: list(paths) for name, paths in (media or {}).items() if paths}

    def say(self, prompt: str) -> None:
        """Print the answer to `prompt`.

        Raises:
            InkError: the request is invalid or does not fit.
        """
        messages: list[Message] = [
            *self._messages,
            {"role": "user", "content": self._content(prompt)},
        ]
        raw: Prompt = {"prompt": prompt, **self._media} if self._media else prompt
        started = time.perf_counter()
        if self._is_chat:
            stream = self._llm.chat_stream(messages, self._params)
        else:
            stream = self._llm.stream(raw, self._params)
        num_tokens, first, text = 0, started, ""
        before = self._llm.speculation.copy()
        try:
            for delta in stream:
                if num_tokens == 0:
                    first = time.perf_counter()
                num_tokens += len(delta.token_ids)
                text += delta.text
                sys.stdout.write(self._marked(delta))
                sys.stdout.flush()
        finally:
            stream.close()
        ended = time.perf_counter()
        if not text.endswith("\n"):
            sys.stdout.write("\n")
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._media.clear()
        if self._show_stats:
            sys.stdout.flush()
            stats = Stats(
                len(self._llm.prompt_tokens(messages if self._is_chat else raw)),
                num_tokens,
                first - started,
                ended - started,
                self._llm.speculation.since(before),
            )
            console.say(str(stats), is_result=False)

    def _marked(self, delta: "Delta") -> str:
        if not self._marks_drafts or not delta.num_accepted_chars:
            return delta.text
        drafted = delta.text[: delta.num_accepted_chars]
        return typer.style(drafted, fg="green") + delta.text[delta.num_accepted_chars :]

    def _content(self, prompt: str) -> object:
        """Of the next message: what goes with the first prompt stands before it."""
        if not self._media:
            return prompt
        return [
            *({"type": "image", "image": path} for path in self._media.get("images", ())),
            *({"type": "audio", "audio": path} for path in self._media.get("audio", ())),
            {"type": "text", "text": prompt},
        ]


def _read_line() -> str | None:
    """The next line that is not empty; None at the end of input."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.rstrip("\n")


def make_app() -> typer.Typer:
    """The application."""
    app = console.make_app("ink-run", "Generate text with an engine.", variables=True)
    console.add_command(
        app,
        run,
        options=spec_options.SpecOptions,
        api_names={**spec_options.API_NAMES, "bad_words": "bad_word", "images": "image"},
    )
    return app


def main() -> None:
    """Entry point."""
    console.run(make_app())


if __name__ == "__main__":
    main()
