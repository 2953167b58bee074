"""router: sigmoid scores of experts, biased selection, normalized weights; all float32.

    s   = sigmoid(fp32(x) @ weight^T)                    [T, E]
    ids = the top_k of s + bias                          the bias selects only
    w   = s[ids] / (sum s[ids] + 1e-20) * scale          [T, top_k]

The ids stand in the order in which `torch.topk(sorted=False)` gives them, because the reference
model adds s[ids] in that order. Experts that tie for the last places are taken from the lowest id
up. Source: inkling2.md section 5.6.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import elementwise, linear_rows
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Routing weights float32 [T, K] and ids int32 [T, K]."""
    axes = Axes("router")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("weight", weight, "E", "D", dtype=torch.float32)
    axes.fit("bias", bias, "E", dtype=torch.float32)
    axes.require(1 <= top_k <= axes["E"], f"top_k is {top_k}, expected 1 to E={axes['E']}")
    axes.require(scale > 0, f"scale is {scale}, expected > 0")
    shape = (axes["T"], top_k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def cases() -> list[Case]:
    """Odd sizes, the model's expert count, all experts chosen, and ties at the selection border."""

    def make(num_rows: int, width: int, num_experts: int, top_k: int) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {
                "x": normal(generator, dtype, num_rows, width),
                "weight": normal(generator, torch.float32, num_experts, width, scale=width**-0.5),
                "bias": normal(generator, torch.float32, num_experts, scale=0.1),
                "top_k": top_k,
                "scale": 8.0,
            }

        return Case(f"T{num_rows}_D{width}_E{num_experts}_K{top_k}", arguments, rtol)

    def tied(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        # Zero weights make every score exactly 1/2; the bias alone decides. Two experts stand above
        # the border and five tie for the two places left.
        bias = torch.zeros(13)
        bias[[3, 9]] = 2.0
        bias[[1, 4, 6, 10, 12]] = 1.0
        weight = torch.zeros(13, 21)
        return {
            "x": normal(generator, dtype, 2, 21),
            "weight": weight,
            "bias": bias,
            "top_k": 4,
            "scale": 2.5,
        }

    # Weights are float32 whatever x is.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 1e-6}
    return [
        make(1, 37, 5, 2),
        make(3, 96, 384, 8),
        make(11, 33, 16, 3),
        make(2, 17, 4, 4),
        Case("ties", tied, rtol),
    ]


def lowest_ids_of_ties(scores: Tensor, ids: Tensor) -> Tensor:
    """Replace the chosen experts that tie with one left out, so that the lowest ids are chosen.

    Args:
        scores: float32 [T, E], the scores that selected.
        ids: int64 [T, top_k], a top-k selection.

    Returns:
        int64 [T, top_k]: `ids`, with the slots of experts whose score equals the row's lowest
        chosen one filled anew, in slot order, from the lowest such id up.
    """
    chosen = scores.gather(1, ids)
    border = chosen.amin(dim=1, keepdim=True)
    slots = chosen == border
    tied = scores == border
    ids = ids.clone()
    for row in (tied.sum(dim=1) > slots.sum(dim=1)).nonzero().flatten().tolist():
        candidates = tied[row].nonzero().flatten()
        ids[row, slots[row]] = candidates[: int(slots[row].sum())]
    return ids


@operator("router", fake=fake, cases=cases)
def router(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts for every token and weigh them.

    Args:
        x: [T, D] float32 or bfloat16.
        weight: float32 [E, D].
        bias: float32 [E], added to the scores for selection only.
        top_k: experts per token, K.
        scale: sum of a token's weights.

    Returns:
        Weights float32 [T, K] and expert ids int32 [T, K].
    """
    scores = elementwise(torch.sigmoid, linear_rows(x.float(), weight))
    biased = scores + bias
    ids = torch.topk(biased, top_k, dim=-1, sorted=False).indices
    ids = lowest_ids_of_ties(biased, ids)
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids.int()
