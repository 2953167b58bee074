"""ink-run: what reaches the engine, what is printed where, how it ends."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from typer.testing import CliRunner, Result

from inkrt.commands import console, run
from inkrt.errors import CapacityError, InkError, RequestError
from inkrt.runtime import llm as llm_module
from inkrt.runtime.generation import Delta
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.stats import SpeculationStats


class FakeLLM:
    """Answers with the prompt's words, a token each; keeps what it was asked."""

    opened: ClassVar[list["FakeLLM"]] = []

    def __init__(self, folder: Path, *, speculative: SpeculativeConfig) -> None:
        self.folder, self.speculative = folder, speculative
        self.speculation = SpeculationStats()
        self.default_params = SamplingParams(temperature=0.7, top_k=5)
        self.asked: list[Any] = []
        self.is_closed = False
        self.streams_closed = 0
        self.error: Exception | None = None
        self.method = "ngram" if speculative.method == "ngram" else "dspark"
        self.opened.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def chat_stream(self, messages: Sequence[Any], params: SamplingParams) -> Generator[Delta]:
        self.asked.append((list(messages), params))
        content = messages[-1]["content"]
        return self._words(content if isinstance(content, str) else content[-1]["text"])

    def stream(self, prompt: Any, params: SamplingParams) -> Generator[Delta]:
        self.asked.append((prompt, params))
        return self._words(prompt if isinstance(prompt, str) else prompt["prompt"])

    def prompt_tokens(self, prompt: Any) -> list[str]:
        return prompt.split() if isinstance(prompt, str) else ["<|m|>"] * len(prompt)

    def _words(self, text: str) -> Generator[Delta]:
        try:
            for index, word in enumerate(text.split()):
                if word == "explode":
                    raise CapacityError("pages are exhausted")
                if word == "interrupt":
                    raise KeyboardInterrupt
                yield Delta(f" {word}", (index,))
            yield Delta("", (99,), "stop")
        finally:
            self.streams_closed += 1
            if self.speculative.method == "ngram":
                for drafted, accepted, proposed in ((3, 2, 5), (2, 0, 2), (0, 0, 1)):
                    self.speculation.count(drafted, accepted, accepted + 1, proposed=proposed)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLLM.opened.clear()
    monkeypatch.setattr(llm_module, "LLM", FakeLLM)


def invoke(*arguments: str, stdin: str = "", **environment: str) -> Result:
    return CliRunner().invoke(run.make_app(), arguments, input=stdin, env=environment)


def the_llm() -> FakeLLM:
    (llm,) = FakeLLM.opened
    assert llm.is_closed
    assert llm.streams_closed == len(llm.asked)
    return llm


def test_chat_prompt_with_the_models_parameters() -> None:
    result = invoke("engine", "-p", "one two")
    assert (result.exit_code, result.stdout, result.stderr) == (0, " one two\n", "")
    llm = the_llm()
    assert llm.folder == Path("engine")
    assert llm.asked == [([{"role": "user", "content": "one two"}], llm.default_params)]


def test_images_and_recordings_go_with_the_first_prompt_only() -> None:
    media = ("--image", "a.png", "--audio", "b.wav", "--image", "c.png")
    assert invoke("engine", "-i", *media, stdin="one\ntwo\n").exit_code == 0
    first, second = (messages for messages, _ in the_llm().asked)
    parts = [("image", Path("a.png")), ("image", Path("c.png")), ("audio", Path("b.wav"))]
    parts += [("text", "one")]  # type: ignore[list-item]
    assert first[-1]["content"] == [{"type": kind, kind: value} for kind, value in parts]
    assert (second[0], second[-1]["content"]) == (first[0], "two")


def test_options_replace_the_models_parameters() -> None:
    options = "--max_tokens 7 --temperature 0 --top-p 0.5 --top-k 0 --min-p 0.1 --seed 3 --raw"
    assert invoke("engine", "-p", "x", *options.split()).exit_code == 0
    expected = SamplingParams(temperature=0.0, top_k=0, top_p=0.5, min_p=0.1, seed=3, max_tokens=7)
    assert the_llm().asked == [("x", expected)]


def test_options_that_change_logits() -> None:
    penalties = "--repetition-penalty 1.2 --frequency-penalty -0.5 --presence-penalty 1.5"
    others = ["--bad-word", "as an AI", "--bad-word", "oh", "--min-tokens", "3"]
    assert invoke("engine", "-p", "x", *penalties.split(), *others).exit_code == 0
    llm = the_llm()
    assert llm.asked[0][1] == replace(
        llm.default_params,
        repetition_penalty=1.2,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        bad_words=("as an AI", "oh"),
        min_tokens=3,
    )
    result = invoke("engine", "-p", "x", "--min-tokens", "5", "--max-tokens", "4")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: --min-tokens is 5, it must be at most max_tokens (4)\n",
    )


