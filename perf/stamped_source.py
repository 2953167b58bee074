"""Kernels for `stamps.py`: their sources with stamps, and code of them."""

import re
from pathlib import Path

from inkrt.builder.compile import PLUGIN_FOLDER

Defines = tuple[tuple[str, int | float | str], ...]

_KERNEL = re.compile(r'extern "C" __global__[^;{]*?\b((?!__)\w+)\s*\(')
_SOURCE = re.compile(r'^#include "(.*\.cu)"$', re.MULTILINE)


def _behind_parameters(text: str, at: int) -> int:
    """Where the parenthesis ends that was opened in front of `at`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def whole_source(path: Path) -> tuple[str, list[Path]]:
    """A source with those in place that it includes, whose kernels would stamp too; their folders.

    Headers stay outside.
    """
    parts: list[str] = []
    folders = [path.parent]
    for place, part in enumerate(_SOURCE.split(path.read_text(encoding="utf-8"))):
        if place % 2:  # what is between the parentheses of _SOURCE
            text, more = whole_source(path.parent / part)
            parts.append(text)
            folders += more
        else:
            parts.append(part)
    return "".join(parts), folders


def stamped_source(text: str, entry: str) -> str:
    """A source of one kernel, with one more parameter, behind stamps.cuh.

    Raises:
        ValueError: there is no such kernel in it.
    """
    result, done = [], 0
    is_there = False
    for found in _KERNEL.finditer(text):
        params = _behind_parameters(text, found.end())
        body = text.index("{", params) + 1
        end = text.index("\n}", body) + 2  # braces may be of one branch of the preprocessor
        result.append(text[done : found.start()])
        if found[1] == entry:  # others are left out, as their parameters have other names
            is_there = True
            result.append(text[found.start() : params - 1] + ", unsigned long long* ink_stamps")
            result.append(text[params - 1 : body] + " InkBlock ink_block;" + text[body:end])
        done = end
    if not is_there:
        raise ValueError(f"no kernel {entry}")
    return f'#include "stamps.cuh"\n#line 1\n{"".join(result)}{text[done:]}'


def compile_stamped(source: Path, entry: str, defines: Defines, num_params: int) -> bytes:
    """Code of a kernel with stamps, whose last parameter is their address."""
    from cuda.core import Program, ProgramOptions

    text, folders = whole_source(source)
    macros = [(name, str(value)) for name, value in defines]
    options = ProgramOptions(
        arch="sm_90a",
        std="c++17",
        define_macro=[*macros, ("INK_STAMPS_PARAM", f'"{entry}_param_{num_params}"')],
        include_path=[str(folder) for folder in (*folders, PLUGIN_FOLDER, Path(__file__).parent)],
    )
    return bytes(Program(stamped_source(text, entry), "c++", options).compile("cubin").code)
