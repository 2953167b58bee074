"""Routers, experts and softcap have the bits of the reference models' own modules."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from inkrt.plugins.experts.op import experts
from inkrt.plugins.moe.op import moe
from inkrt.plugins.router.op import router
from inkrt.plugins.sink_router.op import sink_router
from inkrt.plugins.softcap.op import softcap

pytest.importorskip("transformers", minversion="5.24")
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingTopkRouter
from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
from transformers.models.inkling2.modeling_inkling2 import (
    Inkling2Experts,
    Inkling2Softcap,
    Inkling2TopKRouter,
)

DTYPES = (torch.float32, torch.bfloat16)
# (hidden size, units of an expert, experts, experts per token)
SIZES = ((96, 40, 7, 3), (257, 33, 16, 8), (64, 24, 384, 8))

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
widths = pytest.mark.parametrize("num_tokens", [11, 37])
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def rows_depend_on_each_other(matrices: Iterable[torch.Tensor], num_tokens: int) -> bool:
    """Whether this processor's products in float32 give a row other bits beside other rows."""
    for matrix in matrices:
        x = _input(num_tokens, matrix.shape[1], matrix.dtype)
        alone = torch.cat([row @ matrix.T for row in x.split(1)])
        if any(
            not torch.equal(x[:count] @ matrix.T, alone[:count])
            for count in range(2, num_tokens + 1)
        ):
            return True
    return False


def require_bits(
    got: torch.Tensor, expected: torch.Tensor, module: Inkling2Experts, num_tokens: int
) -> None:
    """Transformers multiplies an expert's rows at once, and we each by itself."""
    matrices = (module.gate_up_proj[0], module.down_proj[0])
    if got.dtype == torch.float32 and rows_depend_on_each_other(matrices, num_tokens):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    else:
        assert torch.equal(got, expected)


def _config(size: tuple[int, int, int, int]) -> Inkling2TextConfig:
    width, num_hidden, num_experts, top_k = size
    config = Inkling2TextConfig(
        hidden_size=width,
        moe_intermediate_size=num_hidden,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
    )
    # The plain loop over experts, not the batched or grouped forms.
    config._experts_implementation = "eager"
    return config


def _fill(module: nn.Module, dtype: torch.dtype, scale: float) -> nn.Module:
    """Random parameters; float32 ones of the router stay so, as the model keeps them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) * scale
    return module.requires_grad_(False)


def _router(size: tuple[int, int, int, int]) -> Inkling2TopKRouter:
    module = _fill(Inkling2TopKRouter(_config(size)), torch.float32, size[0] ** -0.5)
    generator = torch.Generator().manual_seed(6)
    bias = torch.randn(size[2], generator=generator) * 0.1
    module.e_score_correction_bias.copy_(bias)
    return module


def _input(num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(7)).to(dtype)


@dtypes
@widths
@sizes
def test_router(size: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype):
    module, x = _router(size), _input(num_tokens, size[0], dtype)
    _, expected_weights, expected_ids = module(x)
    weights, ids = router(
        x,
        module.weight,
        module.e_score_correction_bias,
        module.top_k,
        module.routed_scaling_factor,
    )
    assert torch.equal(ids.long(), expected_ids)
    assert torch.equal(weights, expected_weights)


@dtypes
@widths
@sizes
def test_sink_router(size: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype):
    width, _, num_experts, top_k = size
    config = InklingTextConfig(
        hidden_size=width, n_routed_experts=num_experts, num_experts_per_tok=top_k
    )
    module = _fill(InklingTopkRouter(config), torch.float32, width**-0.5)
    bias = torch.randn(num_experts, generator=torch.Generator().manual_seed(6)) * 0.1
    module.e_score_correction_bias.copy_(bias)
    x = _input(num_tokens, width, dtype)
    _, expected, expected_ids, expected_shared = module(x)
    weights, ids, shared, shared_ids = sink_router(
        x, module.weight, bias, module.global_scale, top_k, config.route_scale
    )
    assert torch.equal(ids.long(), expected_ids)
    assert torch.equal(weights, expected)
    assert torch.equal(shared, expected_shared)
    assert shared_ids.tolist() == [[0, 1]] * num_tokens


@dtypes
@widths
@sizes
def test_experts(size: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype):
    width, _, num_experts, top_k = size
    config = _config(size)
    module = _fill(Inkling2Experts(config).to(dtype), dtype, 1.5 * width**-0.5)
    x = _input(num_tokens, width, dtype)
    generator = torch.Generator().manual_seed(8)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=-1)[:, :top_k]
    weights = torch.rand(num_tokens, top_k, generator=generator) * 3
    expected = module(x, ids, weights)
    got = experts(
        x,
        weights,
        ids.int(),
        module.gate_up_proj,
        None,
        None,
        module.down_proj,
        None,
        None,
        None,
        config.mlp_gate_softcap,
        config.mlp_up_softcap,
        False,
    )
    assert got.dtype == dtype
    require_bits(got, expected, module, num_tokens)


@dtypes
@widths
@sizes
def test_moe(size: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype):
    config, gate = _config(size), _router(size)
    module = _fill(Inkling2Experts(config).to(dtype), dtype, 1.5 * size[0] ** -0.5)
    x = _input(num_tokens, size[0], dtype)
    _, weights, ids = gate(x)
    expected = module(x, ids, weights)
    got = moe(
        x,
        gate.weight,
        gate.e_score_correction_bias,
        module.gate_up_proj,
        None,
        None,
        module.down_proj,
        None,
        None,
        None,
        gate.top_k,
        gate.routed_scaling_factor,
        config.mlp_gate_softcap,
        config.mlp_up_softcap,
        False,
    )
    require_bits(got, expected, module, num_tokens)


@dtypes
@widths
def test_softcap(num_tokens: int, dtype: torch.dtype):
    x = _input(num_tokens, 1003, dtype) * 40
    # The model makes its logits float32 before the cap.
    assert torch.equal(softcap(x, 30.0), Inkling2Softcap(30.0)(x.float()))
