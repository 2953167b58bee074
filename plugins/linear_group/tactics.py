"""How `linear_group` runs on a GPU: one stream of all matrices' tiles, or tiled products."""

from inkrt.plugins.tactic import (
    CallArgs,
    Output,
    Pointer,
    Tactic,
    number_list_arg,
    tensor_list_arg,
)
from inkrt.plugins.w4a16.parts import is_supported
from inkrt.plugins.w4a16.ring_tactics import Group, linear_group


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations."""
    xs, weights = tensor_list_arg(args, "xs"), tensor_list_arg(args, "weights")
    if not is_supported(target, xs[0]):
        return []
    num_tokens, width = xs[0].shape
    count = range(len(weights))
    group = Group(
        width=width,
        rows=tuple(weight.shape[0] for weight in weights),
        inputs=tuple(Pointer("xs", i) for i in range(len(xs))),
        input_of=tuple(int(index) for index in number_list_arg(args, "input_of")),
        weights=tuple(Pointer("weights", i) for i in count),
        outputs=tuple(Output(i) for i in count),
    )
    return linear_group(num_tokens, group, weight="weights")
