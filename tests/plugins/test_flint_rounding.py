"""Where Flint's operators round in bfloat16: at the reference's points, not at others.

Each step is computed in float64 with its roundings written out, and once more as transformers or
another obvious kernel would round. The operator must have the bits of the first wherever float32
sums do not fall on the other side of a border, and the second must differ visibly, or the test
shows nothing.
"""

import math
from collections.abc import Callable

import pytest
import torch
from oracles_flint import matrix, silu
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal, step_arguments, weight_arguments
from inkrt.plugins.registry import plugins

BF16 = torch.bfloat16
OPS = {name: plugin.op for name, plugin in plugins().items()}
# Operator's result, and the reference's and other roundings of it.
Three = tuple[Tensor, Tensor, Tensor]


def r(x: Tensor) -> Tensor:
    """The float64 value of a rounding to bfloat16."""
    return x.to(BF16).double()


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def norm_reads_the_unrounded_sum(g: torch.Generator) -> Three:
    x, delta = normal(g, BF16, 5, 300), normal(g, BF16, 5, 300)
    weight = normal(g, BF16, 300)
    residual, got = OPS["add_rms_norm"](x, delta, weight, 1e-6, BF16)
    total = x.double() + delta.double()
    assert torch.equal(residual.double(), r(total))
    return got, r(rms(total) * weight.double()), r(rms(r(total)) * weight.double())


def table_of_the_rotation_is_float32(g: torch.Generator) -> Three:
    x = normal(g, BF16, 4, 3, 64)
    got = OPS["rope"](x, int32(1000), 10000.0)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    angles = (torch.arange(1000, 1004).float()[:, None] * frequencies).double()[:, None]
    low, high = x.double().chunk(2, dim=-1)

    def rotated(cos: Tensor, sin: Tensor) -> Tensor:
        return r(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))

    return got, rotated(angles.cos(), angles.sin()), rotated(r(angles.cos()), r(angles.sin()))


def probabilities_round_before_they_are_divided(g: torch.Generator) -> Three:
    q, k, v = (normal(g, BF16, 1, 1, 16) for _ in "qkv")
    k_cache, v_cache = (normal(g, BF16, 1, 40, 1, 16) for _ in "kv")
    sinks = normal(g, torch.float32, 1)
    got = OPS["sink_attention"](
        q, k, v, sinks, k_cache, v_cache, None, *step_arguments(40, 1).values(), 40, 0.25
    )
    keys = torch.cat([k_cache[0, 1:, 0], k[0]]).double()
    values = torch.cat([v_cache[0, 1:, 0], v[0]]).double()
    scores = keys @ q[0, 0].double() * 0.25
    p = torch.exp(scores - scores.max())
    total = p.sum() + torch.exp(sinks[0].double() - scores.max())
    return got, r(r(p) @ values / total)[None, None], r(r(p / total) @ values)[None, None]


def experts_round_activation_output_and_sum(g: torch.Generator) -> Three:
    x = normal(g, BF16, 3, 64)
    weights = normal(g, BF16, 3, 2).abs()
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]], dtype=torch.int32)
    both = weight_arguments("gate_up", g, BF16, 3, 64, 64, scale=0.125, quantized=True)
    back = weight_arguments("down", g, BF16, 3, 64, 32, scale=0.2, quantized=True)
    got = OPS["swiglu_experts"](x, weights, ids, **both, **back, rank=None, partial=False)
    gate_up = matrix(*both.values()).double()
    down = matrix(*back.values()).double()

    def result(round_gate_up: Callable[[Tensor], Tensor]) -> Tensor:
        out = torch.zeros(3, 64, dtype=torch.float64)
        for t in range(3):
            for w, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
                gate, up = round_gate_up(gate_up[e] @ x[t].double()).chunk(2)
                out[t] += w * r(down[e] @ r(silu(gate) * up))
        return r(out)

    return got, result(lambda product: product), result(r)


def shared_activation_rounds_once(g: torch.Generator) -> Three:
    gate_up = normal(g, BF16, 4, 400)
    gate, up = gate_up.double().chunk(2, dim=-1)
    return OPS["silu_mul"](gate_up), r(silu(gate) * up), r(r(silu(gate)) * up)