def test_options_from_the_environment() -> None:
    assert invoke("engine", "-p", "x", INK_RUN_MAX_TOKENS="4").exit_code == 0
    llm = the_llm()
    assert llm.asked[0][1] == replace(llm.default_params, max_tokens=4)


def test_prompt_from_stdin() -> None:
    assert invoke("engine", "--raw", stdin="a b\nc\n").stdout == " a b c\n"
    assert the_llm().asked[0][0] == "a b\nc\n"


def test_dialog_keeps_the_turns() -> None:
    result = invoke("engine", "-i", stdin="one\n\ninterrupt me\ntwo three\n")
    assert result.exit_code == 0
    assert result.stdout == " one\n\n two three\n"
    # The interrupted turn is not part of the conversation.
    assert the_llm().asked[-1][0] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " one"},
        {"role": "user", "content": "two three"},
    ]


def test_the_first_answer_of_a_dialog_can_be_interrupted_too() -> None:
    result = invoke("engine", "-i", "-p", "one interrupt", stdin="two\n")
    assert (result.exit_code, result.stdout) == (0, " one\n two\n")
    assert the_llm().asked[-1][0] == [{"role": "user", "content": "two"}]


def test_stats_go_to_stderr() -> None:
    result = invoke("engine", "-p", "one two", "--stats")
    assert result.stdout == " one two\n"
    assert result.stderr.startswith("1 prompt tokens, 3 output tokens, first token after ")
    result = invoke("engine", "-p", "one two", "--stats", "--raw")
    assert result.stderr.startswith("2 prompt tokens, 3 output tokens, first token after ")


def test_stats_line() -> None:
    assert str(run.Stats(12, 41, 0.25, 2.25)) == (
        "12 prompt tokens, 41 output tokens, first token after 250.0 ms, then 20.0 tokens/s"
    )
    assert str(run.Stats(12, 1, 0.25, 0.25)).endswith("first token after 250.0 ms")


def test_errors() -> None:
    result = invoke("engine", "-p", "fine explode")
    assert (result.exit_code, result.stderr) == (1, "error: pages are exhausted\n")
    assert result.stdout == " fine"
    the_llm()
    FakeLLM.opened.clear()

    result = invoke("engine", "-p", "x", "--top-p", "2")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: --top-p is 2.0, it must be a number above 0 and at most 1 (1 is off)\n"
    )
    assert invoke("engine", "-p", "x", "--top-p", "much").exit_code == 2
    assert invoke("engine", "-p", "x", "--nonsense").exit_code == 2
    assert isinstance(invoke("e", "-p", "explode", "--debug").exception, CapacityError)


def test_terminal_without_prompt_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "argv", ["ink-run", "engine"])
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 2
    assert FakeLLM.opened == []


def test_interrupt_gives_exit_code_130() -> None:
    assert invoke("engine", "-p", "a interrupt").exit_code == 130
    the_llm()


def test_signal_gives_exit_code_130(tmp_path: Path) -> None:
    """The real entry point, waiting for stdin when Ctrl-C comes."""
    started = tmp_path / "started"
    code = (
        "import pathlib, signal, sys\n"
        # A shell's background job, in which tests may run, starts with this signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Waiting:\n"
        "    def isatty(self): return False\n"
        "    def read(self):\n"
        f"        pathlib.Path({str(started)!r}).touch()\n"
        "        import time; time.sleep(60)\n"
        "sys.argv = ['ink-run', 'engine']; sys.stdin = Waiting()\n"
        "from inkrt.commands.run import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['ink-run', '--help']\n"
        "from inkrt.commands.run import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich.console', 'safetensors', 'tokenizers', 'jinja2'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_who_drafts_reaches_the_llm_and_stats_say_what_it_did() -> None:
    options = ["--spec", "ngram", "--draft-tokens", "3", "--stats"]
    result = invoke("engine", "-i", *options, stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert the_llm().speculative == SpeculativeConfig("ngram", 3)
    # The same for both answers: counts are those of one.
    line = (
        "\n2 rounds of 2.00 tokens and 1 plain steps; 2 of 5 verified drafts accepted, 8 proposed; "
        "by place 50% 50% 0% of the rounds, 50% 100% 0% of those that came to it\n"
    )
    assert result.stderr.count(line) == 2
    FakeLLM.opened.clear()
    assert invoke("engine", "-p", "x", "--stats").stderr.endswith("tokens/s\n")
    assert the_llm().speculative == SpeculativeConfig("auto")
    FakeLLM.opened.clear()
    options = "--spec dspark --accept probabilistic --width confidence --confidence-threshold 0.25"
    assert invoke("engine", "-p", "x", *options.split()).exit_code == 0
    expected = SpeculativeConfig("dspark", None, "probabilistic", "confidence", 0.25)
    assert the_llm().speculative == expected


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--spec", "eagle", "--spec is 'eagle', it must be one of auto, none, ngram, dspark"),
        ("--accept", "all", "--accept is 'all', it must be one of coupled, probabilistic"),
        ("--width", "wide", "--width is 'wide', it must be one of auto, fixed, confidence, cost"),
        (
            "--width=confidence --confidence-threshold",
            "1.5",
            "--confidence-threshold is 1.5, it must be a number from",
        ),
        ("--draft-tokens", "0", "--draft-tokens is 0, it must be an integer of at least 1"),
    ],
)
def test_values_out_of_range_are_refused(option: str, value: str, message: str) -> None:
    result = invoke("engine", "-p", "x", *option.split(), value)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {message}")
    assert FakeLLM.opened == []


