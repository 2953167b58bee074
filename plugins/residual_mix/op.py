"""residual_mix: attention of fixed queries over the normalized states of a token's residual blocks.

    s_j    = S_j * rsqrt(mean(S_j^2) + eps)
    a_i    = softmax_j(q_i . s_j / sqrt(D))
    out_i  = sum_j a_ij s_j

Keys and values are the same normalized states; there is no mixing between tokens. All float32.
Source: Inkling-2 block attention residual, `Inkling2BlockAttentionResidual` of transformers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import row_by_row
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """Shape [m, T, D], float32."""
    axes = Axes("residual_mix")
    axes.require(len(sources) > 0, "sources is empty, expected at least one tensor")
    for index, source in enumerate(sources):
        axes.fit(f"sources[{index}]", source, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("queries", queries, "m", "D", dtype=torch.float32)
    axes.require(eps >= 0, f"eps is {eps}, expected >= 0")
    num_tokens, width = sources[0].shape
    return queries.new_empty(queries.shape[0], num_tokens, width)


def _case(
    name: str,
    num_sources: int,
    num_queries: int,
    num_tokens: int,
    width: int,
    *,
    has_float32_source: bool = False,
    query_scale: float = 1.0,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        dtypes = [dtype] * num_sources
        if has_float32_source:
            dtypes[-1] = torch.float32
        # Growing scales: later blocks are longer sums, and the norms must take that out.
        sources = [
            normal(generator, d, num_tokens, width, scale=2.0**j) for j, d in enumerate(dtypes)
        ]
        queries = normal(generator, torch.float32, num_queries, width, scale=query_scale)
        return {"sources": sources, "queries": queries, "eps": 1e-6}

    # Float32 throughout, so the bound does not depend on the model dtype.
    return Case(name, arguments, {torch.float32: 1e-6, torch.bfloat16: 1e-6})


def cases() -> list[Case]:
    """One source (weight 1), MLP and full-attention numbers of queries, a sharp and a flat mix."""
    return [
        _case("one source", 1, 1, 1, 55),
        _case("mlp input", 3, 1, 5, 56, has_float32_source=True),
        _case("full attention input", 9, 3, 11, 33),
        _case("near one-hot", 4, 2, 2, 17, query_scale=20.0),
        _case("zero query mixes evenly", 4, 1, 3, 7, query_scale=0.0),
        _case("two slices", 9, 1, 5, 520, has_float32_source=True),
        _case("three queries, wide step", 3, 3, 11, 256),
        _case("most sources", 10, 1, 1, 64),
    ]


@operator("residual_mix", fake=fake, cases=cases)
def residual_mix(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """Mix the sources of every token once per query.

    Args:
        sources: n tensors [T, D], float32 or bfloat16 each.
        queries: float32 [m, D], the same for all tokens.
        eps: added to the mean square of a source.

    Returns:
        float32 [m, T, D], contiguous.
    """
    scale = queries.shape[1] ** -0.5
    states = torch.stack([source.float() for source in sources], dim=1)  # [T, n, D]
    states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)
    all_queries = queries.expand(len(states), -1, -1)
    logits = row_by_row(torch.matmul, all_queries, states.transpose(1, 2)) * scale  # [T, m, n]
    mixed = row_by_row(torch.matmul, torch.softmax(logits, dim=-1), states)
    return mixed.transpose(0, 1).contiguous()
