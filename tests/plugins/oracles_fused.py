"""Independent float64 oracles of routing, experts, collectives, sampling and the fused operators.

The contract is that of `oracles.py`, whose oracles the fused ones are made of. Nothing here calls a
reference: Philox and the sampling filters are written a second time, in numpy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from oracles import ORACLES, Oracle, Result
from oracles_flint import matrix
from torch import Tensor


def router(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float) -> Result:
    scores = 1 / (1 + np.exp(-(x.numpy() @ weight.numpy().T)))
    ids = np.array([chosen(row, top_k) for row in scores + bias.numpy()])
    weights = np.take_along_axis(scores, ids, axis=1)
    weights = weights / weights.sum(axis=1, keepdims=True) * scale
    return (torch.from_numpy(weights), torch.from_numpy(ids)), {}


def chosen(row: np.ndarray, top_k: int) -> list[int]:
    """Ids of the largest scores; of those that tie for the last places the lowest."""
    # A stable sort takes the lowest ids of equal scores.
    wanted = np.argsort(-row, kind="stable")[:top_k]
    # The order of the chosen is torch's own; only where it is ambiguous does `wanted` decide.
    order = torch.topk(torch.from_numpy(row), top_k, sorted=False).indices.tolist()
    border = row[wanted[-1]]
    spare = iter(sorted(e for e in wanted if row[e] == border))
    is_tied = np.count_nonzero(row == border) > np.count_nonzero(row[wanted] == border)
    ids = [next(spare) if is_tied and row[e] == border else e for e in order]
    assert set(ids) == set(wanted)
    return ids


def experts(
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
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Result:
    gate_up = matrix(gate_up, gate_up_scales, gate_up_global_scale)
    down = matrix(down, down_scales, down_global_scale)
    num_own, _, num_hidden = down.shape
    first = 0 if rank is None else int(rank) * num_own
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for w, e in zip(routing_weights[t], (expert_ids[t] - first).tolist(), strict=True):
            if not 0 <= e < num_own:
                continue
            gate = gate_up[e, :num_hidden] @ x[t]
            up = gate_up[e, num_hidden:] @ x[t]
            capped = gate_softcap * torch.tanh(gate / gate_softcap) / (1 + torch.exp(-gate))
            out[t] += w * (down[e] @ (capped * up_softcap * torch.tanh(up / up_softcap)))
    return (out,), {}


def moe(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_global_scale: Tensor | None,
    rank: Tensor | None,
    top_k: int,
    route_scale: float,
    gate_softcap: float,
    up_softcap: float,
    partial: bool,
) -> Result:
    (weights, ids), _ = router(x, router_weight, router_bias, top_k, route_scale)
    return experts(
        x, weights, ids, gate_up, gate_up_scales, gate_up_global_scale, down, down_scales,
        down_global_scale, rank, gate_softcap, up_softcap, partial,
    )  # fmt: skip


def all_reduce(x: Tensor, dtype: torch.dtype, tp_size: int) -> Result:
    assert tp_size == 1
    return (x,), {}


def all_gather(x: Tensor, tp_size: int) -> Result:
    assert tp_size == 1
    return (x,), {}


def softcap(x: Tensor, cap: float) -> Result:
    return (torch.from_numpy(cap * np.tanh(x.numpy() / cap)),), {}


def philox(counter: Sequence[int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 of one counter, in Python's unbounded integers."""
    c, (k0, k1) = list(counter), key
    for i in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        round_k0 = (k0 + i * 0x9E3779B9) % 2**32
        round_k1 = (k1 + i * 0xBB67AE85) % 2**32
        c = [
            right // 2**32 ^ c[1] ^ round_k0,
            right % 2**32,
            left // 2**32 ^ c[3] ^ round_k1,
            left % 2**32,
        ]
    return c


