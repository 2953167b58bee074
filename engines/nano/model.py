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

from inkrt.engines.nano.attention import Attention
from inkrt.engines.nano.parts import (
    NanoConfig,
    Norm,
    Rows,
    ShortConv,
    Weight,
    linear,
    plain_rows,
    softcap,
    unit_rms,
)

MIX_EPS = 1e-6  # of the norms inside the residual mix, whatever rms_norm_eps is


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
        both = torch.unflatten(both, -1, (config.n_routed_experts, -1, 2))
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


def count_parameters(model: nn.Module) -> int:
    """Number of trained values."""
    return sum(parameter.numel() for parameter in model.parameters())
