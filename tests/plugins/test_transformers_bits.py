"""Bit equality of the references with the modules of transformers' modeling_inkling2, CPU eager."""

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.inkling import modeling_inkling as inkling
from transformers.models.inkling2 import modeling_inkling2 as hf
from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig

from inkrt.plugins.caseutil import int32, normal, shuffled_pages, step_arguments
from inkrt.plugins.dynamic_short_conv.op import dynamic_short_conv
from inkrt.plugins.embedding.op import embedding
from inkrt.plugins.kv_write.op import kv_write
from inkrt.plugins.l2_clip.op import l2_clip
from inkrt.plugins.last_row.op import last_row
from inkrt.plugins.linear.op import linear
from inkrt.plugins.log_scale.op import log_scale
from inkrt.plugins.relative_attention.op import relative_attention
from inkrt.plugins.residual_add.op import residual_add
from inkrt.plugins.residual_mix.op import residual_mix
from inkrt.plugins.rms_norm.op import rms_norm
from inkrt.plugins.short_conv.op import short_conv
from inkrt.plugins.sigmoid_gate.op import sigmoid_gate

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, REL_DIM, WINDOW, EXTENT, TAPS = 56, 6, 2, 8, 3, 6, 9, 4
EPS = 1e-6
CONFIG = Inkling2TextConfig(
    vocab_size=101,
    unpadded_vocab_size=97,
    hidden_size=HIDDEN,
    num_hidden_layers=6,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    swa_num_attention_heads=HEADS,
    swa_num_key_value_heads=KV_HEADS,
    swa_head_dim=HEAD_DIM,
    sliding_window_size=WINDOW,
    d_rel=REL_DIM,
    rel_extent=EXTENT,
    log_scaling_n_floor=5,
    qk_l2_clip_threshold=3.0,
    rel_l2_clip_threshold=1.5,
    eos_token_id=None,
    attn_implementation="eager",
)
PER_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16")
)
PER_LENGTH = pytest.mark.parametrize("length", [11, 37])


@pytest.fixture(autouse=True)
def _without_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def _filled(module: nn.Module, dtype: torch.dtype, g: torch.Generator) -> nn.Module:
    """The module with random parameters; those that transformers keeps in float32 stay so."""
    for name, parameter in module.named_parameters():
        keeps_float32 = "conv1d" in name or "query" in name
        parameter_dtype = torch.float32 if keeps_float32 else dtype
        scale = 1.0 if parameter.ndim < 2 or keeps_float32 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data = normal(g, parameter_dtype, *parameter.shape, scale=scale)
    return module.eval()


def _ring(dtype: torch.dtype, channels: int) -> Tensor:
    # NaN everywhere: a read of a position never written would show.
    return torch.full((2, 16, channels), torch.nan, dtype=dtype)


@PER_DTYPE
@PER_LENGTH
@pytest.mark.parametrize("has_float32_input", [False, True])
def test_rms_norm(length, dtype, has_float32_input, generator):
    module = _filled(hf.Inkling2RMSNorm(HIDDEN, EPS), dtype, generator)
    x = normal(generator, torch.float32 if has_float32_input else dtype, length, HIDDEN)
    expected = module(x[None])[0].to(dtype)
    assert torch.equal(rms_norm(x, module.weight, EPS, dtype), expected)


@PER_DTYPE
@PER_LENGTH
def test_unweighted_rms_norm(length, dtype, generator):
    x = normal(generator, dtype, length, KV_HEADS, HEAD_DIM)
    expected = hf.Inkling2UnweightedRMSNorm(EPS)(x[None])[0]
    assert torch.equal(rms_norm(x, None, EPS, dtype), expected)


@PER_DTYPE
@PER_LENGTH
def test_l2_clip(length, dtype, generator):
    x = normal(generator, dtype, length, HEADS, HEAD_DIM)
    assert torch.equal(l2_clip(x, None, 2.5), hf.Inkling2L2Clip(2.5)(x[None])[0])
    module = _filled(hf.Inkling2ScaledL2Clip(HEADS, HEAD_DIM, 2.5), dtype, generator)
    assert torch.equal(l2_clip(x, module.scale, 2.5), module(x[None])[0])


