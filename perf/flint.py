"""The table of full-size Flint on one H200: `ink-bench` figures beside floor, must and goal.

    ink-build FOLDER_WITH_CONFIG -o ENGINE --target sm_90a --weights dummy
    python perf/flint.py ENGINE --commit HASH --profile -o perf/results/flint-h200.json

GPU time per step by graph replay, median of 60 (chunks of a prompt: 10), weights cold in the L2:
22.9 GB, walked in order. The file is written anew after decode, verify and prompt.
With `--profile` each figure has its `launches`: what the step takes longer for each, which adds up.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# step, context: floor, must and goal in ms (the project's targets for an H200 at 4.55 TB/s).
TARGETS = {
    ("decode", 1024): (0.33, 0.80, 0.60),
    ("decode", 8192): (0.38, 0.86, 0.68),
    ("decode", 100_000): (0.96, 1.45, 1.28),
    ("decode", 262_000): (1.98, 2.50, 2.30),
    ("verify8", 8192): (1.1, 2.3, 1.6),
}
# Of a prompt of 8192 tokens, likewise; its chunks are timed one by one.
PROMPT, PROMPT_TARGETS = 8192, (59, 110, 85)


# Replays of each cut of a profile, of which there are as many as launches: some 250.
NARROW_CUT_RUNS, PROMPT_CUT_RUNS = 30, 4


def main() -> int:
    """Run the benchmark and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    for figures in workloads(options):
        table += figures
        # After each workload, so that a time limit loses nothing.
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


def workloads(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The figures of one workload after the other."""
    yield steps(options, "decode")
    yield steps(options, "verify8")
    yield [prompt(options)]


def steps(options: argparse.Namespace, step: str) -> list[dict[str, Any]]:
    """Figures of a step at its contexts."""
    contexts = ",".join(str(context) for name, context in TARGETS if name == step)
    command = f"ink-bench engine ENGINE --steps {step} --contexts {contexts} --runs 60"
    result = bench(options, command, cut_runs=NARROW_CUT_RUNS)
    return [
        figure_of(
            f"Flint NVFP4 {step} at {row['context']}",
            row["median_us"],
            TARGETS[step, row["context"]],
            command,
            options.commit,
            result["device"],
        )
        | {"launches": row.get("launches")}
        for row in result["rows"]
    ]


def prompt(options: argparse.Namespace) -> dict[str, Any]:
    """The sum of all chunks of a prompt, each behind those before it."""
    command = "ink-bench engine ENGINE --steps prefill --runs 10 --contexts "
    first = bench(options, f"{command}0", cut_runs=PROMPT_CUT_RUNS)["rows"][0]
    chunk = int(first["step"].removeprefix("prefill"))
    command += ",".join(map(str, range(0, PROMPT, chunk)))
    result = bench(options, command)
    chunks = [row["median_us"] for row in result["rows"]]
    if len(chunks) * chunk != PROMPT:
        raise SystemExit(f"the engine cannot take {PROMPT} tokens in whole chunks of {chunk}")
    figure = figure_of(
        f"Flint NVFP4 prefill of {PROMPT} tokens in chunks of {chunk}",
        sum(chunks),
        PROMPT_TARGETS,
        command,
        options.commit,
        result["device"],
    )
    return {
        **figure,
        "chunk_ms": [round(us / 1e3, 3) for us in chunks],
        "launches": first.get("launches"),
    }


def figure_of(
    workload: str,
    us: float,
    targets: tuple[float, float, float] | tuple[None, None, None],
    command: str,
    commit: str,
    device: str,
) -> dict[str, Any]:
    """One figure beside its floor, must and goal in ms."""
    floor, must, goal = targets
    return {
        "workload": workload,
        "value": round(us / 1e3, 4),
        "unit": "ms",
        "floor": floor,
        "must": must,
        "goal": goal,
        "command": command,
        "commit": commit,
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def bench(options: argparse.Namespace, command: str, *, cut_runs: int = 0) -> dict[str, Any]:
    """Run one `ink-bench` command line and give its JSON.

    Args:
        options: of the program.
        command: in which ENGINE stands for the engine.
        cut_runs: replays of each cut of the profile, if one is wanted; 0 for none at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words = command.replace("ENGINE", str(options.engine)).split()[1:]
        is_profiled = options.profile and cut_runs > 0
        extra = ["--profile", "--profile-runs", str(cut_runs)] if is_profiled else []
        module = [sys.executable, "-m", "inkrt.commands.bench"]
        subprocess.run([*module, *words, *extra, "--json", str(out)], check=True)
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


if __name__ == "__main__":
    raise SystemExit(main())
