"""Progress in bytes: a bar on a terminal, nothing elsewhere."""

import io
import sys

import pytest

from inkrt.commands.console import byte_meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_shown", [True, False])
def test_only_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch, is_shown: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with byte_meter("packing weights", is_shown=is_shown) as meter:
            for done in (4 * 10**9, 5 * 10**9, 8 * 10**9):
                meter(done, 8 * 10**9)
        text = stream.getvalue()
        if is_shown and stream.isatty():
            assert "packing weights" in text
            assert "4.0/8.0 GB" in text
            assert "8.0/8.0 GB" in text
        else:
            assert text == ""


def test_an_error_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)

    def fail() -> None:
        with byte_meter("packing", is_shown=True) as meter:
            meter(1, 2)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert sys.stderr is stream
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is back
