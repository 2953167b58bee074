"""lm_head_sample: logits over a vocabulary sharded by ranks, and a token drawn from each row.

    shard_r = linear(x, weight_r)               [R, Vs] in logits_dtype, sent to all ranks
    logits  = softcap([shard_0 | shard_1 | ...][:, :vocab_size], cap)      float32 [R, vocab_size]
    tokens  = sample(logits, ...)

It has the bits of `linear` or `linear_nvfp4`, `all_gather`, `softcap` and `sample` one after the
other; a cap of 0 leaves the softcap out. Rows of the weights at and above vocab_size are padding
and are never drawn. The weight may be NVFP4 (`plugins.nvfp4`). Source: inkling2.md section 5.7,
whose logits are rounded to the model dtype; flint.md section 5, whose are not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, integers, weight_arguments
from inkrt.plugins.linear_nvfp4.op import project
from inkrt.plugins.nvfp4 import fit_weight
from inkrt.plugins.registry import Arguments, Case, Collective, operator
from inkrt.plugins.sample.op import fit_sampling, sample, sampling_arguments
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.softcap.op import softcap


def _payload(
    *,
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    logits_dtype: torch.dtype,
    **_other: object,
) -> Tensor:
    return project(x, weight, scales, global_scale, logits_dtype is torch.float32)


def _combine(
    payloads: Sequence[Tensor],
    *,
    vocab_size: int,
    cap: float,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    last_row: bool,
    tp_size: int,
    **_other: object,
) -> tuple[Tensor, Tensor]:
    assert len(payloads) == tp_size, f"{len(payloads)} payloads for {tp_size} ranks"
    shards = torch.cat(list(payloads), dim=-1)[:, :vocab_size]
    logits = softcap(shards, cap) if cap > 0 else shards.to(torch.float32, copy=True)
    tokens = sample(logits, temperature, top_k, top_p, min_p, seed, position, num_tokens, last_row)
    return tokens, logits


def fake(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    vocab_size: int,
    cap: float,
    logits_dtype: torch.dtype,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    last_row: bool,
    tp_size: int,
) -> tuple[Tensor, Tensor]:
    """Tokens int32 [R] and logits float32 [R, vocab_size]."""
    axes = Axes("lm_head_sample")
    axes.fit("x", x, "R", "D", dtype=MODEL_DTYPES)
    fit_weight(axes, "weight", weight, scales, global_scale, "Vs", "D", dtype=x.dtype)
    fit_sampling(axes, temperature, top_k, top_p, min_p, seed, position, num_tokens)
    axes.require(tp_size >= 1, f"tp_size is {tp_size}, expected >= 1")
    rows = tp_size * axes["Vs"]
    axes.require(1 <= vocab_size <= rows, f"vocab_size is {vocab_size}, expected 1 to {rows}")
    axes.require(cap >= 0, f"cap is {cap}, expected >= 0, 0 being no softcap")
    axes.require(
        logits_dtype in (x.dtype, torch.float32),
        f"logits_dtype is {logits_dtype}, expected x's {x.dtype} or float32",
    )
    if last_row:
        axes.require(axes["R"] == 1, f"x has {axes['R']} rows, expected 1 with last_row")
    tokens = x.new_empty(axes["R"], dtype=torch.int32)
    return tokens, x.new_empty((axes["R"], vocab_size), dtype=torch.float32)


def cases() -> list[Case]:
    """Greedy and filtered draws, with and without padding rows of the weight.

    Inputs are small whole numbers, whose products and sums are exact in bfloat16: the tokens of the
    oracle can then be compared exactly.
    """

    def make(
        name: str, sampling: Arguments, num_rows: int, vocab_size: int, num_padding: int,
        *, last_row: bool = False, cap: float = 30.0, in_float32: bool = False,
        quantized: bool = False, width: int = 13,
    ) -> Case:  # fmt: skip

        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {
                "x": (integers(generator, 3, num_rows, width) - 1).to(dtype),
                **head(dtype, generator),
                "vocab_size": vocab_size,
                "cap": cap,
                "logits_dtype": torch.float32 if in_float32 else dtype,
                **sampling,
                "position": int32(17),
                "num_tokens": int32(4 if last_row else num_rows),
                "last_row": last_row,
                "tp_size": 1,
            }

        def head(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            shape = (vocab_size + num_padding, width)
            if quantized:
                weight = weight_arguments(
                    "weight", generator, dtype, *shape, scale=1.0, quantized=True
                )
                # Small multiples of 1/4 once more: block scales of 1/2 and 1.
                weight["scales"] = weight["scales"] % 2 * 8 + 0x30
                weight["global_scale"] = torch.ones(1)
                return weight
            values = integers(generator, 7, *shape) - 3
            values[vocab_size:] = 50  # would win every draw
            return {"weight": values.to(dtype), "scales": None, "global_scale": None}

        # Only the float32 softcap rounds.
        return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 1e-6})

    parameters = sampling_arguments
    return [
        make("greedy_padded", parameters(temperature=0.0), 3, 61, 3),
        make("sampled", parameters(temperature=4.0, seed=11), 11, 37, 0),
        make(
            "filtered_last_row",
            parameters(temperature=2.0, top_k=20, top_p=0.95, min_p=0.001, seed=12),
            1,
            101,
            27,
            last_row=True,
        ),
        make("uncapped_float32", parameters(temperature=1.0, seed=3), 2, 45, 2, cap=0.0,
             in_float32=True),
        make("nvfp4_greedy", parameters(temperature=0.0), 5, 59, 0, cap=0.0, in_float32=True,
             quantized=True, width=16),
        make("nvfp4_sampled", parameters(temperature=3.0, seed=4), 10, 83, 0, cap=0.0,
             in_float32=True, quantized=True, width=16),
        # Of a GPU's layouts: vocabularies that fill no tile, padded widths, several tiles a block.
        make("capped_greedy", parameters(temperature=0.0), 8, 4111, 0, width=64),
        make("capped_sampled", parameters(temperature=2.0, top_k=50, seed=6), 3, 1037, 11,
             width=72),
        make("capped_last_row", parameters(temperature=0.0), 1, 333, 3, last_row=True, width=256),
    ]  # fmt: skip


@operator(
    "lm_head_sample",
    fake=fake,
    cases=cases,
    collective=Collective(payload=_payload, combine=_combine),
    version=2,
)
def lm_head_sample(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    vocab_size: int,
    cap: float,
    logits_dtype: torch.dtype,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    last_row: bool,
    tp_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute the logits of the rows and draw the token after each.

    Args:
        x: [R, D] float32 or bfloat16, normalized hidden states.
        weight: x's dtype [Vs, D], this rank's rows of the head; or NVFP4.
        scales: see `plugins.nvfp4`.
        global_scale: float32 [1] or None.
        vocab_size: tokens that may be drawn, at most tp_size * Vs.
        cap: softcap of the logits; 0 for none.
        logits_dtype: what the product is rounded to, x's dtype or float32 (not at all).
        temperature: as the following six, see `sample`.
        top_k: int32 [1].
        top_p: float32 [1].
        min_p: float32 [1].
        seed: int64 [1].
        position: int32 [1].
        num_tokens: int32 [1].
        last_row: see `sample`.
        tp_size: number of ranks.

    Returns:
        Tokens int32 [R] and logits float32 [R, vocab_size], equal on all ranks.
    """
    return _combine(
        [project(x, weight, scales, global_scale, logits_dtype is torch.float32)],
        vocab_size=vocab_size, cap=cap, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed, position=position, num_tokens=num_tokens, last_row=last_row,
        tp_size=tp_size,
    )  # fmt: skip
