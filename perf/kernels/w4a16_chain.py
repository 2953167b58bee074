"""The decode step's chain of w4a16 kernels over layers with weights of their own, for checks.

Weights are random codes made on the GPU. Attention is a stand-in (attention_standin.cu).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from w4a16_backend import Buffer, bind, empty
from w4a16_gpu import Gpu

from inkrt.plugins.tactic import Int32, KernelLaunch, Output, Pointer, Tactic
from inkrt.plugins.w4a16 import tactics
from inkrt.plugins.w4a16.shapes import Dims

RING = 1024
EPS, THETA = 1e-6, 10000.0
Launches = list[Callable[[], None]]


@dataclass(slots=True)
class Model:
    """Weights and buffers on the GPU.

    Attributes:
        gpu: where.
        dims: sizes.
        num_layers: MoE layers with weights of their own.
        layers: arguments of each layer by name.
        shared: arguments of all layers.
    """

    gpu: Gpu
    dims: Dims
    num_layers: int
    layers: list[dict[str, Buffer]] = field(default_factory=list)
    shared: dict[str, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        d, tokens = self.dims, 8
        for _ in range(self.num_layers):
            self.layers.append({
                "qkv": self._chunks((d.heads + 2 * d.kv_heads) * 128, d.hidden),
                "o": self._chunks(d.hidden, d.heads * 128),
                "shared_gate_up_codes": self._chunks(2 * d.shared_width, d.hidden),
                "shared_down_codes": self._chunks(d.hidden, d.shared_width),
                "gate_up_codes": self._chunks(d.experts * 2 * d.width, d.hidden),
                "down_codes": self._chunks(d.experts * d.hidden, d.width),
                "router_weight": self._bf16(d.experts, d.hidden, scale=0.04),
                "norm_weight": self._bf16(d.hidden, mean=1.0, scale=0.2),
                "k_cache": self._bf16(RING * d.kv_heads * 128),
                "v_cache": self._bf16(RING * d.kv_heads * 128),
            })  # fmt: skip
        unit = 1 / 3.2
        scale = {
            "qkv_scale": d.hidden, "shared_gate_up_scale": d.hidden, "o_scale": d.heads * 128,
            "shared_down_scale": d.shared_width, "head_scale": d.hidden,
        }  # fmt: skip
        for name, width in scale.items():
            self.shared[name] = self._floats([unit * width**-0.5])
        for name, width in (("gate_up_scale", d.hidden), ("down_scale", d.width)):
            self.shared[name] = self._floats([unit * width**-0.5] * d.experts)
        for name in ("q_norm", "k_norm"):
            self.shared[name] = self._bf16(128, mean=1.0, scale=0.2)
        for name in ("residual_a", "residual_b", "delta_a", "delta_b"):
            self.shared[name] = self._bf16(tokens, d.hidden)
        for name in ("q", "attention"):
            self.shared[name] = self._bf16(tokens, d.heads * 128)
        for name, value in (("slot", 0), ("position", 1000), ("num_tokens", tokens)):
            self.shared[name] = self.gpu.upload(np.array([value], np.int32))
        self.shared["head"] = self._chunks(d.vocab, d.hidden)
        self.shared["tokens"] = empty(self.gpu, 4 * tokens)
        self.shared["logits"] = empty(self.gpu, 4 * tokens * d.vocab)

    def _chunks(self, rows: int, width: int) -> Buffer:
        size = -(-rows // 16) * self.dims.tile_bytes(width)
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.gpu.device)
        if self.dims.bf16:  # bits of values in +-[2^-7, 1)
            data.view(-1, 2)[:, 1] = (data.view(-1, 2)[:, 1] & 0x83) | 0x3C
        else:  # scales in [0.5, 2)
            scales = data.view(-1, 2304)[:, 2048:]
            scales.bitwise_and_(0x0F).add_(0xA8)
        return self.gpu.buffer(data)

    def _bf16(self, *shape: int, mean: float = 0.0, scale: float = 1.0) -> Buffer:
        return self.gpu.buffer(
            (mean + scale * torch.randn(*shape, device=self.gpu.device)).bfloat16()
        )

    def _floats(self, values: list[float]) -> Buffer:
        return self.gpu.upload(np.array(values, np.float32))


@dataclass(slots=True)
class Chain:
    """Launches of decode steps over a model.

    Attributes:
        model: weights.
        tokens: T.
    """

    model: Model
    tokens: int
    scratch: dict[str, Buffer] = field(default_factory=dict)

    def _launches(
        self, tactic: Tactic, arguments: dict[str, Buffer], outputs: list[Buffer]
    ) -> Launches:
        bound = bind(self.model.gpu, tactic, arguments, outputs, self.scratch)
        return [self.model.gpu.prepare(b.kernel, b.values) for b in bound]

    def qkv(self, layer: int) -> Launches:
        """Reads residual_a and delta_b, writes residual_b."""
        s, own = self.model.shared, self.model.layers[layer]
        arguments = {
            **own, "x": s["residual_a"], "delta": s["delta_b"], "codes": own["qkv"],
            "global_scale": s["qkv_scale"], "q_norm": s["q_norm"], "k_norm": s["k_norm"],
            "where": s["slot"], "position": s["position"], "num_tokens": s["num_tokens"],
        }  # fmt: skip
        tactic = tactics.qkv(
            self.model.dims, self.tokens, eps=EPS, rope_theta=THETA, ring_rows=RING
        )
        return self._launches(tactic, arguments, [s["q"], s["residual_b"]])

    def standin(self, layer: int) -> Launches:
        """Reads q, writes attention."""
        s, own = self.model.shared, self.model.layers[layer]
        return self._launches(
            standin_tactic(self.model.dims, self.tokens), {**own, "q": s["q"]}, [s["attention"]]
        )

    def o(self, layer: int) -> Launches:
        """Reads attention, writes delta_a."""
        d, s, own = self.model.dims, self.model.shared, self.model.layers[layer]
        tactic = tactics.linear(d, self.tokens, rows=d.hidden, width=d.heads * 128)
        arguments = {"x": s["attention"], "codes": own["o"], "global_scale": s["o_scale"]}
        return self._launches(tactic, arguments, [s["delta_a"]])

    def moe(self, layer: int) -> Launches:
        """Reads residual_b and delta_a, writes residual_a and delta_b."""
        s, own = self.model.shared, self.model.layers[layer]
        tactic = tactics.moe(self.model.dims, self.tokens, eps=EPS)
        arguments = {**s, **own, "x": s["residual_b"], "delta": s["delta_a"]}
        return self._launches(tactic, arguments, [s["delta_b"], s["residual_a"]])

    def head(self, *, logits: bool = False) -> Launches:
        """Reads residual_a and delta_b, writes tokens (and logits)."""
        s = self.model.shared
        tactic = tactics.lm_head(self.model.dims, self.tokens, eps=EPS, logits=logits, greedy=True)
        arguments = {
            "x": s["residual_a"], "delta": s["delta_b"], "codes": s["head"],
            "global_scale": s["head_scale"], "norm_weight": self.model.layers[0]["norm_weight"],
        }  # fmt: skip
        return self._launches(tactic, arguments, [s["tokens"], s["logits"]])

    def layer(self, layer: int) -> Launches:
        """The six kernels of a layer."""
        return [*self.qkv(layer), *self.standin(layer), *self.o(layer), *self.moe(layer)]

    def step(self, layers: int, *, logits: bool = False) -> Launches:
        """Layers and head."""
        launches = [launch for layer in range(layers) for launch in self.layer(layer)]
        return [*launches, *self.head(logits=logits)]


def standin_tactic(dims: Dims, tokens: int) -> Tactic:
    """The kernel in the place of attention."""
    kernel = KernelLaunch(
        source=Path(__file__).parent / "attention_standin.cu",
        entry="standin",
        defines=(("HEADS", dims.heads),),
        grid=(32, 1, 1),
        block=(dims.heads * 4, 1, 1),
        params=(Pointer("k_cache"), Pointer("v_cache"), Pointer("q"), Output(0), Int32(tokens)),
    )
    return Tactic("standin", (kernel,), 2**20, 0)


def chain_tactics(dims: Dims) -> list[Tactic]:
    """What a chain launches."""
    return [
        tactic
        for tokens in (1, 2)
        for tactic in (
            tactics.qkv(dims, tokens, eps=EPS, rope_theta=THETA, ring_rows=RING),
            standin_tactic(dims, tokens),
            tactics.linear(dims, tokens, rows=dims.hidden, width=dims.heads * 128),
            tactics.moe(dims, tokens, eps=EPS),
            tactics.lm_head(dims, tokens, eps=EPS, logits=True, greedy=True),
        )
    ]
