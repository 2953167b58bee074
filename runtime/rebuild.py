"""The command line that rebuilds an engine with one option changed, for error messages."""

import re


def rebuild_with(command: str, option: str, value: str | int) -> str:
    """`command` with `option` set to `value`: replaced where it stands, else appended.

    Args:
        command: `EngineConfig.rebuild_command`.
        option: long option, e.g. "--max-seq-len".
        value: a number or a word without spaces.
    """
    changed, count = re.subn(rf"{re.escape(option)}(?:=|\s+)\S+", f"{option} {value}", command)
    return changed if count else f"{command} {option} {value}"