def gumbel_row(
    seed: int, position: int, vocab_size: int, purpose: int = 0, anchor: int = 0
) -> np.ndarray:
    """Float64 noise of each token id; purpose 0 is sampling."""
    key = (seed % 2**32, seed // 2**32)
    words: list[int] = []
    for block in range(-(-vocab_size // 4)):
        words += philox((block, position, purpose, anchor), key)
    u = (np.array(words[:vocab_size], dtype=np.float64) + 0.5) / 2**32
    return -np.log(-np.log(u))


def keep_set(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Token ids that temperature, min-p, top-k and top-p leave, by sorting probabilities."""

    def softmax(ids: np.ndarray) -> np.ndarray:
        weights = np.exp((logits[ids] - logits.max()) / temperature)
        return weights / weights.sum()

    ids = np.arange(len(logits))
    probabilities = softmax(ids)
    ids = ids[probabilities >= min_p * probabilities.max()]
    if 0 < top_k < len(ids):
        ids = ids[logits[ids] >= np.sort(logits[ids])[-top_k]]
    if top_p < 1:
        descending = ids[np.argsort(-logits[ids], kind="stable")]
        total, last = 0.0, 0
        for last, probability in enumerate(softmax(descending)):  # noqa: B007
            total += probability
            if total >= top_p:
                break
        ids = ids[logits[ids] >= logits[descending[last]]]
    return ids


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    last_row: bool,
) -> Result:
    num_rows, vocab_size = logits.shape
    tokens = []
    for r in range(num_rows):
        drawn_at = position.item() + (num_tokens.item() if last_row else 1 + r)
        row, t = logits[r].numpy(), temperature.item()
        if t == 0:
            tokens.append(min(np.flatnonzero(row == row.max())))
            continue
        ids = keep_set(row, t, top_k.item(), top_p.item(), min_p.item())
        scores = row[ids] / t + gumbel_row(seed.item(), drawn_at, vocab_size)[ids]
        tokens.append(ids[scores.argmax()])
    return (torch.tensor(tokens),), {}


def linear_group(
    xs: Sequence[Tensor], weights: Sequence[Tensor], input_of: Sequence[int]
) -> Result:
    return tuple(xs[index] @ weights[i].T for i, index in enumerate(input_of)), {}


def linear_mxfp8(x: Tensor, codes: Tensor, exponents: Tensor, partial: bool) -> Result:
    return (x @ matrix(codes, exponents, None).T,), {}


def linear_group_quantized(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    input_of: Sequence[int],
) -> Result:
    global_scales = global_scales or [None] * len(codes)
    parts = zip(codes, scales, global_scales, strict=True)
    matrices = [*weights, *(matrix(*part) for part in parts)]
    return tuple(xs[index] @ w.T for index, w in zip(input_of, matrices, strict=True)), {}


def lm_head_sample(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    vocab_size: int,
    cap: float,
    logits_dtype: torch.dtype,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    last_row: bool,
    tp_size: int,
) -> Result:
    assert tp_size == 1
    logits = x @ matrix(weight, scales, global_scale)[:vocab_size].T
    if cap > 0:
        ((logits,), _) = softcap(logits, cap)
    ((tokens,), _) = sample(
        logits, temperature, top_k, top_p, min_p, seed, position, num_tokens, last_row
    )
    return (tokens, logits), {}


def qkv_post(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    q_scale: Tensor,
    rel_scale: Tensor,
    k_conv_weight: Tensor,
    v_conv_weight: Tensor,
    k_dynamic: Tensor | None,
    v_dynamic: Tensor | None,
    k_conv_state: Tensor,
    v_conv_state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    qk_threshold: float,
    rel_threshold: float,
    log_n_floor: int,
    log_alpha: float,
    eps: float,
) -> Result:
    step = (position, num_tokens, slot)
    num_rows, (num_kv, head_size) = len(q), k_cache.shape[-2:]

    def heads(x: Tensor, scale: Tensor, threshold: float) -> Tensor:
        ((out,), _) = ORACLES["l2_clip"](x.view(num_rows, *scale.shape), scale, threshold)
        if log_n_floor > 0:
            ((out,), _) = ORACLES["log_scale"](out, position, log_n_floor, log_alpha)
        return out

    def conv(
        x: Tensor, weight: Tensor, dynamic: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        if dynamic is None:
            (out,), mutated = ORACLES["short_conv"](x, weight, state, *step)
        else:
            (out,), mutated = ORACLES["dynamic_short_conv"](x, weight, dynamic, state, *step)
        return out.view(num_rows, num_kv, head_size), mutated["state"]

    k_conv, k_state = conv(k, k_conv_weight, k_dynamic, k_conv_state)
    v_conv, v_state = conv(v, v_conv_weight, v_dynamic, v_conv_state)
    ((k_out,), _) = ORACLES["l2_clip"](k_conv, None, qk_threshold)
    ((v_out,), _) = ORACLES["rms_norm"](v_conv, None, eps, torch.float64)
    _, caches = ORACLES["kv_write"](k_out, v_out, k_cache, v_cache, page_table, *step)
    outputs = (
        heads(q, q_scale, qk_threshold),
        k_out,
        v_out,
        heads(rel, rel_scale, rel_threshold),
    )
    return outputs, {"k_conv_state": k_state, "v_conv_state": v_state, **caches}


def allreduce_conv_mix(
    partial: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    residual: Tensor | None,
    sources: Sequence[Tensor],
    queries: Tensor,
    norm_weights: Sequence[Tensor],
    mix_eps: float,
    norm_eps: float,
    residual_dtype: torch.dtype,
    dtype: torch.dtype,
    tp_size: int,
) -> Result:
    assert tp_size == 1
    (update,), mutated = ORACLES["short_conv"](
        partial, conv_weight, conv_state, position, num_tokens, slot
    )
    total = update if residual is None else residual + update
    ((mixed,), _) = ORACLES["residual_mix"]([*sources, total], queries, mix_eps)
    if not norm_weights:
        return (total, mixed), {"conv_state": mutated["state"]}
    normed = []
    for row, weight in zip(mixed, norm_weights, strict=True):
        mean_square = (row**2).sum(dim=-1, keepdim=True) / row.shape[-1]
        normed.append(row * weight / torch.sqrt(mean_square + norm_eps))
    return (total, torch.stack(normed)), {"conv_state": mutated["state"]}


def gated_input(
    mixed: Tensor,
    former: Sequence[Tensor],
    message_queries: Tensor,
    down: Tensor,
    forget: Tensor,
    gain: Tensor,
    norm_weights: Sequence[Tensor],
    first: int,
    mix_eps: float,
    gate_eps: float,
    norm_eps: float,
) -> Result:
    def normed(x: Tensor, eps: float) -> Tensor:
        return x / torch.sqrt(x.dot(x) / len(x) + eps)

    out = torch.empty(len(down), *mixed.shape[1:], dtype=torch.float64)
    for i, t in np.ndindex(*out.shape[:2]):
        states = torch.stack([normed(source[t], mix_eps) for source in former])
        shares = torch.exp(states @ message_queries[first + i] / len(states[0]) ** 0.5)
        message = shares @ states / shares.sum()
        u = mixed[min(i, len(mixed) - 1), t]
        r = down[i] @ torch.cat([normed(u, gate_eps), normed(message, gate_eps)])
        gated = u - torch.tanh(forget[i] @ r) * u + torch.tanh(gain[i] @ r) * message
        weight = norm_weights[min(i, len(norm_weights) - 1)]
        out[i, t] = normed(gated, norm_eps) * weight
    return (out,), {}


def linear_conv_mix(x: Tensor, weight: Tensor, tp_size: int, **of_mix: Any) -> Result:
    (partial,), _ = ORACLES["linear"](x, weight, partial=False)
    return allreduce_conv_mix(partial, tp_size=tp_size, **of_mix)


def moe_conv_mix(**arguments: Any) -> Result:
    of_moe = {name: arguments.pop(name) for name in _MOE}
    (partial,), _ = moe(**of_moe, partial=False)
    return allreduce_conv_mix(partial, **arguments)


_MOE = (
    "x", "router_weight", "router_bias", "gate_up", "gate_up_scales", "gate_up_global_scale",
    "down", "down_scales", "down_global_scale", "rank", "top_k", "route_scale", "gate_softcap",
    "up_softcap",
)  # fmt: skip
ORACLES_FUSED: dict[str, Oracle] = {
    function.__name__: function
    for function in (
        router,
        experts,
        moe,
        all_reduce,
        all_gather,
        softcap,
        sample,
        linear_group,
        linear_mxfp8,
        linear_group_quantized,
        lm_head_sample,
        qkv_post,
        allreduce_conv_mix,
        gated_input,
        linear_conv_mix,
        moe_conv_mix,
    )
}
