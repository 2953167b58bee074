"""sink_router: experts chosen by biased sigmoid scores; shared experts compete for the weight.

    l   = fp32(x) @ weight^T                              [T, E + S], the shared experts last
    ids = the top_k of sigmoid(l[:E]) + bias              the bias selects only
    w   = softmax(logsigmoid(l[ids], l[E:])) * scale * global_scale

All in float32; the top_k + S weights are rounded to the dtype of x at the end. The ids stand in the
order of `torch.topk(sorted=False)`; experts that tie for the last places are taken from the lowest
id up. Every token has all S shared experts, which is what their ids say, so that both kinds can be
applied by the same operator. Source: Inkling, `InklingTopkRouter` of transformers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import MAX_VERIFY_TOKENS, Arguments, Case, operator
from inkrt.plugins.router.op import lowest_ids_of_ties
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

Routing = tuple[Tensor, Tensor, Tensor, Tensor]


def fake(
    x: Tensor, weight: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, scale: float
) -> Routing:
    """Weights [T, K] in x's dtype, ids int32 [T, K], and the same [T, S] of shared experts."""
    axes = Axes("sink_router")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("weight", weight, "E+S", "D", dtype=torch.float32)
    axes.fit("bias", bias, "E", dtype=torch.float32)
    axes.fit("global_scale", global_scale, 1, dtype=torch.float32)
    num_shared = axes["E+S"] - axes["E"]
    axes.require(
        num_shared >= 1, f"weight has {axes['E+S']} rows, expected more than E={axes['E']}"
    )
    axes.require(1 <= top_k <= axes["E"], f"top_k is {top_k}, expected 1 to E={axes['E']}")
    axes.require(scale > 0, f"scale is {scale}, expected > 0")
    rows = axes["T"]
    return (
        x.new_empty(rows, top_k),
        x.new_empty((rows, top_k), dtype=torch.int32),
        x.new_empty(rows, num_shared),
        x.new_empty((rows, num_shared), dtype=torch.int32),
    )


def cases() -> list[Case]:
    """Odd sizes, the model's numbers, all experts, one shared expert, vanishing scores, ties."""

    def make(
        name: str,
        num_rows: int,
        width: int,
        num_experts: int,
        num_shared: int,
        top_k: int,
        gain: float = 1.0,
    ) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            rows = num_experts + num_shared
            return {
                "x": normal(generator, dtype, num_rows, width),
                "weight": normal(generator, torch.float32, rows, width, scale=gain * width**-0.5),
                "bias": normal(generator, torch.float32, num_experts, scale=0.1),
                "global_scale": normal(generator, torch.float32, 1).abs() + 0.5,
                "top_k": top_k,
                "scale": 8.0,
            }

        return Case(name, arguments)

    def tied(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        # Zero weights make every score exactly 1/2; the bias alone decides. Two experts stand above
        # the border and five tie for the two places left.
        bias = torch.zeros(13)
        bias[[3, 9]] = 2.0
        bias[[1, 4, 6, 10, 12]] = 1.0
        return {
            "x": normal(generator, dtype, 2, 21),
            "weight": torch.zeros(15, 21),
            "bias": bias,
            "global_scale": torch.ones(1),
            "top_k": 4,
            "scale": 2.5,
        }

    return [
        make("odd", 1, 37, 5, 2, 2),
        make("model", 8, 96, 256, 2, 6),
        make("prefill", 11, 33, 16, 3, 3),
        make("all experts, one shared", 2, 17, 4, 1, 4),
        make("scores that vanish", 3, 48, 12, 2, 3, gain=60.0),
        Case("ties", tied),
    ]


@operator("sink_router", fake=fake, cases=cases)
def sink_router(
    x: Tensor, weight: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, scale: float
) -> Routing:
    """Choose experts for every token and weigh them beside the shared ones.

    Args:
        x: float32 or bfloat16 [T, D].
        weight: float32 [E + S, D], the S shared experts last.
        bias: float32 [E], added to the scores for selection only.
        global_scale: float32 [1], of all weights.
        top_k: experts per token, K.
        scale: of all weights.

    Returns:
        Weights [T, K] in x's dtype and expert ids int32 [T, K]; then weights [T, S] of the shared
        experts and their ids int32 [T, S], 0..S-1 in every row.
    """
    if len(x) > MAX_VERIFY_TOKENS:
        return _route(x, weight, bias, global_scale, top_k, scale)
    # As `row_by_row`, for several outputs.
    rows = [
        _route(x[i : i + 1].clone(), weight, bias, global_scale, top_k, scale)
        for i in range(len(x))
    ]
    weights, ids, shared, shared_ids = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return weights, ids, shared, shared_ids


def _route(
    x: Tensor, weight: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, scale: float
) -> Routing:
    logits = F.linear(x.float(), weight)
    num_experts = len(bias)
    biased = logits[:, :num_experts].sigmoid() + bias
    ids = torch.topk(biased, top_k, dim=-1, sorted=False).indices
    ids = lowest_ids_of_ties(biased, ids)
    active = torch.cat([logits.gather(1, ids), logits[:, num_experts:]], dim=-1)
    log_scores = F.logsigmoid(active)
    shares = torch.exp(log_scores - torch.logsumexp(log_scores, dim=-1, keepdim=True))
    weights = (shares * scale * global_scale).to(x.dtype)
    num_shared = len(weight) - num_experts
    shared_ids = torch.arange(num_shared, dtype=torch.int32).repeat(len(x), 1)
    return (
        weights[:, :top_k].contiguous(),
        ids.int(),
        weights[:, top_k:].contiguous(),
        shared_ids,
    )
