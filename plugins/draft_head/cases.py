"""Test inputs of `draft_head`."""

from typing import Any

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.registry import Arguments, Case
from inkrt.plugins.sample.op import sampling_arguments


def _case(
    name: str,
    head: str,
    *,
    num_rows: int = 7,
    num_drafted: int | None = None,
    base_is_drafted: bool = False,
    is_coupled: bool = False,
    confidence: str = "hidden, markov, bias",
    softcap_place: str = "none",
    logits_divisor: float = 1.0,
    levels: int = 0,
    num_padding: int = 0,
    position: int = 1000,
    sizes: tuple[int, int, int] = (33, 14, 131),
    **sampling: Any,
) -> Case:
    hidden_size, rank, vocab_size = sizes

    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            return normal(generator, dtype, rows, columns, scale=gain * columns**-0.5)

        drafted = num_drafted or vocab_size
        ids = torch.randperm(vocab_size, generator=generator)[:drafted].sort().values
        columns = drafted if base_is_drafted else vocab_size
        base = normal(generator, dtype, num_rows, columns + num_padding, scale=2.0)[:, :columns]
        second = weight(drafted, rank, 3.0)
        if levels:  # few distinct values and no bias: ties everywhere
            base, second = (base * levels / 6).round(), second * 0
        mixes = {"gated": (rank, hidden_size + rank), "rnn": (3 * rank, 2 * rank + hidden_size)}
        size = mixes.get(head)
        read = hidden_size + (rank if "markov" in confidence else 0)
        has_bias = "bias" in confidence
        return {
            "base_logits": base,
            "hidden": normal(generator, dtype, num_rows, hidden_size),
            "anchor": int32(17),
            "markov_w1": normal(generator, dtype, vocab_size + 5, rank),
            "markov_w2": second,
            "mix_proj": weight(*size, 2.0) if size else None,
            "mix_bias": normal(generator, torch.float32, size[0]) if size else None,
            "confidence_proj": weight(1, read, 2.0).float() if confidence else None,
            "confidence_bias": normal(generator, torch.float32, 1) if has_bias else None,
            "d2t": (ids - torch.arange(drafted)).int() if num_drafted else None,
            "is_coupled": int32(int(is_coupled)),
            "wants_logits": int32(1),
            **sampling_arguments(**sampling),
            "position": int32(position),
            "head": head,
            "vocab_size": vocab_size,
            "draft_vocab_size": drafted,
            "base_is_drafted": base_is_drafted,
            "softcap": 4.0,
            "softcap_place": softcap_place,
            "logits_divisor": logits_divisor,
            "tp_size": 1,
        }

    # All is float32 whatever the inputs, so bfloat16 has no looser bound.
    return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 1e-6})


def cases() -> list[Case]:
    """Heads, draws with both noises and all filters, softcaps, trimmed tokens, confidences.

    Those with `sizes` (of hidden rows, rank and vocabulary) are what kernels take.
    """
    filters: dict[str, Any] = {
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "seed": 2**63 - 1,
    }
    wide = (264, 64, 1003)
    return [
        _case("vanilla, greedy", "vanilla", temperature=0.0),
        _case("gated, greedy", "gated", temperature=0.0),
        _case("rnn, greedy", "rnn", temperature=0.0),
        _case("ties take the lowest id", "vanilla", temperature=0.0, levels=2),
        _case("rnn, own noise", "rnn", seed=2**62 + 12345, position=1_048_570),
        _case("rnn, coupled", "rnn", seed=2**62 + 12345, is_coupled=True, position=0),
        _case("gated, all filters", "gated", **filters),
        _case("rnn, all filters, coupled", "rnn", is_coupled=True, **filters),
        _case("softcap before the bias", "vanilla", softcap_place="before_bias", seed=3),
        _case("softcap behind the bias", "rnn", softcap_place="after_bias", seed=4),
        _case("divided", "gated", softcap_place="before_bias", logits_divisor=24.0, seed=5),
        _case("trimmed", "rnn", num_drafted=40, seed=6, is_coupled=True),
        _case("trimmed, own base", "vanilla", num_drafted=40, base_is_drafted=True, top_k=60),
        _case("no confidence", "vanilla", confidence="", temperature=0.7),
        _case("confidence of the row alone", "gated", confidence="hidden", top_p=0.5),
        _case("confidence without bias", "rnn", confidence="hidden, markov", num_rows=16),
        _case("one row", "rnn", num_rows=1, temperature=0.0, confidence="hidden, bias"),
        _case("wide, rnn, greedy", "rnn", sizes=wide, temperature=0.0, softcap_place="before_bias"),
        _case("wide, rnn, coupled", "rnn", sizes=wide, seed=2**62 + 12345, is_coupled=True),
        _case("wide, rnn, own noise", "rnn", sizes=wide, seed=2**62 + 12345, temperature=2.5),
        _case("wide, rnn, all filters", "rnn", sizes=wide, **filters),
        _case("wide, gated, all filters, coupled", "gated", sizes=wide, is_coupled=True, **filters),
        _case("wide, gated, divided", "gated", sizes=(520, 256, 65), seed=5, num_rows=8,
              softcap_place="after_bias", logits_divisor=24.0),
        _case("wide, vanilla, ties", "vanilla", sizes=(40, 128, 300), temperature=0.0, levels=2,
              confidence=""),
        _case("wide, vanilla, top-p", "vanilla", sizes=(40, 128, 300), top_p=0.7, num_rows=3),
        _case("wide, trimmed", "rnn", sizes=(4104, 64, 300), num_drafted=77, seed=6,
              is_coupled=True, confidence="hidden", num_rows=4),
        _case("wide, trimmed, own base, top-k", "vanilla", sizes=(64, 192, 300), num_drafted=77,
              base_is_drafted=True, top_k=60, num_rows=5, confidence="hidden, markov"),
        _case("wide, 16 rows", "gated", sizes=(64, 64, 131), num_rows=16, position=0, min_p=0.1),
        _case("wide, columns of padding", "vanilla", sizes=(64, 64, 97), num_padding=6, seed=8,
              num_rows=2),
        _case("wide, one row", "rnn", sizes=(64, 64, 33), num_rows=1, temperature=0.0),
    ]  # fmt: skip