HOW = ("--draft-tokens=3", "--accept=coupled", "--width=auto", "--width=confidence")


@pytest.mark.parametrize("how", HOW)
def test_how_to_draft_is_refused_with_spec_none(how: str) -> None:
    name, _ = how.split("=")
    result = invoke("engine", "-p", "x", "--spec", "none", how)
    message = f"error: {name}: of no use with --spec none; leave one of them out\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)
    assert FakeLLM.opened == []


@pytest.mark.parametrize("width", [[], ["--width", "fixed"], ["--width=cost"]])
def test_a_threshold_without_width_confidence_is_refused(width: list[str]) -> None:
    result = invoke("engine", "-p", "x", *width, "--confidence-threshold", "0.4")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --confidence-threshold: only --width confidence has a use for it; add that or "
        "leave it out\n",
    )


@pytest.mark.parametrize(
    ("error", "typed"),
    [
        (RequestError("width cost needs times", param="width"), "--width cost needs times"),
        (RequestError("bad_words[0] is ''", param="bad_words"), "--bad-word[0] is ''"),
        (RequestError("the prompt is long", param="prompt"), "the prompt is long"),
        (RequestError("none; choose method=ngram", param="x"), "none; choose --spec=ngram"),
        (CapacityError("num_draft_tokens=2, width=cost"), "--draft-tokens=2, --width=cost"),
        (
            CapacityError("no x=1 in a/width=8/b, .width=8 and run --width=8 then"),
            "no x=1 in a/width=8/b, .width=8 and run --width=8 then",
        ),
    ],
)
def test_errors_call_parameters_as_they_are_typed(
    monkeypatch: pytest.MonkeyPatch, error: InkError, typed: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(FakeLLM, "stream", fail)
    result = invoke("engine", "-p", "x", "--raw")
    assert (result.exit_code, result.stderr) == (1, f"error: {typed}\n")


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "is_terminal", "is_colored"),
    [
        ({}, True, True),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_accepted_drafts_are_marked_on_terminals(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    is_terminal: bool,
    is_colored: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)

    def words(self: FakeLLM, text: str) -> Generator[Delta]:
        yield Delta("plain ", (1,))
        yield Delta("drafted, more", (2, 3), num_accepted=1, num_accepted_chars=8)
        yield Delta("", (4, 5), "stop", num_accepted=1)

    monkeypatch.setattr(FakeLLM, "_words", words)
    llm = FakeLLM(Path("engine"), speculative=SpeculativeConfig())
    dialog = run.Dialog(
        llm, SamplingParams(), is_chat=True, show_stats=False,  # type: ignore[arg-type]
        marks_drafts=console.can_color(sys.stdout),
    )  # fmt: skip
    dialog.say("x")
    drafted = "\x1b[32mdrafted,\x1b[0m" if is_colored else "drafted,"
    assert out.getvalue() == f"plain {drafted} more\n"
    dialog.say("y")
    # The marks are no part of the conversation.
    assert llm.asked[-1][0][1] == {"role": "assistant", "content": "plain drafted, more"}


def test_a_dialog_on_no_terminal_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(self: FakeLLM, text: str) -> Generator[Delta]:
        self.streams_closed += 1
        yield Delta("drafted", (2,), "stop", num_accepted=1, num_accepted_chars=7)

    monkeypatch.setattr(FakeLLM, "_words", words)
    assert invoke("engine", "-i", stdin="one\n").stdout == "drafted\n"
