"""Messages of all errors: one printable line, whatever a file's names are."""

import pytest

from inkrt.errors import ConfigError, InkError, RequestError


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\ud800", r"\ud800"),  # half of a pair, which JSON may name and no terminal takes
        ("\x1b[31m", r"\x1b[31m"),
        ("\u2028", r"\u2028"),
        ("größe 尺寸", "größe 尺寸"),
    ],
)
def test_a_name_of_a_file_stays_on_its_line(name: str, shown: str) -> None:
    for error in (ConfigError(f"{name} is unknown"), RequestError(f"{name} is unknown", param="x")):
        assert isinstance(error, InkError)
        assert str(error) == f"{shown} is unknown"
        str(error).encode()
