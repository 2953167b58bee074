"""Independent float64 oracles of the operators of Flint; the contract is that of `oracles.py`.

NVFP4 is decoded here a second time, bit field by bit field. Angles of the rotation are the model's
float32 numbers; everything after them is float64.
"""

import math

import numpy as np
import torch
from oracles import ORACLES, Oracle, Result
from torch import Tensor


def e2m1(code: np.ndarray) -> np.ndarray:
    """Sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = (code >> 1 & 3).astype(float), (code & 1).astype(float)
    size = np.where(exponent == 0, mantissa / 2, 2 ** (exponent - 1) * (1 + mantissa / 2))
    return np.where(code & 8, -size, size)


def e4m3(byte: np.ndarray) -> np.ndarray:
    """Four bits of exponent with bias 7, three of mantissa; no sign."""
    exponent, mantissa = (byte >> 3).astype(float), (byte & 7).astype(float)
    return np.where(exponent == 0, mantissa / 512, 2 ** (exponent - 7) * (1 + mantissa / 8))


def matrix(weight: Tensor, scales: Tensor | None, global_scale: Tensor | None) -> Tensor:
    """A weight of any form in float64, with its global scale."""
    if scales is None:
        return weight if global_scale is None else weight * global_scale.view(-1, 1, 1)
    codes, bytes_ = weight.numpy(), scales.numpy()
    if global_scale is None:  # MXFP8
        values = e4m3(codes & 0x7F) * np.where(codes & 0x80, -1, 1)
        return torch.from_numpy(values * 2.0 ** (np.repeat(bytes_, 32, axis=-1) - 127.0))
    values = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]))
    values[..., 0::2] = e2m1(codes % 16)
    values[..., 1::2] = e2m1(codes // 16)
    values *= np.repeat(e4m3(bytes_), 16, axis=-1)
    assert global_scale is not None
    stack = global_scale.numpy().reshape(-1, *[1] * (values.ndim - 1))
    return torch.from_numpy(values * (stack if values.ndim == 3 else stack[0]))


def linear_nvfp4(
    x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, partial: bool
) -> Result:
    return (x @ matrix(codes, scales, global_scale).T,), {}


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Result:
    total = x if delta is None else x + delta
    (normed,), _ = ORACLES["rms_norm"](total, weight, eps, dtype)
    return (total, normed), {}


def rope(x: Tensor, position: Tensor, theta: float) -> Result:
    out, (_, _, head_dim) = x.clone(), x.shape
    for t in range(len(x)):
        for i in range(head_dim // 2):
            # Exponent, power and reciprocal round to float32 each, as the model's table does.
            exponent = np.float32(2 * i) / np.float32(head_dim)
            frequency = np.float32(1) / np.float32(np.float32(theta) ** exponent)
            angle = float(np.float32(position.item() + t) * frequency)
            low, high = x[t, :, i], x[t, :, i + head_dim // 2]
            out[t, :, i] = low * math.cos(angle) - high * math.sin(angle)
            out[t, :, i + head_dim // 2] = high * math.cos(angle) + low * math.sin(angle)
    return (out,), {}


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    window: int,
    scale: float,
) -> Result:
    # Relative attention whose distances carry no bias.
    (num_rows, num_heads), no_bias = q.shape[:2], torch.zeros(1, 1, dtype=torch.float64)
    rel = torch.zeros(num_rows, num_heads, 1, dtype=torch.float64)
    return ORACLES["relative_attention"](
        q, k, v, rel, no_bias, sinks.expand(num_rows, -1), k_cache, v_cache, page_table, position,
        num_tokens, slot, window, scale,
    )  # fmt: skip


def silu(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(x / 2)) / 2


def silu_mul(gate_up: Tensor) -> Result:
    half = gate_up.shape[1] // 2
    return (silu(gate_up[:, :half]) * gate_up[:, half:],), {}


def router_top_k(logits: Tensor, top_k: int) -> Result:
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, top_k, dtype=torch.int64)
    weights = torch.empty(num_rows, top_k, dtype=torch.float64)
    for t, row in enumerate(logits.tolist()):
        chosen = sorted(range(num_experts), key=lambda e: (-row[e], e))[:top_k]
        scores = [1 / (1 + math.exp(-row[e])) for e in chosen]
        ids[t] = torch.tensor(chosen)
        weights[t] = torch.tensor(scores, dtype=torch.float64) / (sum(scores) + 1e-20)
    return (weights, ids), {}


def swiglu_experts(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    rank: Tensor | None,
    partial: bool,
) -> Result:
    both = matrix(gate_up, gate_up_scales, gate_up_global_scale)
    back = matrix(down, down_scales, down_global_scale)
    num_own, num_hidden = len(back), both.shape[1] // 2
    first = 0 if rank is None else int(rank) * num_own
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(routing_weights[t], (expert_ids[t] - first).tolist(), strict=True):
            if 0 <= e < num_own:
                gate, up = both[e, :num_hidden] @ x[t], both[e, num_hidden:] @ x[t]
                out[t] += w * (back[e] @ (silu(gate) * up))
    return (out,), {}


def dense_mlp(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    eps: float,
    partial: bool,
) -> Result:
    (residual, z), _ = add_rms_norm(x, delta, norm_weight, eps, x.dtype)
    (hidden,), _ = silu_mul(z @ matrix(gate_up, gate_up_scales, gate_up_global_scale).T)
    return (residual, hidden @ matrix(down, down_scales, down_global_scale).T), {}


def norm_router_shared(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    router: Tensor,
    shared_gate_up: Tensor,
    shared_gate_up_scales: Tensor | None,
    shared_gate_up_global_scale: Tensor | None,
    eps: float,
) -> Result:
    (residual, z), _ = add_rms_norm(x, delta, norm_weight, eps, x.dtype)
    weight = matrix(shared_gate_up, shared_gate_up_scales, shared_gate_up_global_scale)
    (shared,), _ = silu_mul(z @ weight.T)
    return (residual, z, z @ router.T, shared), {}


def flint_moe(
    x: Tensor,
    logits: Tensor,
    shared: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    shared_down: Tensor,
    shared_down_scales: Tensor | None,
    shared_down_global_scale: Tensor | None,
    rank: Tensor | None,
    top_k: int,
    partial: bool,
) -> Result:
    (weights, ids), _ = router_top_k(logits, top_k)
    (routed,), _ = swiglu_experts(
        x, weights, ids, gate_up, gate_up_scales, gate_up_global_scale,
        down, down_scales, down_global_scale, rank, partial,
    )  # fmt: skip
    back = matrix(shared_down, shared_down_scales, shared_down_global_scale)
    return (routed + shared @ back.T,), {}


def norm_qkv_rope(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    qkv: Tensor,
    qkv_scales: Tensor | None,
    qkv_global_scale: Tensor | None,
    q_norm: Tensor,
    k_norm: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    eps: float,
    rope_theta: float,
) -> Result:
    (residual, z), _ = add_rms_norm(x, delta, norm_weight, eps, x.dtype)
    rows = z @ matrix(qkv, qkv_scales, qkv_global_scale).T
    num_kv, head_dim = k_cache.shape[2:]
    num_q = rows.shape[1] // head_dim - 2 * num_kv
    heads = rows.view(len(x), num_q + 2 * num_kv, head_dim)

    def finish(part: Tensor, weight: Tensor) -> Tensor:
        (normed,), _ = ORACLES["rms_norm"](part, weight, eps, x.dtype)
        if rope_theta:
            (normed,), _ = rope(normed, position, rope_theta)
        return normed

    q = finish(heads[:, :num_q], q_norm)
    k = finish(heads[:, num_q : num_q + num_kv], k_norm)
    v = heads[:, num_q + num_kv :]
    _, caches = ORACLES["kv_write"](k, v, k_cache, v_cache, page_table, position, num_tokens, slot)
    return (residual, q, k, v), caches


def flint_layers(
    x: Tensor,
    delta: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    windows: list[int],
    rope_thetas: list[float],
    eps: float,
    scale: float,
    top_k: int,
    **lists: list[Tensor],
) -> Result:
    caches: dict[str, list[Tensor]] = {"k_cache": [], "v_cache": []}
    for index, (window, theta) in enumerate(zip(windows, rope_thetas, strict=True)):
        layer = {name: values[index] for name, values in lists.items()}

        def parts(name: str, of: dict[str, Tensor] = layer) -> list[Tensor]:
            return [of[name], of[f"{name}_scales"], of[f"{name}_global_scale"]]

        old = (layer["k_cache"], layer["v_cache"])
        where = (*old, page_table if window == 0 else None, position, num_tokens, slot)
        (x, q, k, v), written = norm_qkv_rope(
            x, delta, layer["input_norm"], *parts("qkv"), layer["q_norm"], layer["k_norm"],
            *where, eps, theta,
        )  # fmt: skip
        for name, cache in written.items():
            caches[name].append(cache)
        (heads,), _ = sink_attention(q, k, v, layer["sinks"], *where, window, scale)
        delta = heads.flatten(1) @ matrix(*parts("o")).T
        (x, z, logits, shared), _ = norm_router_shared(
            x, delta, layer["mlp_norm"], layer["router"], *parts("shared_gate_up"), eps
        )
        (delta,), _ = flint_moe(
            z, logits, shared, *parts("gate_up"), *parts("down"), *parts("shared_down"),
            None, top_k, False,
        )  # fmt: skip
    return (x, delta), caches


ORACLES_FLINT: dict[str, Oracle] = {
    function.__name__: function
    for function in (
        linear_nvfp4,
        add_rms_norm,
        rope,
        sink_attention,
        silu_mul,
        router_top_k,
        swiglu_experts,
        dense_mlp,
        norm_router_shared,
        flint_moe,
        norm_qkv_rope,
        flint_layers,
    )
}
