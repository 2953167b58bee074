"""Independent float64 oracles of the plugins, written from the equations one token at a time.

An oracle takes the reference's keyword arguments, floating ones as float64 torch tensors, and
returns (tuple of outputs, dict of mutated arguments by name). Where an output may be anything
finite, as in a padding row, it returns NaN; there the tests check finiteness only. Integer outputs
must be equal.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Oracle = Callable[..., tuple[tuple[Tensor, ...], dict[str, Tensor]]]
Result = tuple[tuple[Tensor, ...], dict[str, Tensor]]


def embedding(tokens: Tensor, table: Tensor) -> Result:
    return (torch.stack([table[token] for token in tokens.tolist()]),), {}


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Result:
    mean_square = torch.einsum("...d,...d->...", x, x) / x.shape[-1]
    out = x / torch.sqrt(mean_square + eps)[..., None]
    return (out if weight is None else out * weight,), {}


def residual_add(residual: Tensor | None, update: Tensor, dtype: torch.dtype) -> Result:
    return (update if residual is None else residual + update,), {}


def residual_mix(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Result:
    (num_tokens, width), num_queries = sources[0].shape, len(queries)
    out = torch.zeros(num_queries, num_tokens, width, dtype=torch.float64)
    for t in range(num_tokens):
        states = [s[t] / torch.sqrt(s[t].dot(s[t]) / width + eps) for s in sources]
        for i in range(num_queries):
            weights = [math.exp(queries[i].dot(s).item() / math.sqrt(width)) for s in states]
            for weight, state in zip(weights, states, strict=True):
                out[i, t] += weight / sum(weights) * state
    return (out,), {}


def linear(x: Tensor, weight: Tensor, partial: bool) -> Result:
    return (torch.einsum("tk,nk->tn", x, weight),), {}


def l2_clip(x: Tensor, scale: Tensor | None, threshold: float) -> Result:
    out = (x if scale is None else x * scale).clone()
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            norm = math.sqrt(out[t, h].dot(out[t, h]).item()) + 1e-6
            if norm > threshold:
                out[t, h] *= threshold / norm
    return (out,), {}


def log_scale(x: Tensor, position: Tensor, n_floor: int, alpha: float) -> Result:
    out = x.clone()
    for i in range(len(x)):
        num_seen = position.item() + i + 1
        if num_seen > n_floor:
            out[i] *= 1 + alpha * math.log(num_seen / n_floor)
    return (out,), {}


def sigmoid_gate(x: Tensor, gate: Tensor) -> Result:
    # The form with tanh does not overflow.
    return (x * (1 + torch.tanh(gate / 2)) / 2,), {}


def last_row(x: Tensor, num_tokens: Tensor) -> Result:
    return (x[num_tokens.item() - 1][None],), {}


def _with_step_rows(state: Tensor, slot: int, x: Tensor, position: int, count: int) -> Tensor:
    """The ring after the step, one position after the other."""
    out = state.clone()
    for i in range(count):
        out[slot, (position + i) % state.shape[1]] = x[i]
    return out


def _input_at(p: int, state: Tensor, slot: int, x: Tensor, position: int) -> Tensor:
    """Input of a convolution at an absolute position: the past from the state, the step from x."""
    if p < 0:
        return torch.zeros_like(x[0])
    return x[p - position] if p >= position else state[slot, p % state.shape[1]]


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    is_scaled: bool = True,
) -> Result:
    first, count, entry = position.item(), num_tokens.item(), slot.item()
    taps = weight.shape[1]
    out = torch.full_like(x, math.nan)
    for i in range(count):
        out[i] = x[i]
        for lag in range(taps):
            past = _input_at(first + i - lag, state, entry, x, first)
            out[i] += weight[:, taps - 1 - lag] * past
        if is_scaled:
            out[i] /= math.sqrt(taps + 1)
    return (out,), {"state": _with_step_rows(state, entry, x, first, count)}


def dynamic_short_conv(
    x: Tensor,
    static_weight: Tensor,
    dynamic_weight: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
) -> Result:
    first, count, entry = position.item(), num_tokens.item(), slot.item()
    taps, channels = static_weight.shape
    head_dim = channels * taps // dynamic_weight.shape[1]
    out = torch.full_like(x, math.nan)
    for i in range(count):
        for c in range(channels):
            total = x[i, c].item()
            for lag in range(taps):
                past = _input_at(first + i - lag, state, entry, x, first)[c].item()
                dynamic = dynamic_weight[i, (c // head_dim) * taps + lag].item()
                total += (static_weight[lag, c].item() + dynamic) * past
            out[i, c] = total / math.sqrt(2 * taps + 1)
    return (out,), {"state": _with_step_rows(state, entry, x, first, count)}


def _cache_index(cache: Tensor, p: int, page_table: Tensor | None, slot: Tensor) -> tuple[int, int]:
    entry = slot.item() if page_table is None else page_table[p // cache.shape[1]].item()
    return int(entry), p % cache.shape[1]


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
) -> Result:
    k_out, v_out = k_cache.clone(), v_cache.clone()
    for i in range(num_tokens.item()):
        where = _cache_index(k_cache, position.item() + i, page_table, slot)
        k_out[where], v_out[where] = k[i], v[i]
    return (), {"k_cache": k_out, "v_cache": v_out}


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    bank: Tensor,
    sinks: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    window: int,
    scale: float,
    first_key: int = 0,
    gate: Tensor | None = None,
) -> Result:
    first, num_heads = position.item(), q.shape[1]
    group = num_heads // k.shape[1]
    out = torch.zeros_like(q)
    for i in range(num_tokens.item()):
        here = first + i
        seen = [p for p in range(first_key, here + 1) if window == 0 or here - p < window]
        for h in range(num_heads if seen else 0):
            keys, values = [], []
            for p in seen:
                if p >= first:
                    keys.append(k[p - first, h // group])
                    values.append(v[p - first, h // group])
                else:
                    where = _cache_index(k_cache, p, page_table, slot)
                    keys.append(k_cache[where][h // group])
                    values.append(v_cache[where][h // group])
            scores = torch.stack(keys) @ q[i, h] * scale
            for n, p in enumerate(seen):
                if here - p < bank.shape[1]:
                    scores[n] += rel[i, h].dot(bank[:, here - p])
            largest = scores.max() if sinks is None else max(scores.max(), sinks[i, h])
            weights = torch.exp(scores - largest)
            total = weights.sum() + (0 if sinks is None else torch.exp(sinks[i, h] - largest))
            out[i, h] = weights / total @ torch.stack(values)
    if gate is not None:
        out = out / (1 + torch.exp(-gate.view_as(out)))
    out[num_tokens.item() :] = 0
    return (out,), {}


ORACLES: dict[str, Oracle] = {
    function.__name__: function
    for function in (
        embedding,
        rms_norm,
        residual_add,
        residual_mix,
        linear,
        l2_clip,
        log_scale,
        sigmoid_gate,
        last_row,
        short_conv,
        dynamic_short_conv,
        kv_write,
        relative_attention,
    )
}


def to_float64(value: Any) -> Any:
    """The argument with floating tensors, also in lists, as float64 copies."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, list | tuple):
        return [to_float64(item) for item in value]
    return value
