"""Inkling-2 for training: whole sequences, differentiable, plain torch.

Parameters have the publisher's names (without `model.llm.`) and layouts, so that exporting is
writing them down. Matrices multiply in a compute dtype; what the published model keeps in float32
is float32 here. Packed documents do not see each other: attention and convolutions stop at a
change of the segment number.

Shape letters: B sequences, S positions, D hidden, H heads, K kv heads, d head size, E experts,
F expert width, V vocabulary without padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

MIX_EPS = 1e-6  # of the norms inside the residual mix, whatever rms_norm_eps is
CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """Sizes and constants; names are the publisher's."""

    vocab_size: int
    unpadded_vocab_size: int
    eos_token_id: int
    hidden_size: int = 256
    num_hidden_layers: int = 13
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    sliding_window_size: int = 64
    d_rel: int = 8
    rel_extent: int = 128
    log_scaling_n_floor: int = 512
    log_scaling_alpha: float = 0.1
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    conv_kernel_size: int = 4
    moe_intermediate_size: int = 64
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    route_scale: float = 2.0
    qk_l2_clip_threshold: float = 11.313708498984761  # twice the root of head_dim
    rel_l2_clip_threshold: float = 8.0
    n_layers_per_attn_res_block: int = 6
    mlp_gate_softcap: float = 4.0
    mlp_up_softcap: float = 25.0
    final_logit_softcapping: float = 30.0

    def is_full(self, layer: int) -> bool:
        """Whether a layer has full attention: the last of every residual block."""
        return (layer + 1) % 6 == 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the tokens of a batch stand.

    Attributes:
        position: [B, S], counted within the document.
        segment: [B, S], equal for tokens of one document.
    """

    position: Tensor
    segment: Tensor


def plain_rows(tokens: Tensor) -> Rows:
    """One document per sequence of `tokens` [B, S]."""
    position = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return Rows(position, torch.zeros_like(position))


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square along the last dimension, in float32."""
    x = x.float()
    unit: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return unit


def l2_clip(x: Tensor, threshold: float) -> Tensor:
    """`x` shortened to at most `threshold` along the last dimension, in float32."""
    x = x.float()
    # The norm of a zero row has no gradient; the floor is far below float32's rounding of 1e-6.
    norm = x.square().sum(-1, keepdim=True).clamp_min(1e-24).sqrt()
    return x * (threshold / (norm + CLIP_EPS)).clamp_max(1.0)


def shear(rel: Tensor, num_keys: int, first: int) -> Tensor:
    """Bias by key from bias by distance.

    Args:
        rel: [..., Q, X], the bias of query q at distances 0..X-1.
        num_keys: keys; key 0 stands `first` positions before query 0.
        first: distance of query 0 to key 0.

    Returns:
        [..., Q, num_keys]: `rel[q, q + first - key]`, zero where that is no distance of `rel`.
    """
    num_queries, extent = rel.shape[-2:]
    # Reversed and padded by `left`, row q starts at key q of an axis that begins `extent - 1` keys
    # before query 0; rows one longer than the axis move every next row one key on.
    axis = max(num_queries + extent - 1, num_keys + extent - 1 - first)
    padded = functional.pad(rel.flip(-1), (0, axis + 1 - extent))
    flat = padded.flatten(-2)[..., : num_queries * axis]
    by_key = flat.unflatten(-1, (num_queries, axis))
    # Axis index of key k is k - first + extent - 1.
    skip = extent - 1 - first
    if skip < 0:
        return functional.pad(by_key, (-skip, 0))[..., :num_keys]
    return by_key[..., skip : skip + num_keys]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in the dtype of `x`."""
    return functional.linear(x, weight.to(x.dtype))


def lagged(u: Tensor, lag: int, rows: Rows) -> Tensor:
    """`u` [B, S, C] of `lag` positions before, zero before the document's start."""
    if lag == 0:
        return u
    moved = functional.pad(u, (0, 0, lag, 0))[:, : u.shape[1]]
    return moved * (rows.position >= lag).unsqueeze(-1)


