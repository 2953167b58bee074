"""The table of full-size Inkling-2-Mini on one H200: `ink-bench` figures beside floor, must, goal.

    python perf/inkling2_mini.py --write-config CONFIG --drafter
    ink-build CONFIG -o ENGINE --target sm_90a --weights dummy --max-seq-len 262144 --towers none
    python perf/inkling2_mini.py ENGINE --commit HASH --profile -o FILE

GPU time by graph replay, median of 60, weights cold in the L2. Rows of FILE that are measured anew
are replaced, all others stay. A configuration that is written with `--drafter` has a drafter of the
sizes that the published model names, its MLP as wide as fits the published number of weights.
"""

import argparse
from pathlib import Path
from typing import Any

from flint import figure_of
from inkling2 import DRAFTER, Targets, facts_of, measure, write_mixed, write_rows

# The project's targets at 4.55 TB/s: floor, must and goal, in ms.
TARGETS: dict[tuple[str, int], Targets] = {
    ("decode", 8192): (1.30, 2.3, 1.9),
    ("verify4", 8192): (2.3, 3.7, 3.1),
    ("verify8", 8192): (3.5, 5.6, 4.6),
    ("decode", 100_000): (1.96, 3.0, 2.6),
    ("decode", 262_143): (3.13, 4.3, 3.9),
}
NUM_LAYERS, NVFP4_LAYERS = 24, 20
MODEL = "full-size Inkling-2-Mini, NVFP4 experts in layers 0-19, MXFP8 in 20-23, dummy weights"
MINI_DRAFTER: dict[str, Any] = DRAFTER | {
    "block_size": 8,  # the anchor's row is one of them
    "sample_from_anchor": False,
    "target_layer_ids": [5, 23, 41, 48],  # visits, and the state in front of the vocabulary
    "num_hidden_layers": 3,
    "num_attention_heads": 24,
    "intermediate_size": 6656,
}


def main() -> int:
    """Write a configuration, or run the benchmark and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--write-config", type=Path, metavar="FOLDER")
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    if options.write_config is not None:
        drafter = MINI_DRAFTER if options.drafter else {}
        folder = options.write_config
        write_mixed(folder, "inkling2_loop", {}, NUM_LAYERS, NVFP4_LAYERS, drafter)
        return 0
    if not (options.engine and options.commit and options.out):
        parser.error("give ENGINE, --commit and -o, or --write-config")
    # After each context, so that a time limit loses nothing.
    for context in dict.fromkeys(context for _, context in TARGETS):
        write_rows(options.out, steps(options, context))
    return 0


def steps(options: argparse.Namespace, context: int) -> list[dict[str, Any]]:
    """Figures of the steps at a context."""
    command, result = measure(options, TARGETS, context)
    return [
        figure_of(
            f"{row['step']} at {context}",
            row["median_us"],
            TARGETS[row["step"], context] or (None, None, None),
            command,
            options.commit,
            result["device"],
        )
        | {"model": MODEL}
        | facts_of(row)
        for row in result["rows"]
    ]


if __name__ == "__main__":
    raise SystemExit(main())
