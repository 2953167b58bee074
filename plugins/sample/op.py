"""sample: draw one token per row of logits.

    temperature = 0:  token = argmax logits                       the lowest id if several are equal
    otherwise:        token = argmax (filtered logits + Gumbel)   one draw from their softmax

The filters are those of `plugins/sampling.py`, the noise is that of `plugins/noise.py`: float64
inside, rounded to float32, added in float32. It is keyed by the seed and by the position of the
token being drawn, so a token is the same whatever the number of rows. argmax takes the first NaN if
there is one, at any temperature, so a row whose largest logit is not finite gives that logit's
lowest id. Source: dspark.md sections 6.2 and 6.7.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.noise import Purpose, gumbel, token_bits
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.sampling import filtered_logits
from inkrt.plugins.shapes import Axes


def fit_sampling(
    axes: Axes,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    num_tokens: Tensor | None = None,
) -> None:
    """Check the arguments of a draw: one element each.

    Raises:
        BuildError: a shape or dtype differs.
    """
    axes.fit("temperature", temperature, 1, dtype=torch.float32)
    axes.fit("top_k", top_k, 1, dtype=torch.int32)
    axes.fit("top_p", top_p, 1, dtype=torch.float32)
    axes.fit("min_p", min_p, 1, dtype=torch.float32)
    axes.fit("seed", seed, 1, dtype=torch.int64)
    axes.fit("position", position, 1, dtype=torch.int32)
    if num_tokens is not None:
        axes.fit("num_tokens", num_tokens, 1, dtype=torch.int32)


def fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    num_tokens: Tensor,
    last_row: bool,
) -> Tensor:
    """Tokens int32 [R]."""
    axes = Axes("sample")
    axes.fit("logits", logits, "R", "V", dtype=torch.float32)
    fit_sampling(axes, temperature, top_k, top_p, min_p, seed, position, num_tokens)
    if last_row:
        axes.require(axes["R"] == 1, f"logits has {axes['R']} rows, expected 1 with last_row")
    return logits.new_empty(axes["R"], dtype=torch.int32)


def sampling_arguments(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Arguments:
    """The sampling parameters as a step passes them, for cases and tests."""
    return {
        "temperature": torch.tensor([temperature], dtype=torch.float32),
        "top_k": int32(top_k),
        "top_p": torch.tensor([top_p], dtype=torch.float32),
        "min_p": torch.tensor([min_p], dtype=torch.float32),
        "seed": torch.tensor([seed], dtype=torch.int64),
    }


def cases() -> list[Case]:
    """Greedy with ties, each filter, all filters, and thresholds at which many tokens tie."""

    def make(
        name: str, sampling: Arguments, *, num_rows: int = 5, vocab_size: int = 131,
        levels: int = 0, position: int = 1000, num_tokens: int | None = None,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:  # noqa: ARG001
            logits = normal(generator, torch.float32, num_rows, vocab_size, scale=3.0)
            if levels:  # few distinct values: ties everywhere
                logits = (logits * levels / 9).round()
            return {
                "logits": logits,
                **sampling,
                "position": int32(position),
                "num_tokens": int32(num_tokens or num_rows),
                "last_row": num_tokens is not None,
            }

        exact = {torch.float32: 0.0, torch.bfloat16: 0.0}
        return Case(name, arguments, exact)

    parameters = sampling_arguments
    return [
        make("greedy", parameters(temperature=0.0)),
        make("greedy_ties", parameters(temperature=0.0), levels=3),
        make("plain", parameters(seed=2**62 + 12345), num_rows=8),
        make("hot_last_row", parameters(temperature=1.7, seed=7), num_rows=1, num_tokens=6),
        make("min_p", parameters(temperature=0.8, min_p=0.1, seed=3)),
        make("top_k_ties", parameters(temperature=2.0, top_k=5, seed=4), levels=4),
        make("top_k_of_all", parameters(top_k=500, seed=5), vocab_size=7),
        make("top_p", parameters(top_p=0.7, seed=6), num_rows=11),
        make("top_p_ties", parameters(top_p=0.5, seed=8), levels=2),
        make("top_p_tiny", parameters(top_p=1e-6, seed=9)),
        make(
            "all_filters",
            parameters(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02, seed=2**63 - 1),
            vocab_size=997,
            position=1_048_570,
        ),
        make("one_token", parameters(seed=10), vocab_size=1),
    ]


@operator("sample", fake=fake, cases=cases)
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
) -> Tensor:
    """Draw the token after each row.

    Args:
        logits: float32 [R, V].
        temperature: float32 [1]; 0 takes the argmax and ignores the filters.
        top_k: int32 [1]; 0 is off.
        top_p: float32 [1], in (0, 1].
        min_p: float32 [1], in [0, 1]; 0 is off.
        seed: int64 [1], not negative.
        position: int32 [1], of the step's first token.
        num_tokens: int32 [1], valid tokens of the step.
        last_row: the single row belongs to the step's last valid token; otherwise row r belongs to
            the token at position + r.

    Returns:
        int32 [R]: row r holds the token at position + 1 + r, or at position + num_tokens if
        last_row.
    """
    num_rows, vocab_size = logits.shape
    if float(temperature) == 0:
        # torch promises the first of equal values.
        return logits.argmax(dim=-1).int()
    first = int(position) + (int(num_tokens) if last_row else 1)
    positions = first + torch.arange(num_rows)
    bits = token_bits(int(seed), positions, Purpose.SAMPLE, vocab_size)
    tokens = torch.empty(num_rows, dtype=torch.int32)
    # Row by row also in wide steps: vectorized logarithms may depend on where a value stands.
    for row in range(num_rows):
        scores = filtered_logits(
            logits[row].clone(), float(temperature), int(top_k), float(top_p), float(min_p)
        )
        tokens[row] = (scores + gumbel(bits[row].clone())).argmax()
    return tokens