class Weight(nn.Module):
    """A parameter named `weight`."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


class Norm(Weight):
    """RMS norm with a weight, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., size] to the same in `dtype`."""
        return (unit_rms(x, self.eps) * self.weight).to(dtype)


class ShortConv(Weight):
    """Static depthwise causal convolution; index W - 1 of the weight is the current token."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__(torch.randn(channels, 1, taps) * 0.05)

    def forward(self, u: Tensor, rows: Rows) -> Tensor:
        """[B, S, channels] to the same, computed in float32."""
        taps = self.weight.shape[-1]
        u32 = u.float()
        y = u32 * (self.weight[:, 0, taps - 1] + 1.0)
        for lag in range(1, taps):
            y = y + lagged(u32, lag, rows) * self.weight[:, 0, taps - 1 - lag]
        return (y * (taps + 1) ** -0.5).to(u.dtype)


class DynamicShortConv(nn.Module):
    """Causal convolution with static taps per channel plus taps per token and head."""

    def __init__(self, num_heads: int, channels: int, taps: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.taps = taps
        self.static_w = nn.Parameter(torch.randn(taps, channels) * 0.05)
        self.weight_proj = nn.Parameter(torch.randn(num_heads * taps, hidden) * 0.1 * hidden**-0.5)

    def forward(self, u: Tensor, x: Tensor, rows: Rows) -> Tensor:
        """Inputs [B, S, channels] and what the taps are made of [B, S, D]; float32 inside."""
        dynamic = linear(x, self.weight_proj).float().unflatten(-1, (self.num_heads, self.taps))
        per_head = u.shape[-1] // self.num_heads
        u32 = u.float()
        y = u32
        for lag in range(self.taps):
            weight = dynamic[..., lag].repeat_interleave(per_head, -1) + self.static_w[lag]
            y = y + weight * lagged(u32, lag, rows)
        return (y * (2 * self.taps + 1) ** -0.5).to(u.dtype)


class Scale(nn.Module):
    """A parameter named `scale`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(rows, columns))


class RelLogitsProj(nn.Module):
    """What turns relative features into a bias per distance."""

    def __init__(self, d_rel: int, extent: int) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(d_rel, extent) * 0.02)


class Attention(nn.Module):
    """Gated grouped-query attention with relative bias, sinks and short convolutions."""

    def __init__(self, config: NanoConfig, *, is_full: bool) -> None:
        super().__init__()
        self.config = config
        self.is_full = is_full
        hidden, taps = config.hidden_size, config.conv_kernel_size
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        width, kv_width = heads * config.head_dim, kv * config.head_dim
        self.wq_du = _matrix(width, hidden)
        self.wk_dv = _matrix(kv_width, hidden)
        self.wv_dv = _matrix(kv_width, hidden)
        self.wr_du = _matrix(heads * config.d_rel, hidden)
        self.gate_attn = _matrix(width, hidden)
        self.attn_sink_proj = Weight(torch.zeros(heads, hidden))
        self.wo_ud = _matrix(hidden, width)
        self.q_l2_clip = Scale(heads, config.head_dim)
        self.rel_l2_clip = Scale(heads, config.d_rel)
        extent = config.rel_extent if is_full else config.sliding_window_size
        self.rel_logits_proj = RelLogitsProj(config.d_rel, extent)
        self.k_sconv: nn.Module
        self.v_sconv: nn.Module
        if is_full:
            self.k_sconv = DynamicShortConv(kv, kv_width, taps, hidden)
            self.v_sconv = DynamicShortConv(kv, kv_width, taps, hidden)
        else:
            self.k_sconv = ShortConv(kv_width, taps)
            self.v_sconv = ShortConv(kv_width, taps)

    def forward(self, inputs: list[Tensor], rows: Rows) -> Tensor:
        """One input [B, S, D] (sliding) or three for queries, keys, values (full)."""
        config = self.config
        x_q, x_k, x_v = inputs if self.is_full else inputs * 3
        dtype = x_q.dtype
        heads, kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q = linear(x_q, self.wq_du.weight).unflatten(-1, (heads, size))
        r = linear(x_q, self.wr_du.weight).unflatten(-1, (heads, config.d_rel))
        q = l2_clip(q.float() * self.q_l2_clip.scale, config.qk_l2_clip_threshold).to(dtype)
        r = l2_clip(r.float() * self.rel_l2_clip.scale, config.rel_l2_clip_threshold).to(dtype)
        if self.is_full:
            ratio = (rows.position + 1) / config.log_scaling_n_floor
            tau = 1.0 + config.log_scaling_alpha * ratio.float().clamp_min(1.0).log()
            tau = tau[..., None, None]
            q, r = (q.float() * tau).to(dtype), (r.float() * tau).to(dtype)
        k, v = linear(x_k, self.wk_dv.weight), linear(x_v, self.wv_dv.weight)
        if self.is_full:
            k, v = self.k_sconv(k, x_k, rows), self.v_sconv(v, x_v, rows)
        else:
            k, v = self.k_sconv(k, rows), self.v_sconv(v, rows)
        k = l2_clip(k.unflatten(-1, (kv, size)), config.qk_l2_clip_threshold).to(dtype)
        v = unit_rms(v.unflatten(-1, (kv, size)), config.rms_norm_eps).to(dtype)
        rel = r @ self.rel_logits_proj.proj.to(dtype)
        sink = linear(x_q, self.attn_sink_proj.weight)
        attend = self._full if self.is_full else self._sliding
        out = attend(q, k, v, rel, sink, rows)
        gate = linear(x_q, self.gate_attn.weight).float().sigmoid()
        return linear((out.flatten(-2).float() * gate).to(dtype), self.wo_ud.weight)

    def _full(
        self, q: Tensor, k: Tensor, v: Tensor, rel: Tensor, sink: Tensor, rows: Rows
    ) -> Tensor:
        """All [B, S, heads, .], sink [B, S, H]; returns [B, S, H, d]."""
        length = q.shape[1]
        bias = shear(rel.transpose(1, 2), length, 0)
        position = torch.arange(length, device=q.device)
        mask = (position[:, None] >= position) & (
            rows.segment[:, :, None] == rows.segment[:, None, :]
        )
        out = _softmax_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            bias,
            sink.transpose(1, 2),
            mask[:, None],
        )
        return out.transpose(1, 2)

    def _sliding(
        self, q: Tensor, k: Tensor, v: Tensor, rel: Tensor, sink: Tensor, rows: Rows
    ) -> Tensor:
        """As `_full`; chunks of one window look at themselves and the chunk before."""
        batch, length = q.shape[:2]
        window = self.config.sliding_window_size
        extra = -length % window
        chunks = (length + extra) // window

        def chunked(x: Tensor) -> Tensor:  # [B, S, N, c] to [B, chunks, N, window, c]
            x = functional.pad(x, (0, 0, 0, 0, 0, extra))
            return x.unflatten(1, (chunks, window)).transpose(2, 3)

        def with_previous(x: Tensor) -> Tensor:
            return torch.cat([functional.pad(x, (0,) * 6 + (1, 0))[:, :-1], x], dim=3)

        segment = functional.pad(rows.segment, (0, extra), value=-1).unflatten(1, (chunks, window))
        before = functional.pad(segment, (0, 0, 1, 0), value=-2)[:, :-1]
        keys_segment = torch.cat([before, segment], dim=2)
        query = torch.arange(window, device=q.device)
        distance = query[:, None] + window - torch.arange(2 * window, device=q.device)
        mask = (distance >= 0) & (distance < window)
        mask = mask & (segment[..., :, None] == keys_segment[..., None, :])
        out = _softmax_attention(
            chunked(q),
            with_previous(chunked(k)),
            with_previous(chunked(v)),
            shear(chunked(rel), 2 * window, window),
            chunked(sink.unsqueeze(-1)).squeeze(-1),
            mask[:, :, None],
        )
        return out.transpose(2, 3).reshape(batch, chunks * window, *q.shape[2:])[:, :length]


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor, mask: Tensor
) -> Tensor:
    """Attention with a bias [..., H, Q, N] and one sink logit per query and head [..., H, Q].

    Args:
        q: [..., H, Q, d].
        k: [..., K, N, d].
        v: [..., K, N, d].
        bias: added to the scaled products.
        sink: one more logit, whose value is zero.
        mask: [..., 1, Q, N], false where a query does not see a key.
    """
    groups = q.shape[-3] // k.shape[-3]
    grouped = q.unflatten(-3, (k.shape[-3], groups))
    scores = (grouped @ k.unsqueeze(-3).transpose(-1, -2)).flatten(-4, -3) * q.shape[-1] ** -0.5
    scores = (scores + bias).masked_fill(~mask, float("-inf"))
    logits = torch.cat([scores, sink.unsqueeze(-1)], dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype)
    out = weights.unflatten(-3, (k.shape[-3], groups)) @ v.unsqueeze(-3)
    return out.flatten(-4, -3)


class Experts(nn.Module):
    """All experts' weights; gate and up rows alternate, as published."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        num, width, hidden = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.w13_weight = nn.Parameter(torch.randn(num, 2 * width, hidden) * hidden**-0.5)
        self.w2_weight = nn.Parameter(torch.randn(num, hidden, width) * width**-0.5)


class Gate(nn.Module):
    """The router; its bias is moved by the balance of loads, not by gradients."""

    bias: Tensor
    load: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        num, hidden = config.n_routed_experts, config.hidden_size
        self.weight = nn.Parameter(torch.randn(num, hidden) * hidden**-0.5)
        self.register_buffer("bias", torch.zeros(num))
        self.register_buffer("load", torch.zeros(num), persistent=False)


class SparseMoe(nn.Module):
    """Router and experts. Experts are few and small: every token runs through all of them."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config)
        self.experts = Experts(config)

    def forward(self, z: Tensor) -> Tensor:
        """[B, S, D] to the same."""
        config = self.config
        scores = functional.linear(z.float(), self.gate.weight.float()).sigmoid()
        chosen = (scores + self.gate.bias).topk(config.num_experts_per_tok, dim=-1).indices
        is_chosen = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.gate.load.copy_(is_chosen.detach().flatten(0, -2).sum(0))
        weight = scores * is_chosen
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * config.route_scale
        both = linear(z, self.experts.w13_weight.flatten(0, 1)).float()
        both = both.unflatten(-1, (config.n_routed_experts, -1, 2))
        gate, up = both[..., 0], both[..., 1]
        cap, up_cap = config.mlp_gate_softcap, config.mlp_up_softcap
        act = cap * torch.tanh(gate / cap) * gate.sigmoid() * (up_cap * torch.tanh(up / up_cap))
        # The down projection is linear: routing weights can come before it, in one matrix product.
        act = (act * weight.unsqueeze(-1)).to(z.dtype).flatten(-2)
        down = self.experts.w2_weight.transpose(0, 1).flatten(1)
        return linear(act, down)


class AttnRes(nn.Module):
    """Queries of the residual mixes; `attn_queries[i]` belongs to layer i + 1."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        hidden, layers = config.hidden_size, range(config.num_hidden_layers)
        self.attn_queries = nn.ParameterList(
            torch.zeros((3, hidden) if config.is_full(layer) else (hidden,)) for layer in layers[1:]
        )
        self.mlp_queries = nn.ParameterList(torch.zeros(hidden) for _ in layers)
        self.output_query = nn.Parameter(torch.zeros(hidden))


def residual_mix(sources: list[Tensor], query: Tensor) -> list[Tensor]:
    """Softmax mixtures of the RMS-normalised sources.

    Args:
        sources: each [B, S, D].
        query: [D] or [n, D].

    Returns:
        One float32 [B, S, D] per query.
    """
    normed = [unit_rms(source, MIX_EPS) for source in sources]
    queries = query.reshape(-1, query.shape[-1])
    logits = torch.stack([source @ queries.T for source in normed]) * query.shape[-1] ** -0.5
    weights = logits.softmax(0)
    mixed = []
    for index in range(queries.shape[0]):
        out = weights[0, ..., index, None] * normed[0]
        for number in range(1, len(normed)):
            out = out + weights[number, ..., index, None] * normed[number]
        mixed.append(out)
    return mixed


class Layer(nn.Module):
    """One decoder layer; its residual queries come from outside."""

    def __init__(self, config: NanoConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.starts_block = layer % config.n_layers_per_attn_res_block == 0
        self.is_full = config.is_full(layer)
        if self.is_full:
            self.q_input_norm = Norm(hidden, eps)
            self.k_input_norm = Norm(hidden, eps)
            self.v_input_norm = Norm(hidden, eps)
        else:
            self.attn_norm = Norm(hidden, eps)
        self.mlp_norm = Norm(hidden, eps)
        self.attn = Attention(config, is_full=self.is_full)
        self.attn_sconv = ShortConv(hidden, config.conv_kernel_size)
        self.mlp = SparseMoe(config)
        self.mlp_sconv = ShortConv(hidden, config.conv_kernel_size)

    def forward(
        self,
        h: Tensor,
        blocks: list[Tensor],
        attn_query: Tensor | None,
        mlp_query: Tensor,
        rows: Rows,
    ) -> tuple[Tensor, list[Tensor]]:
        """Partial sum [B, S, D] and finished blocks before the layer to those after it."""
        mixed = [h] if attn_query is None else residual_mix([*blocks, h], attn_query)
        if self.is_full:
            norms = [self.q_input_norm, self.k_input_norm, self.v_input_norm]
            mixed = mixed * 3 if attn_query is None else mixed
        else:
            norms = [self.attn_norm]
        inputs = [norm(source, h.dtype) for norm, source in zip(norms, mixed, strict=True)]
        o = self.attn_sconv(self.attn(inputs, rows), rows)
        if self.starts_block:
            blocks, y = [*blocks, h], o.float()
        else:
            y = h.float() + o.float()
        (mixture,) = residual_mix([*blocks, y], mlp_query)
        m = self.mlp_sconv(self.mlp(self.mlp_norm(mixture, h.dtype)), rows)
        return (y + m.float()).to(h.dtype), blocks


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward gives.

    Attributes:
        final: [B, S, D], the input of the vocabulary projection.
        taps: [B, S, D] per asked layer, its output.
    """

    final: Tensor
    taps: list[Tensor]


class Nano(nn.Module):
    """The text model."""

    def __init__(self, config: NanoConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        hidden = config.hidden_size
        self.embed = Weight(torch.randn(config.vocab_size, hidden) * 0.5)
        self.embed_norm = Norm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            Layer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.attn_res = AttnRes(config)
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.unembed = Weight(torch.randn(config.vocab_size, hidden) * 0.5 * hidden**-0.5)

    def forward(
        self, tokens: Tensor, rows: Rows | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        """Token ids [B, S]; `rows` is one document per sequence if not given."""
        if rows is None:
            rows = plain_rows(tokens)
        h = self.embed_norm(functional.embedding(tokens, self.embed.weight), self.dtype)
        blocks: list[Tensor] = []
        tapped = []
        for index, layer in enumerate(self.layers):
            attn_query = self.attn_res.attn_queries[index - 1] if index else None
            h, blocks = layer(h, blocks, attn_query, self.attn_res.mlp_queries[index], rows)
            if index in taps:
                tapped.append(h)
        (mixture,) = residual_mix([*blocks, h], self.attn_res.output_query)
        return Output(self.norm(mixture, self.dtype), tapped)

    def logits(self, final: Tensor) -> Tensor:
        """[..., D] to float32 [..., V]; the padding of the vocabulary is left out."""
        rows = self.unembed.weight[: self.config.unpadded_vocab_size]
        return softcap(linear(final, rows).float(), self.config.final_logit_softcapping)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move every router's bias by `rate` towards equal loads in the last forward."""
        for gate in self.gates():
            gate.bias.add_(rate * (gate.load.mean() - gate.load).sign())

    def gates(self) -> list[Gate]:
        """The router of every layer."""
        return [module for module in self.modules() if isinstance(module, Gate)]


def softcap(x: Tensor, cap: float) -> Tensor:
    """`x` squeezed smoothly into (-cap, cap)."""
    return cap * torch.tanh(x / cap)


def count_parameters(model: nn.Module) -> int:
    """Number of trained values."""
    return sum(parameter.numel() for parameter in model.parameters())


def _matrix(rows: int, columns: int) -> Weight:
    return Weight(torch.randn(rows, columns) * columns**-0.5)
