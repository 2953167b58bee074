"""Which widths pay on full-size Inkling-2-Mini: rounds of 1 to 7 drafts, and those of the policy.

    python perf/inkling2_mini.py --write-config CONFIG --drafter
    ink-build CONFIG -o ENGINE --target sm_90a --weights dummy --max-seq-len 262144 --towers none
    python perf/inkling2_widths.py ENGINE --commit HASH -o FILE

Whole rounds of real kernels, by graph replay, with acceptance forced to profiles: the probability
that a draft is accepted if those before it are. First what rounds cost is measured and kept in the
engine, which the policy goes by. A line for each profile, and a row in FILE.
"""

import argparse
import datetime
from pathlib import Path
from typing import Any

from inkling2 import write_rows
from inkling2_mini import MODEL

from inkrt.commands.bench_rounds import measure_rounds
from inkrt.commands.bench_speculation import keep_costs
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.spec.config import SpeculativeConfig, Width

CONTEXT, MOST = 8192, 7
# The family's published one, and what text that is easier or harder to foresee gives.
PROFILES = {
    "0.2 falling": "0.2,0.18,0.16,0.14,0.12,0.1,0.1",
    "0.4": "0.4",
    "0.6": "0.6",
    "published": "0.77,0.78,0.78,0.79,0.78,0.76,0.77",
    "0.9": "0.9",
    "0.9 falling": "0.9,0.8,0.7,0.6,0.5,0.4,0.3",
    "0.97": "0.97",
}


def main() -> int:
    """Measure all, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--runs", type=int, default=150, help="rounds of each figure")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    keep_costs(options.engine, (CONTEXT,))
    with Engine.open(options.engine) as engine:
        executor = engine.executor
        assert isinstance(executor, CudaExecutor), "an engine for a GPU"
        for name, profile in PROFILES.items():  # each is kept, so that a time limit loses little
            row = profile_row(engine, executor, options, name, profile)
            write_rows(options.out, [row | {"device": executor.device_name}])
    return 0


def profile_row(
    engine: Engine, executor: CudaExecutor, options: argparse.Namespace, name: str, profile: str
) -> dict[str, Any]:
    """Tokens per second of every width at a profile, and of the policy's own."""

    def rounds(width: Width, drafts: int) -> dict[str, Any]:
        config = SpeculativeConfig("dspark", num_draft_tokens=drafts, width=width)
        speculation = config.resolve(engine.folder, engine.config)
        given = ",".join(profile.split(",")[:drafts])
        (row,) = measure_rounds(
            executor, engine.config, speculation, [CONTEXT], options.runs, given
        )
        return row

    fixed = [rounds("fixed", drafts) for drafts in range(1, MOST + 1)]
    chosen = rounds("cost", MOST)
    speeds = [round(row["tokens_per_s"], 1) for row in fixed]
    return {
        "workload": f"rounds at {CONTEXT}, acceptance {name}, width by cost",
        "value": round(chosen["tokens_per_s"], 1),
        "unit": "tokens/s",
        "accept_profile": profile,
        "tokens_per_round": round(chosen["tokens_per_round"], 3),
        "fixed_1_to_7": speeds,
        "best_fixed": 1 + speeds.index(max(speeds)),
        "drafts_chosen": {kind["drafts"]: kind["rounds"] for kind in chosen["widths"]},
        "command": f"python perf/inkling2_widths.py ENGINE --runs {options.runs}",
        "commit": options.commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": MODEL,
    }


if __name__ == "__main__":
    raise SystemExit(main())
