"""router_top_k: chooses experts by their logits and weighs them by sigmoid scores.

    ids = the top_k largest logits, largest first; of equal ones the lowest id first
    s   = 1 / (1 + exp(-logits[ids]))                     float32
    w   = dtype( s / (sum s + 1e-20) )                    the sum in the order of ids

Logits are compared as they are stored, rounded to the model dtype, so ties are common in bfloat16.
Source: flint.md section 5. transformers chooses and weighs by float32 logits.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import elementwise
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Routing weights [T, K] in the logits' dtype and ids int32 [T, K]."""
    axes = Axes("router_top_k")
    axes.fit("logits", logits, "T", "E", dtype=MODEL_DTYPES)
    axes.require(1 <= top_k <= axes["E"], f"top_k is {top_k}, expected 1 to E={axes['E']}")
    shape = (axes["T"], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


def cases() -> list[Case]:
    """Odd sizes, the model's expert count, all experts, equal logits, scores that vanish."""

    def make(name: str, num_rows: int, num_experts: int, top_k: int, shift: float = 0.0) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            logits = normal(generator, torch.float32, num_rows, num_experts, scale=2.0) + shift
            return {"logits": logits.to(dtype), "top_k": top_k}

        return Case(name, arguments)

    def tied(_dtype: torch.dtype, _generator: torch.Generator) -> Arguments:
        # The border runs through five equal logits; zeros of both signs are equal too.
        row = torch.tensor([0.0, 1.0, -0.0, 2.0, 1.0, 1.0, 2.0, 1.0, 0.0, 1.0])
        return {"logits": torch.stack([row, -row]).to(_dtype), "top_k": 4}

    return [
        make("decode", 1, 37, 6),
        make("model", 8, 256, 6),
        make("prefill", 11, 16, 3),
        make("all experts", 2, 6, 6),
        make("one expert", 3, 5, 1),
        make("vanishing scores", 2, 13, 4, shift=-60.0),
        Case("ties", tied),
    ]


@operator("router_top_k", fake=fake, cases=cases)
def router_top_k(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose and weigh the experts of every row.

    Args:
        logits: float32 or bfloat16 [T, E].
        top_k: experts per row, K.

    Returns:
        Weights [T, K] in the logits' dtype and ids int32 [T, K], both by falling logit.
    """
    ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    scores = 1 / (1 + elementwise(torch.exp, -logits.float().gather(1, ids)))
    total = scores[:, :1].clone()
    for rank in range(1, top_k):
        total += scores[:, rank : rank + 1]
    return (scores / (total + 1e-20)).to(logits.dtype), ids.int()
