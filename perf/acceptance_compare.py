"""Whether two runs of `speculation_equality.py` accept as many drafts, within their noise.

    python perf/acceptance_compare.py perf/results/speculation-equality-cpu.json GPU.json

For every drafter, kind of prompt and temperature: tokens a round of both, and their difference over
its standard error, of prompts as independent units. The prompts are the same, so that the true
error is smaller; where kernels round differently some answers part early. A file without errors is
taken to have those of the other. Status 1 if any difference is more than MOST_ERRORS.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

MOST_ERRORS = 4.0  # of a dozen differences; by chance one in a thousand runs


def ratio_with_error(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A ratio of sums and its standard error, of units that each give a part of both sums.

    The error is that of the linearized ratio (Cochran, "Sampling Techniques", 6.4); 0 of one unit.

    Args:
        parts: of the numerator and of the denominator, by unit.
    """
    below = sum(part for _, part in parts)
    if not below:
        return 0.0, 0.0
    ratio = sum(part for part, _ in parts) / below
    count = len(parts)
    if count < 2:
        return ratio, 0.0
    squares = sum((above - ratio * part) ** 2 for above, part in parts)
    return ratio, sqrt(squares * count / (count - 1)) / below


def main() -> int:
    """Print a line for every way; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("results", type=Path, nargs=2)
    options = parser.parse_args()
    one, other = (json.loads(path.read_text(encoding="utf-8"))[0] for path in options.results)
    lines, is_near = compare(one, other)
    sys.stdout.write("\n".join(lines) + "\n")
    return int(not is_near)


def compare(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[str], bool]:
    """Lines of a table, and whether all differences are noise.

    Raises:
        SystemExit: neither has errors, or they are of different checkpoints or workloads.
    """
    for key in ("checkpoint", "workload"):
        if one[key] != other[key]:
            raise SystemExit(f"the results are of another {key}: {one[key]} and {other[key]}")
    errors = [result.get("acceptance_error") for result in (one, other)]
    if errors == [None, None]:
        raise SystemExit("neither result has standard errors; run speculation_equality.py again")
    of_one, of_other = (own or next(filter(None, errors)) for own in errors)
    lines = [f"{'tokens a round':<28}{one['device'][:16]:>18}{other['device'][:16]:>18}{'z':>8}"]
    is_near = True
    for way, length in one["acceptance_length"].items():
        theirs = other["acceptance_length"][way]
        error = sqrt(of_one[way] ** 2 + of_other[way] ** 2)
        z = (theirs - length) / error if error else 0.0
        is_near &= abs(z) <= MOST_ERRORS
        texts = (f"{length:.3f} +-{of_one[way]:.3f}", f"{theirs:.3f} +-{of_other[way]:.3f}")
        lines.append(f"{way:<28}{texts[0]:>18}{texts[1]:>18}{z:>8.2f}")
    lines.append(f"{'all within' if is_near else 'NOT all within'} {MOST_ERRORS:g} standard errors")
    return lines, is_near


if __name__ == "__main__":
    raise SystemExit(main())
