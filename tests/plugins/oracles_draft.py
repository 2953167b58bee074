"""Independent float64 oracles of the drafter's operators; the contract is that of `oracles.py`."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from oracles import Oracle, Result
from oracles_fused import chosen, gumbel_row, keep_set
from torch import Tensor


def concat(parts: Sequence[Tensor], dim: int) -> Result:
    arrays = [part.numpy() for part in parts]
    return (torch.from_numpy(np.concatenate(arrays, axis=dim)),), {}


def sum_parts(parts: Sequence[Tensor], dtype: torch.dtype) -> Result:
    return (torch.from_numpy(np.sum([part.numpy() for part in parts], axis=0)),), {}


def draft_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    position: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> Result:
    first, page_tokens = int(position), k_cache.shape[1]
    out = torch.zeros_like(q)
    for j in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            keys, values = [], []
            for p in range(first):
                if window and p < first + j - (window - 1):
                    continue
                page, row = int(page_table[p // page_tokens]), p % page_tokens
                keys.append(k_cache[page, row, kv])
                values.append(v_cache[page, row, kv])
            for i in range(q.shape[0]):
                if i <= j or not is_causal:
                    keys.append(k[i, kv])
                    values.append(v[i, kv])
            scores = [scale * q[j, h].dot(key).item() for key in keys]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + (math.exp(sinks[h].item() - top) if sinks is not None else 0.0)
            for weight, value in zip(weights, values, strict=True):
                out[j, h] += weight / total * value
    return (out,), {}


def draft_head(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    mix_proj: Tensor | None,
    mix_bias: Tensor | None,
    confidence_proj: Tensor | None,
    confidence_bias: Tensor | None,
    d2t: Tensor | None,
    is_coupled: Tensor,
    wants_logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    head: str,
    vocab_size: int,
    draft_vocab_size: int,
    base_is_drafted: bool,
    softcap: float,
    softcap_place: str,
    logits_divisor: float,
    tp_size: int,
) -> Result:
    assert (int(wants_logits), tp_size) == (1, 1)
    rank, first = markov_w1.shape[1], int(position)
    target_of = [i + (0 if d2t is None else int(d2t[i])) for i in range(draft_vocab_size)]
    logits = torch.full((len(hidden), vocab_size), -math.inf, dtype=torch.float64)
    tokens, confidences = [], []
    state, previous = np.zeros(rank), int(anchor)
    for k in range(len(hidden)):
        h, e = hidden[k].numpy(), markov_w1[previous].numpy()
        z = e
        if head == "gated":
            z = _sigmoid(mix_proj.numpy() @ np.concatenate([h, e]) + mix_bias.numpy()) * e
        if head == "rnn":
            joint = mix_proj.numpy() @ np.concatenate([state, e, h]) + mix_bias.numpy()
            gate, candidate, output = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
            z = np.tanh(output)
            state = _sigmoid(gate) * state + _sigmoid(-gate) * np.tanh(candidate)
        for i, token in enumerate(target_of):
            value = base_logits[k, i if d2t is not None and base_is_drafted else token].item()
            value /= logits_divisor
            if softcap_place == "before_bias":
                value = softcap * math.tanh(value / softcap)
            value += float(markov_w2[i].numpy() @ z)
            if softcap_place == "after_bias":
                value = softcap * math.tanh(value / softcap)
            logits[k, token] = value
        row = logits[k].numpy()
        ids, scores, t = np.arange(vocab_size), row, float(temperature)
        if t > 0:
            purpose, key = (0, 0) if int(is_coupled) else (1, first)
            ids = keep_set(row, t, int(top_k), float(top_p), float(min_p))
            noise = gumbel_row(int(seed), first + 1 + k, vocab_size, purpose, key)
            scores = row[ids] / t + noise[ids]
        if confidence_proj is not None:
            weight = confidence_proj[0].numpy()
            value = weight @ np.concatenate([h, e])[: len(weight)]
            confidences.append(_sigmoid(value + (float(confidence_bias or 0.0))))
        previous = int(ids[np.argmax(scores)])
        tokens.append(previous)
    outputs = (torch.tensor(tokens), logits, torch.tensor(confidences, dtype=torch.float64))
    return outputs, {}


def scale(x: Tensor, factor: Tensor | None, divisor: float) -> Result:
    return (x / divisor if factor is None else x / divisor * factor.item(),), {}


def sink_router(
    x: Tensor, weight: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, scale: float
) -> Result:
    num_experts, num_shared = len(bias), len(weight) - len(bias)
    weights = torch.zeros(len(x), top_k + num_shared, dtype=torch.float64)
    ids = []
    for t in range(len(x)):
        logits = weight.numpy() @ x[t].numpy()
        ids.append(chosen(_sigmoid(logits[:num_experts]) + bias.numpy(), top_k))
        # log(sigmoid(l)) = -log(1 + exp(-l)), and a share is their softmax.
        logs = -np.logaddexp(0.0, -np.concatenate([logits[ids[t]], logits[num_experts:]]))
        shares = np.exp(logs - logs.max())
        weights[t] = torch.from_numpy(shares / shares.sum()) * scale * global_scale.item()
    shared_ids = torch.arange(num_shared).expand(len(x), -1)
    return (weights[:, :top_k], torch.tensor(ids), weights[:, top_k:], shared_ids), {}


def chain_input(
    hidden: Tensor,
    embedded: Tensor,
    state: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    first_row: int,
    hidden_first: bool,
) -> Result:
    first, entry = int(position), int(slot)
    out = torch.zeros(len(embedded), 2 * embedded.shape[1], dtype=torch.float64)
    for t in range(len(embedded)):
        if first + t < first_row:
            continue
        before = torch.zeros_like(embedded[0])
        if t > 0:
            before = hidden[t - 1]
        elif first > 0:
            before = state[entry, (first - 1) % state.shape[1]]
        pair = (before, embedded[t]) if hidden_first else (embedded[t], before)
        out[t] = torch.cat(pair)
    after = state.clone()
    for t in range(int(num_tokens)):
        after[entry, (first + t) % state.shape[1]] = hidden[t]
    return (out,), {"state": after}


def draft_sample(
    logits: Tensor,
    is_coupled: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    place: int,
) -> Result:
    row, anchor, t = logits[0].numpy(), int(position), float(temperature)
    if t == 0:
        return (torch.tensor([int(np.argmax(row))]),), {}
    purpose, key = (0, 0) if int(is_coupled) else (1, anchor)
    ids = keep_set(row, t, int(top_k), float(top_p), float(min_p))
    noise = gumbel_row(int(seed), anchor + 1 + place, len(row), purpose, key)
    return (torch.tensor([int(ids[np.argmax(row[ids] / t + noise[ids])])]),), {}


def _sigmoid(x: np.ndarray | float) -> np.ndarray | float:
    return 1 / (1 + np.exp(-x))


ORACLES_DRAFT: dict[str, Oracle] = {
    "concat": concat,
    "draft_attention": draft_attention,
    "draft_head": draft_head,
    "draft_sample": draft_sample,
    "chain_input": chain_input,
    "scale": scale,
    "sink_router": sink_router,
    "sum_parts": sum_parts,
}
