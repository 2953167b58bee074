"""draft_sample: draw the next token of a chain of drafts from its logits.

    x = a draw from the logits, as `sample` makes it for the token at position + 1 + place

The draw takes the request's own temperature and filters. Its Gumbel noise is either "coupled": that
which the target's step adds for the token at the same position, so that draft and target agree
where their distributions do; or independent of it, keyed by purpose DRAFT and the position of the
anchor, as the ratio test needs it (`runtime/noise.py`). Source: dspark.md sections 6.1 and 6.7.
"""

from typing import Any

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.noise import Purpose, gumbel, token_bits
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.sample.op import fit_sampling, sampling_arguments
from inkrt.plugins.sampling import filtered_logits
from inkrt.plugins.shapes import Axes


def fake(
    logits: Tensor,
    is_coupled: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    place: int,
) -> Tensor:
    """One token, int32 [1]."""
    axes = Axes("draft_sample")
    axes.fit("logits", logits, 1, "V", dtype=torch.float32)
    axes.fit("is_coupled", is_coupled, 1, dtype=torch.int32)
    fit_sampling(axes, temperature, top_k, top_p, min_p, seed, position)
    axes.require(place >= 0, f"place is {place}, expected >= 0")
    return logits.new_empty(1, dtype=torch.int32)


def _case(name: str, *, is_coupled: bool = False, place: int = 0, **sampling: Any) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:  # noqa: ARG001
        return {
            "logits": normal(generator, torch.float32, 1, 131, scale=3.0),
            "is_coupled": int32(int(is_coupled)),
            **sampling_arguments(**sampling),
            "position": int32(1000),
            "place": place,
        }

    return Case(name, arguments, {torch.float32: 0.0, torch.bfloat16: 0.0})


def cases() -> list[Case]:
    """Greedy, both noises at several places, all filters."""
    filters: dict[str, Any] = {
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "seed": 2**63 - 1,
    }
    return [
        _case("greedy", temperature=0.0, place=2),
        _case("own noise", temperature=2.0, seed=3, place=6),
        _case("coupled", temperature=2.0, seed=3, place=6, is_coupled=True),
        _case("all filters", place=1, **filters),
        _case("all filters, coupled", is_coupled=True, **filters),
    ]


@operator("draft_sample", fake=fake, cases=cases)
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
) -> Tensor:
    """Draw one draft.

    Args:
        logits: float32 [1, V].
        is_coupled: int32 [1]; 0 for noise independent of the target's.
        temperature: float32 [1]; 0 takes the argmax and ignores the filters.
        top_k: int32 [1]; 0 is off.
        top_p: float32 [1], in (0, 1].
        min_p: float32 [1], in [0, 1]; 0 is off.
        seed: int64 [1], not negative.
        position: int32 [1], of the anchor.
        place: of the draft in its block, from 0.

    Returns:
        int32 [1].
    """
    sampling = (temperature, top_k, top_p, min_p, seed)
    return torch.tensor(
        [draw_draft(logits[0], is_coupled, *sampling, position, place)], dtype=torch.int32
    )


def draw_draft(
    logits: Tensor,
    is_coupled: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    place: int,
) -> int:
    """The draft that `draft_sample` draws; logits are float32 [V]."""
    scores, anchor = logits, int(position)
    if float(temperature) > 0:
        purpose, key = (Purpose.SAMPLE, 0) if int(is_coupled) else (Purpose.DRAFT, anchor)
        where = torch.tensor([anchor + 1 + place])
        bits = token_bits(int(seed), where, purpose, len(logits), key)
        scores = gumbel(bits[0]) + filtered_logits(
            logits.clone(), float(temperature), int(top_k), float(top_p), float(min_p)
        )
    # torch promises the first of equal values.
    return int(scores.argmax())
