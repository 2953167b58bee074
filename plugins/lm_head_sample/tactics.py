"""How `lm_head_sample` runs on a GPU: a w4a16 head, and a choice from its logits."""

import torch

from inkrt.plugins.lm_head_sample import ranks
from inkrt.plugins.tactic import CallArgs, Output, Pointer, Tactic, number_arg, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported, matrix_names
from inkrt.plugins.w4a16.ring_tactics import Group, lm_head_sample
from inkrt.plugins.w4a16.shapes import MAX_NORM_WIDTH, Dims
from inkrt.plugins.w4a16.tactics import head_depths, lm_head


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels of one rank, or of a rank among several.

    NVFP4 weights, and bf16 weights of narrow rows, take the head of Flint: logits are float32, the
    weight has no padding and there is no softcap. Other bf16 weights take the stream of tiles.
    """
    if args["tp_size"] != 1:
        return ranks.find_tactics(target, args, find_tactics)
    x, weight = tensor_arg(args, "x"), tensor_arg(args, "weight")
    num_tokens, hidden = x.shape
    vocab_size = int(number_arg(args, "vocab_size"))
    if not is_supported(target, x):
        return []
    is_bf16 = args["scales"] is None
    is_plain = (
        args["cap"] == 0 and args["logits_dtype"] == torch.float32 and weight.shape[0] == vocab_size
    )
    if is_bf16 and not (is_plain and hidden % 256 == 0 and hidden <= MAX_NORM_WIDTH):
        head = Group(
            hidden, (vocab_size,), (Pointer("x"),), (0,), (Pointer("weight"),), (Output(1),), True
        )
        return lm_head_sample(
            num_tokens,
            head,
            weight="weight",
            cap=number_arg(args, "cap"),
            is_rounded=args["logits_dtype"] != torch.float32,
            last_row=bool(args["last_row"]),
            names={"tokens": Output(0), "logits": Output(1)},
        )
    if not is_plain:
        return []
    names = {
        "delta": Pointer("x"),
        "norm_weight": Pointer("x"),
        **matrix_names("codes", "scales", "global_scale", "weight", is_bf16=is_bf16),
        "scales": Pointer("scales"),
        "global_scale": Pointer("x" if is_bf16 else "global_scale"),
        "tokens": Output(0),
        "out": Output(1),
    }
    dims = Dims(hidden=hidden, vocab=vocab_size, bf16=is_bf16)
    return [
        lm_head(
            dims,
            num_tokens,
            eps=1e-6,
            logits=True,
            greedy=True,
            sampled=True,
            last_row=bool(args["last_row"]),
            norm=False,
            has_delta=False,
            depth=depth,
            names=names,
        )
        for depth in head_depths(dims)
    ]
