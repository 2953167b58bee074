"""How `draft_head` runs on a GPU: two kernels a row behind one for all rows, or three of ranks.

Row k needs the token of row k - 1, which stays on the device: `next_row` takes it from the
candidates of the blocks of `head_logits`, or, where filters are on, from all logits, and makes what
the second table multiplies; `head_logits` streams the table. Of several ranks each streams its own
rows of the table; `share_row` exchanges candidates behind it, and logits where they are needed.
"""

from pathlib import Path

import torch

from inkrt.plugins.all_reduce.launches import ERROR, MAX_RANKS, QUAD_BYTES, grid_of
from inkrt.plugins.draft_head.op import is_base_shared
from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    Float32,
    Int32,
    KernelLaunch,
    Output,
    Param,
    Peers,
    Pointer,
    Scratch,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.w4a16.sample_tactics import draw_parts
from inkrt.plugins.w4a16.shapes import sample_bytes, sample_exchange_bytes

_FOLDER = Path(__file__).parent
_MULTIPROCESSORS = 132
_MOST_ROWS, _MOST_RANK, _MOST_VOCAB = 16, 256, 2**18 - 1
_HEADS = {"vanilla": 0, "gated": 1, "rnn": 2}
_PLACES = {"none": 0, "before_bias": 1, "after_bias": 2}
_MOST_SUMS = 48  # of a thread of `hidden_part`
_MOST_CHUNKS = 2
# One block of each fits a multiprocessor: 384 threads of 128 registers and 256 of 64.
_LOGITS_WARPS, _NEXT_THREADS = 12, 256
_FILL_BLOCKS = 16
_REQUEST = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "is_coupled")


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for up to 16 bfloat16 rows and ranks of 64, 128, 192 and 256.

    Of 2 to 8 GPUs each has whole fours of tokens.
    """
    hidden, first, second = (tensor_arg(args, x) for x in ("hidden", "markov_w1", "markov_w2"))
    base = tensor_arg(args, "base_logits")
    (num_rows, width), (drafted, rank) = hidden.shape, second.shape
    vocab, head = int(number_arg(args, "vocab_size")), _HEADS[str(args["head"])]
    num_ranks = int(number_arg(args, "tp_size"))
    chunks = -(-width // (8 * 512))
    fits = (
        target in GPU_TARGETS
        and hidden.dtype == first.dtype == torch.bfloat16
        and num_rows <= _MOST_ROWS
        and width % 8 == 0
        and chunks <= _MOST_CHUNKS
        and rank % 64 == 0
        and rank <= _MOST_RANK
        and vocab <= _MOST_VOCAB
        and (num_ranks == 1 or (num_ranks <= MAX_RANKS and drafted % 4 == 0))
        and all(x.strides is None for x in (hidden, first, second))
        and (base.strides is None or base.strides[1] == 1)
    )
    if not fits:
        return []
    is_trimmed, confidence = args["d2t"] is not None, args["confidence_proj"]
    read = tensor_arg(args, "confidence_proj").shape[1] if confidence is not None else 0
    mixed = (0, rank, 3 * rank)[head]
    common = (
        ("GROUP", num_rows),
        ("WIDTH", width),
        ("RANK", rank),
        ("VOCAB", vocab),
        ("HEAD", head),
        ("CONFIDENCE", 0 if confidence is None else 1 if read == width else 2),
    )
    known: dict[str, Param] = {
        "mixed": Scratch("mixed", max(num_rows * mixed * 4, 16)),
        "confidence": Scratch("confidence", num_rows * 4),
        "states": Scratch("states", num_rows * rank * 4),
        "z": Scratch("z", rank * 4),
        "tokens": Output(0),
        "logits": Output(1),
        "confidences": Output(2 if confidence is not None else 0),
        "softcap": Float32(number_arg(args, "softcap")),
        "divisor": Float32(number_arg(args, "logits_divisor")),
    }

    def params(names: str, *more: Param) -> tuple[Param, ...]:
        # Of what is not there any address does: it is not read.
        there = [name if known.get(name) or args[name] else "markov_w1" for name in names.split()]
        return (*(known.get(name, Pointer(name)) for name in there), *more)

    def launch(
        entry: str,
        source: str,
        defines: tuple[tuple[str, int], ...],
        blocks: int,
        threads: int,
        given: tuple[Param, ...],
        smem: int = 0,
    ) -> KernelLaunch:
        return KernelLaunch(
            source=_FOLDER / f"{source}.cu",
            entry=entry,
            defines=(*common, *defines),
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            params=given,
            smem_bytes=smem,
        )

    kernels = []
    block_rows = max(1, min(-(-mixed // 128), _MOST_SUMS // num_rows))
    threads = -(-width // (8 * chunks * 32)) * 32
    threads = max(threads, -(-num_rows * block_rows // 32) * 32)
    fill_blocks = _FILL_BLOCKS if is_trimmed else 0
    hidden_blocks = -(-mixed // block_rows) + (confidence is not None) + fill_blocks
    if hidden_blocks:
        kernels.append(
            launch(
                "hidden_part",
                "hidden",
                (
                    ("CONFIDENCE_BIAS", int(args["confidence_bias"] is not None)),
                    ("BLOCK_ROWS", block_rows),
                    ("CHUNKS", chunks),
                    ("THREADS", threads),
                    ("FILL_BLOCKS", max(fill_blocks, 1)),
                ),
                hidden_blocks,
                threads,
                params(
                    "hidden mix_proj mix_bias confidence_proj confidence_bias mixed confidence "
                    "logits"
                ),
                threads // 32 * num_rows * block_rows * 4,
            )
        )
    blocks = min(-(-drafted // 32), _MULTIPROCESSORS)
    known |= {
        "best": Scratch("best", blocks * 4),
        "best_row": Scratch("best_row", blocks * 4),
        "drawn": Scratch("drawn", blocks * 8),
        "exchange": Scratch("exchange", sample_exchange_bytes(1), fill=0),
        "published": Scratch("published", num_rows * 8, fill=0),
        "error": ERROR,
        # Read by several ranks only.
        "peers": Pointer("markov_w2"),
    }
    # What `next_row` chooses from, and where `head_logits` puts its logits.
    candidates, num_candidates, logits_to = ("best", "best_row", "drawn"), blocks, "logits"
    if num_ranks > 1:
        known |= {
            "own": Scratch("own", drafted * 4),
            "best_of_ranks": Scratch("best_of_ranks", num_ranks * 4),
            "row_of_ranks": Scratch("row_of_ranks", num_ranks * 4),
            "drawn_of_ranks": Scratch("drawn_of_ranks", num_ranks * 8),
            "peers": Peers(QUAD_BYTES + drafted * 4),
        }
        candidates = ("best_of_ranks", "row_of_ranks", "drawn_of_ranks")
        num_candidates, logits_to = num_ranks, "own"
    of_ranks = (
        ("RANKS", num_ranks),
        ("DRAFTED", drafted),
        ("TOTAL", int(number_arg(args, "draft_vocab_size"))),
        ("TRIMMED", int(is_trimmed)),
    )
    base_is_drafted = is_base_shared(args["d2t"], bool(args["base_is_drafted"]))
    logits_defines = (
        *of_ranks,
        ("BASE_DRAFTED", int(base_is_drafted)),
        ("BASE_STRIDE", base.strides[0] if base.strides else base.shape[1]),
        ("BASE_FLOAT32", int(base.dtype == torch.float32)),
        ("SOFTCAP", _PLACES[str(args["softcap_place"])]),
        ("BLOCKS", blocks),
        ("LOGITS_WARPS", _LOGITS_WARPS),
    )
    parts = draw_parts(vocab, 1, _NEXT_THREADS)
    task_blocks = -(-(rank + (confidence is not None)) // (_NEXT_THREADS // 32))
    request = " ".join(_REQUEST)
    for row in range(num_rows + 1):
        draws, makes = parts if row else 0, task_blocks if row < num_rows else 0
        kernels.append(
            launch(
                "next_row",
                "next",
                (("PARTS", parts), ("THREADS", _NEXT_THREADS)),
                max(draws, makes),
                _NEXT_THREADS,
                params(
                    f"anchor {' '.join(candidates)} logits {request} markov_w1 mix_proj "
                    "confidence_proj mixed confidence tokens states z confidences published "
                    "exchange error",
                    Int32(num_candidates),
                    Int32(row),
                ),
                sample_bytes(vocab, parts, _NEXT_THREADS) + 8,
            )
        )
        if row < num_rows:
            kernels.append(
                launch(
                    "head_logits",
                    "logits",
                    logits_defines,
                    blocks,
                    32 * _LOGITS_WARPS,
                    params(
                        f"base_logits markov_w2 z d2t {request} {logits_to} best best_row drawn "
                        "peers softcap divisor",
                        Int32(row),
                    ),
                    16 * _LOGITS_WARPS,
                )
            )
        if row < num_rows and num_ranks > 1:
            grid = grid_of(drafted // 4)
            kernels.append(
                launch(
                    "share_row",
                    "share",
                    (*of_ranks, ("THREADS", grid.threads)),
                    grid.blocks,
                    grid.threads,
                    params(
                        f"best best_row drawn own d2t {request} wants_logits logits "
                        f"{' '.join(candidates)} peers error",
                        Int32(blocks),
                        Int32(row),
                    ),
                )
            )
    # The second table once a row: only what is left of it in the L2 need not cross memory again.
    table_bytes = num_rows * drafted * rank * 2
    other = mixed * (2 * rank + width) * 2 + num_rows * (base.shape[1] * base.dtype.itemsize)
    # Several ranks write logits of all tokens only where somebody needs them.
    num_bytes = table_bytes + other + num_rows * (vocab if num_ranks == 1 else drafted) * 4
    flops = 2 * num_rows * (drafted * rank + mixed * (2 * rank + width))
    name = "two_kernels_a_row" if num_ranks == 1 else "three_kernels_a_row"
    return [Tactic(name, tuple(kernels), num_bytes, flops)]
