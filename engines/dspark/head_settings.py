"""What makes a drafter's tokens of its rows, read from its configuration.

Source: dspark.md sections 2.6 to 2.8.
"""

from typing import cast

from inkrt.engines.dspark.config import Head, SoftcapPlace
from inkrt.engines.dspark.reading import SHAPES, Reading
from inkrt.engines.dspark.settings import Default
from inkrt.engines.dspark.weights import (
    CONFIDENCE,
    DRAFT_TO_TARGET,
    GATE,
    JOINT,
    SECOND_TABLE,
)

_HEADS = ("vanilla", "gated", "rnn")


def read_head(of: Reading) -> Head:
    """The kind of the sequential head.

    Raises:
        ConfigError: it is unknown, or the tensors are of another.
    """
    get, own = of.get, of.tensors.shapes
    stored = {
        kind: f"{name}.weight"
        for kind, name in (("gated", GATE), ("rnn", JOINT))
        if f"{name}.weight" in own
    }
    default = Default("vanilla", "there is neither a gate nor a joint projection")
    if stored:
        kind = next(iter(stored))
        default = Default(kind, f"there is {stored[kind]}")
    kind = get.choice("markov_head_type", allowed=_HEADS, default=default)
    for other, name in stored.items():
        if other != kind:
            raise get.error(
                f"markov_head_type is {kind!r}, but tensor {name} belongs to the head {other!r}"
            )
    return cast("Head", kind)


def read_draft_vocabulary(of: Reading) -> tuple[int, bool]:
    """Rows of the second table, and whether `d2t` names their tokens.

    Raises:
        ConfigError: there are more than tokens, or fewer and no `d2t`.
    """
    get, target, own = of.get, of.target, of.tensors.shapes
    table = own.get(SECOND_TABLE)
    default = Default(target.vocab_size)
    if table and table[0] != target.vocab_size:
        default = Default(table[0], SHAPES)
    size = get.integer("draft_vocab_size", default=default)
    if size > target.vocab_size:
        raise get.error(
            f"draft_vocab_size = {size} exceeds the target's vocab_size {target.vocab_size}"
        )
    if size == target.vocab_size or (
        size == target.unpadded_vocab_size and DRAFT_TO_TARGET not in own
    ):
        return size, False
    if of.has_tensors and DRAFT_TO_TARGET not in own:
        raise get.error(
            f"draft_vocab_size = {size} of {target.vocab_size} tokens, but there is no tensor "
            f"d2t that says which"
        )
    return size, True


def read_confidence(of: Reading) -> tuple[bool, bool]:
    """Whether there is a confidence head, and whether it reads the Markov table.

    Raises:
        ConfigError: a setting is neither true nor false.
    """
    get, shape = of.get, of.tensors.shapes.get(CONFIDENCE)
    asked = get.boolean(
        "enable_confidence_head",
        default=Default(
            shape is not None,
            f"there is {'a' if shape else 'no'} tensor {CONFIDENCE}"
            if of.has_tensors
            else "there are no tensors to tell",
        ),
    )
    if not asked:
        if shape is not None:
            get.decisions.append(f"{CONFIDENCE} is left out: enable_confidence_head is false")
        return False, False
    reads = (
        Default(shape[-1] != of.target.hidden_size, SHAPES)
        if shape
        else Default(True, "as in all layouts")
    )
    return True, get.boolean("confidence_head_with_markov", default=reads)


def read_softcap_place(of: Reading) -> SoftcapPlace:
    """Where the target's final soft-cap meets the base logits.

    Raises:
        ConfigError: the drafter was trained with another cap, or the target has none.
    """
    get, cap = of.get, of.target.softcap
    own = None if of.is_embedded else get.find("final_logit_softcapping")
    if own is not None and own.value != cap:
        raise get.error(f"{own.spelling} = {own.value!r}, the target's is {cap!r}")
    if cap is None:
        get.require("softcap_place", "none")
        return "none"
    if of.is_embedded:
        default = Default("before_bias", "as in Gemma4's drafters; no layout documents it")
    elif own is not None:
        default = Default("before_bias", f"{own.spelling} is the target's")
    else:
        default = Default("none", "the layout's reference caps nothing")
    allowed = ("none", "before_bias", "after_bias")
    return cast("SoftcapPlace", get.choice("softcap_place", allowed=allowed, default=default))
