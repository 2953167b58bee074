"""Inputs of `relative_attention` with float64 results, on any device, to check kernels with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkrt.plugins.attention_sm90.bank import BANK_BY_DISTANCE
from inkrt.plugins.attention_sm90.tactics import Call
from inkrt.plugins.kv_layout import PAGE_TOKENS, tile_order

NUM_SLOTS, SLOT = 3, 1


@dataclass(frozen=True, slots=True)
class Problem:
    """Data of `rows` tokens from `start` on and of all before them.

    Attributes:
        call: shapes; its number of tokens does not matter here.
        start: position of the first token.
        inputs: q, gate, rel and sinks of the tokens, in bf16.
        bank: as kernels read it, uint8.
        k: [start + rows, KV, d].
        v: like k.
        table: int32 [pages].
        reference: float64 [rows, H, d].
    """

    call: Call
    start: int
    inputs: dict[str, Tensor]
    bank: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    reference: Tensor


def make_problem(call: Call, start: int, rows: int, device: str) -> Problem:
    """Random data and its result; the same on every device."""
    relative = call.relative
    assert relative is not None
    generator = torch.Generator().manual_seed(start + rows)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator) * scale).bfloat16().to(device)

    keys, kv, dim, heads = start + rows, call.num_kv_heads, call.head_dim, call.num_heads
    q, k, v = normal(rows, heads, dim, scale=2.0), normal(keys, kv, dim), normal(keys, kv, dim)
    rel, sinks = normal(rows, heads, relative.states), normal(rows, heads, scale=2.0)
    gate = normal(rows, heads * dim, scale=2.0)
    bank = normal(relative.states, relative.extent, scale=1.0 / relative.states**0.5)
    pages = -(-keys // PAGE_TOKENS)
    table = torch.randperm(pages + 3, generator=generator)[:pages].int().to(device)
    out = torch.zeros(rows, heads, dim, dtype=torch.float64, device=device)
    for t in range(rows):
        end = start + t + 1
        begin = max(relative.first_key, end - call.window if call.window else 0)
        if begin >= end:
            continue
        grouped = q[t].double().view(kv, call.heads_per_kv, dim)
        scores = grouped @ k[begin:end].double().permute(1, 2, 0) * call.scale
        near = bank[:, : end - begin].flip(1)  # by key, of those that are near enough
        bias = (rel[t].double() @ near.double()).bfloat16().double()
        scores[..., scores.shape[-1] - near.shape[1] :] += bias.view(kv, call.heads_per_kv, -1)
        sink = sinks[t].double() if relative.has_sinks else torch.full((heads,), -torch.inf)
        logits = torch.cat([scores, sink.to(device).view(kv, -1, 1)], dim=-1)
        weights = logits.softmax(dim=-1)[..., :-1]
        out[t] = (weights @ v[begin:end].double().transpose(0, 1)).reshape(heads, dim)
    if relative.is_gated:
        out *= torch.sigmoid(gate.double()).view(out.shape)
    inputs = {"q": q, "rel": rel, "sinks": sinks, "gate": gate}
    return Problem(call, start, inputs, BANK_BY_DISTANCE.pack(bank), k, v, table, out)


def make_cache(call: Call, table: Tensor, values: Tensor, first: int, count: int) -> Tensor:
    """A buffer with NaN everywhere but in the rows that `count` tokens from `first` on read.

    Args:
        call: whose layout to use.
        table: int32 [pages], on the device of the values.
        values: k or v of all positions, [>= first + count, KV, d].
        first: position of the step.
        count: valid rows of the step.
    """
    device = values.device
    oldest = max(0, first - call.window + 1) if call.window else 0
    positions = torch.arange(oldest, first + count, device=device)
    if call.ring_rows:
        in_ring = positions % call.ring_rows
        per_slot = call.ring_rows // PAGE_TOKENS
        pages, num_pages = SLOT * per_slot + in_ring // PAGE_TOKENS, NUM_SLOTS * per_slot
    else:
        pages, num_pages = table[positions // PAGE_TOKENS].long(), len(table) + 3
    size = (num_pages, call.num_kv_heads, PAGE_TOKENS * call.head_dim)
    cache = torch.full(size, float("nan"), dtype=torch.bfloat16, device=device)
    order = tile_order(call.head_dim).to(device)[positions % PAGE_TOKENS]
    heads = torch.arange(call.num_kv_heads, device=device)
    cache[pages[:, None, None], heads[None, :, None], order[:, None, :]] = values[positions]
    return cache


def step_arguments(problem: Problem, offset: int, width: int, count: int) -> dict[str, Tensor]:
    """Arguments of a step of `width` rows whose row 0 is token `offset` of the problem.

    Rows from `count` on are NaN, of which no valid row may see anything.
    """
    first = problem.start + offset

    def int32(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=problem.k.device)

    arguments = {
        "bank": problem.bank,
        "k_cache": make_cache(problem.call, problem.table, problem.k, first, count),
        "v_cache": make_cache(problem.call, problem.table, problem.v, first, count),
        "page_table": problem.table,
        "slot": int32(SLOT),
        "position": int32(first),
        "num_tokens": int32(count),
    }
    for name, values in problem.inputs.items():
        rows = torch.full_like(values[:1], torch.nan).repeat(width, *[1] * (values.ndim - 1))
        rows[:count] = values[offset : offset + count]
        arguments[name] = rows
    return arguments
