"""How `relative_attention` runs on a GPU."""

from inkrt.plugins.attention_sm90.relative import relative_attention_tactics
from inkrt.plugins.tactic import CallArgs, Tactic


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """See `relative_attention_tactics`."""
    return relative_attention_tactics(target, args)
