"""How `sink_attention` runs on a GPU."""

from inkrt.plugins.attention_sm90.tactics import sink_attention_tactics
from inkrt.plugins.tactic import CallArgs, Tactic


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """See `sink_attention_tactics`."""
    return sink_attention_tactics(target, args)