def projection_is_scaled_before_it_is_rounded(g: torch.Generator) -> Three:
    x = normal(g, BF16, 3, 64)
    codes, scales, global_scale = weight_arguments(
        "weight", g, BF16, 90, 64, scale=0.1, quantized=True
    ).values()
    product = x.double() @ matrix(codes, scales, torch.ones(1, dtype=torch.float64)).T
    got = OPS["linear_nvfp4"](x, codes, scales, global_scale, False)
    factor = global_scale.double()
    return got, r(product * factor), r(r(product) * factor)


def terms_of_the_experts_round_before_they_are_added(g: torch.Generator) -> Three:
    x, logits, shared = normal(g, BF16, 4, 32), normal(g, BF16, 4, 2), normal(g, BF16, 4, 16)
    gate_up, down = normal(g, BF16, 2, 32, 32, scale=0.2), normal(g, BF16, 2, 32, 16, scale=0.3)
    shared_down = normal(g, BF16, 32, 16, scale=0.3)
    plain = (None, None)
    args = (x, logits, shared, gate_up, *plain, down, *plain, shared_down, *plain, None, 1)
    got = OPS["flint_moe"](*args, False)
    parts = OPS["flint_moe"](*args, True).double()
    right = shared.double() @ shared_down.double().T
    # One expert with weight 1: the routed sum is its rounded output.
    left = torch.stack(
        [
            r(down[e].double() @ r(silu(h[:16]) * h[16:]))
            for e, h in (
                (e, gate_up[e].double() @ x[t].double())
                for t, e in enumerate(logits.argmax(-1).tolist())
            )
        ]
    )
    torch.testing.assert_close(parts, left + right, rtol=0, atol=0.05)
    return got, r(left + r(right)), r(left + right)


def routing_weights_are_normalized_and_rounded(g: torch.Generator) -> Three:
    logits = normal(g, BF16, 50, 16, scale=2.0)
    got, ids = OPS["router_top_k"](logits, 6)
    scores = torch.sigmoid(logits.double().gather(1, ids.long()))
    exact = scores / scores.sum(-1, keepdim=True)
    return got, r(exact), exact


@pytest.mark.parametrize(
    "steps",
    [
        norm_reads_the_unrounded_sum,
        table_of_the_rotation_is_float32,
        probabilities_round_before_they_are_divided,
        experts_round_activation_output_and_sum,
        shared_activation_rounds_once,
        projection_is_scaled_before_it_is_rounded,
        terms_of_the_experts_round_before_they_are_added,
        routing_weights_are_normalized_and_rounded,
    ],
    ids=lambda steps: steps.__name__,
)
def test_rounding(steps: Callable[[torch.Generator], Three]) -> None:
    differing, other_differing, count = 0, 0, 0
    for seed in range(20):
        got, expected, other = steps(torch.Generator().manual_seed(seed))
        assert got.dtype == BF16
        differing += int((got.double() != expected).sum())
        other_differing += int((got.double() != other).sum())
        count += got.numel()
    assert differing <= math.ceil(0.002 * count)
    assert other_differing >= 0.04 * count


def test_logits_of_the_head_are_not_rounded() -> None:
    """And without a cap the operator's output is the product itself."""
    case = next(c for c in plugins()["lm_head_sample"].cases() if c.name == "nvfp4_greedy")
    arguments = case.arguments(BF16, torch.Generator().manual_seed(1))
    arguments["x"] = normal(torch.Generator().manual_seed(2), BF16, *arguments["x"].shape)
    _, logits = OPS["lm_head_sample"](**arguments)
    weight = matrix(arguments["weight"], arguments["scales"], arguments["global_scale"].double())
    exact = arguments["x"].double() @ weight.T
    assert torch.allclose(logits.double(), exact, rtol=1e-6, atol=1e-6)
    assert (logits != logits.to(BF16).float()).float().mean() > 0.5
    _, rounded = OPS["lm_head_sample"](**arguments | {"logits_dtype": BF16})
    assert torch.equal(rounded, rounded.to(BF16).float())