@PER_DTYPE
@PER_LENGTH
@pytest.mark.parametrize("position", [0, 127990])
def test_log_scale(position, length, dtype, generator):
    x = normal(generator, dtype, length, HEADS, HEAD_DIM)
    positions = position + torch.arange(length)[None]
    expected = hf.Inkling2LogScale(CONFIG)(x[None], positions)[0]
    assert torch.equal(log_scale(x, int32(position), 5, 0.1), expected)

    module = hf.Inkling2LogScaledL2Clip(CONFIG, HEADS, HEAD_DIM, 2.5)
    module = _filled(module, dtype, generator)
    clipped = l2_clip(x, module.scale, 2.5)
    assert torch.equal(log_scale(clipped, int32(position), 5, 0.1), module(x[None], positions)[0])


@PER_DTYPE
@PER_LENGTH
@pytest.mark.parametrize("channels", [HIDDEN, 1031])
def test_short_conv(channels, length, dtype, generator):
    module = hf.Inkling2ShortConvolution(channels, TAPS, layer_idx=0, conv_idx=2)
    module = _filled(module, dtype, generator)
    x = normal(generator, dtype, length, channels)
    weight = module.conv1d.weight[:, 0]
    step = step_arguments(0, length)
    out = short_conv(x, weight, _ring(dtype, channels), **step)
    assert torch.equal(out, module(x[None])[0])


@PER_DTYPE
@PER_LENGTH
@pytest.mark.parametrize("channels", [HIDDEN, 1031])
def test_unscaled_short_conv(channels, length, dtype, generator):
    module = inkling.InklingShortConvolution(channels, TAPS, layer_idx=0, conv_idx=2)
    module = _filled(module, dtype, generator)
    x = normal(generator, dtype, length, channels)
    step = step_arguments(0, length)
    weight = module.conv1d.weight[:, 0]
    out = short_conv(x, weight, _ring(dtype, channels), **step, is_scaled=False)
    assert torch.equal(out, module(x[None])[0])


@PER_DTYPE
@PER_LENGTH
@pytest.mark.parametrize(("heads", "channels"), [(KV_HEADS, 16), (8, 1024)])
def test_dynamic_short_conv(heads, channels, length, dtype, generator):
    module = hf.Inkling2DynamicShortConvolution(channels, HIDDEN, heads, TAPS, 5, conv_idx=0)
    module = _filled(module, dtype, generator)
    x, source = (normal(generator, dtype, length, width) for width in (channels, HIDDEN))
    dynamic = linear(source, module.weight_proj.weight, False)
    step = step_arguments(0, length)
    out = dynamic_short_conv(x, module.static_weight, dynamic, _ring(dtype, channels), **step)
    assert torch.equal(out, module(x[None], source[None])[0])


@PER_DTYPE
@PER_LENGTH
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 8])
def test_residual_mix(num_blocks, num_queries, length, dtype, generator):
    module = hf.Inkling2BlockAttentionResidual(CONFIG, num_queries)
    module = _filled(module, dtype, generator)
    blocks = [normal(generator, dtype, length, HIDDEN) for _ in range(num_blocks)]
    for partial_dtype in (dtype, torch.float32):
        partial = normal(generator, partial_dtype, length, HIDDEN)
        out = residual_mix([*blocks, partial], module.query.view(-1, HIDDEN), EPS)
        expected = module(torch.stack(blocks, dim=-2)[None], partial[None])
        assert torch.equal(out, torch.cat(expected))


@PER_DTYPE
@PER_LENGTH
def test_residual_add(length, dtype, generator):
    residual, update = (normal(generator, dtype, length, HIDDEN) for _ in range(2))
    partial = residual_add(residual, update, torch.float32)
    assert torch.equal(partial, residual.float() + update.float())
    assert torch.equal(residual_add(partial, update, dtype), (partial + update).to(dtype))
    assert torch.equal(residual_add(None, update, torch.float32), update.float())


@PER_DTYPE
@PER_LENGTH
def test_gated_output_projection(length, dtype, generator):
    module = hf.Inkling2GatedOutputProjection(CONFIG, HEADS, HEAD_DIM)
    module = _filled(module, dtype, generator)
    attention, x = (normal(generator, dtype, length, width) for width in (HEADS * HEAD_DIM, HIDDEN))
    gate = linear(x, module.gate_proj.weight, False)
    out = linear(sigmoid_gate(attention, gate), module.linear.weight, False)
    assert torch.equal(out, module(attention[None], x[None])[0])


@PER_DTYPE
@PER_LENGTH
def test_normed_embedding(length, dtype, generator):
    module = hf.Inkling2NormedEmbedding(101, HIDDEN, None, EPS)
    module = _filled(module, dtype, generator)
    tokens = torch.randint(101, (length,), generator=generator, dtype=torch.int32)
    rows = embedding(tokens, module.weight)
    out = rms_norm(rows, module.embed_norm.weight, EPS, dtype)
    expected = module(tokens[None])[0]
    assert torch.equal(out, expected)
    assert torch.equal(last_row(out, int32(length - 3)), expected[length - 4 : length - 3])


class _Attention:
    """An attention layer of transformers and the same layer made of our operators and state."""

    def __init__(self, *, is_sliding: bool, dtype: torch.dtype, g: torch.Generator):
        layer_idx = 0 if is_sliding else 5
        kind = hf.Inkling2SlidingAttention if is_sliding else hf.Inkling2FullAttention
        self.module = _filled(kind(CONFIG, layer_idx), dtype, g)
        self.cache = DynamicCache(config=CONFIG)
        self.is_sliding = is_sliding
        # A prefill's static convolution leaves time the fastest dimension in transformers, and the
        # norm per head that follows adds in another order there than on contiguous rows.
        self.has_layout_of_transformers = True
        # More rows than window - 1, fewer than the prefills: rings wrap.
        entries = (2, WINDOW + 2) if is_sliding else (13, 5)
        self.page_table = None if is_sliding else shuffled_pages(g, 13, 11)
        self.conv_states = [_ring(dtype, KV_HEADS * HEAD_DIM) for _ in range(2)]
        self.caches = [
            torch.full((*entries, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype) for _ in range(2)
        ]

    def expected(self, position: int, inputs: list[Tensor], *, use_cache: bool) -> Tensor:
        x, x_k, x_v = (tensor[None] for tensor in inputs)
        cache = self.cache if use_cache else None
        positions = position + torch.arange(x.shape[1])[None]
        make_mask = create_sliding_window_causal_mask if self.is_sliding else create_causal_mask
        mask = make_mask(
            config=CONFIG, inputs_embeds=x, attention_mask=None, cache=cache, position_ids=positions
        )
        return self.module(
            hidden_states=x,
            key_hidden_states=x_k,
            value_hidden_states=x_v,
            attention_mask=mask,
            relative_distance=hf.get_relative_distance(x, cache, self.is_sliding),
            cache=cache,
            position_ids=positions,
        )[0][0]

    def ours(self, position: int, inputs: list[Tensor], num_tokens: int | None = None) -> Tensor:
        module, (x, x_k, x_v) = self.module, inputs
        step = step_arguments(position, num_tokens or len(x), slot=1)
        q = self._query(x, module.q_proj, CONFIG.qk_l2_clip_threshold, step["position"])
        bias = module.relative_position_bias
        rel = self._query(x, bias, CONFIG.rel_l2_clip_threshold, step["position"])
        k = self._conv(x_k, module.k_proj, self.conv_states[0], step)
        v = self._conv(x_v, module.v_proj, self.conv_states[1], step)
        k = l2_clip(k, None, CONFIG.qk_l2_clip_threshold)
        v = rms_norm(v, None, EPS, v.dtype)
        sinks = linear(x, module.sink_proj.weight, False)
        out = relative_attention(
            q, k, v, rel, bias.proj, sinks, *self.caches, self.page_table, **step,
            window=WINDOW if self.is_sliding else 0, scale=HEAD_DIM**-0.5,
        )  # fmt: skip
        kv_write(k, v, *self.caches, self.page_table, **step)
        gate = linear(x, module.o_proj.gate_proj.weight, False)
        return linear(sigmoid_gate(out.flatten(1), gate), module.o_proj.linear.weight, False)

    def _query(self, x: Tensor, part: nn.Module, threshold: float, position: Tensor) -> Tensor:
        states = linear(x, part.linear.weight, False).view(len(x), HEADS, -1)
        states = l2_clip(states, part.norm.scale, threshold)
        return states if self.is_sliding else log_scale(states, position, 5, 0.1)

    def _conv(self, x: Tensor, part: nn.Module, state: Tensor, step: dict) -> Tensor:
        u = linear(x, part.linear.weight, False)
        if self.is_sliding:
            out = short_conv(u, part.sconv.conv1d.weight[:, 0], state, **step)
            if self.has_layout_of_transformers:
                out = out.T.contiguous().T
        else:
            dynamic = linear(x, part.sconv.weight_proj.weight, False)
            out = dynamic_short_conv(u, part.sconv.static_weight, dynamic, state, **step)
        return out.view(len(x), KV_HEADS, HEAD_DIM)


def _inputs(dtype: torch.dtype, length: int, is_sliding: bool, g: torch.Generator) -> list[Tensor]:
    if is_sliding:
        return [normal(g, dtype, length, HIDDEN)] * 3
    return [normal(g, dtype, length, HIDDEN) for _ in range(3)]


class _Groups(nn.Module):
    """What eager attention asks of its module."""

    num_key_value_groups = 6


@PER_DTYPE
@pytest.mark.parametrize("window", [17, 0])
def test_attention_of_full_size_heads(window, dtype, generator):
    length, heads, kv_heads, head_dim, rel_dim, extent = 37, 48, 8, 128, 16, 23
    q = normal(generator, dtype, length, heads, head_dim)
    k, v = (normal(generator, dtype, length, kv_heads, head_dim) for _ in range(2))
    rel = normal(generator, dtype, length, heads, rel_dim)
    bank = normal(generator, dtype, rel_dim, extent)
    sinks = normal(generator, dtype, length, heads)
    scale = head_dim**-0.5
    caches = [torch.full((2, 40, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    out = relative_attention(
        q, k, v, rel, bank, sinks, *caches, None if window else int32(1),
        **step_arguments(0, length), window=window, scale=scale,
    )  # fmt: skip

    # Of the bias module only its part after the projection and the clip.
    bias_module = hf.Inkling2RelativePositionBias(CONFIG, heads, extent, log_scaling=False).eval()
    bias_module.linear = nn.Identity()
    bias_module.norm.forward = lambda states, _: states
    bias_module.proj = nn.Parameter(bank)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    bias = bias_module(rel.flatten(1)[None], distance, None)
    is_masked = (distance < 0) | ((distance >= window) if window else False)
    mask = torch.zeros(length, length, dtype=dtype).masked_fill(is_masked, torch.finfo(dtype).min)
    expected, _ = hf.eager_attention_forward(
        _Groups().eval(), *(t.transpose(0, 1)[None] for t in (q, k, v)), mask, scale,
        position_bias=bias, sinks=sinks.T[None, ..., None],
    )  # fmt: skip
    assert torch.equal(out, expected[0])


PER_KIND = pytest.mark.parametrize("is_sliding", [True, False], ids=("sliding", "full"))


@PER_DTYPE
@PER_LENGTH
@PER_KIND
def test_attention_prefill(is_sliding, length, dtype, generator):
    layer = _Attention(is_sliding=is_sliding, dtype=dtype, g=generator)
    inputs = _inputs(dtype, length, is_sliding, generator)
    assert torch.equal(layer.ours(0, inputs), layer.expected(0, inputs, use_cache=False))


@PER_DTYPE
@PER_KIND
def test_attention_decode(is_sliding, dtype, generator):
    layer = _Attention(is_sliding=is_sliding, dtype=dtype, g=generator)
    inputs = _inputs(dtype, 37, is_sliding, generator)
    begin = 0
    for width in (19, 1, 1, 1, 1, 1, 1, 1, 11):
        step = [tensor[begin : begin + width] for tensor in inputs]
        expected = layer.expected(begin, step, use_cache=True)
        assert torch.equal(layer.ours(begin, step), expected), f"at position {begin}"
        begin += width


@PER_DTYPE
@PER_LENGTH
def test_sliding_prefill_on_contiguous_rows_is_near(length, dtype, generator):
    layer = _Attention(is_sliding=True, dtype=dtype, g=generator)
    layer.has_layout_of_transformers = False
    inputs = _inputs(dtype, length, True, generator)
    ours, expected = layer.ours(0, inputs), layer.expected(0, inputs, use_cache=False)
    error = torch.linalg.vector_norm((ours - expected).double())
    # Float32: last bits of the norms. Bfloat16: a norm seldom crosses a rounding boundary.
    bound = {torch.float32: 3e-7, torch.bfloat16: 2e-3}[dtype]
    assert error <= bound * torch.linalg.vector_norm(expected.double())
