"""The table of full-size Inkling-2 on H200s: `ink-bench` figures beside floor, must and goal.

    python perf/inkling2.py --write-config CONFIG
    ink-build CONFIG -o ENGINE --target sm_90a --weights dummy --tp-size 4 --moe-split width
    python perf/inkling2.py ENGINE --commit HASH --profile -o perf/results/inkling2-h200.json

An engine of four ranks gives the steps of one of them on one GPU, its collectives looped back. One
of two ranks gives the time of a layer on two GPUs, which do not hold all 48: its configuration is
written with `--layers 36`, and all these are NVFP4. GPU time by graph replay, median of 60, weights
cold in the L2. Rows of FILE that are measured anew are replaced, all others stay: those of kernels
come from `perf/kernels`. With `--profile` each figure of a step has its `launches`: what the step
takes longer for each, which adds up. A configuration that is written with `--drafter` has a drafter
of published proportions, whose step `ink-bench engine ENGINE --rank-slice 0/4 --steps draft` times.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from flint import NARROW_CUT_RUNS, bench, figure_of

# The project's targets for H200s at 4.55 TB/s: floor, must and goal, in ms for steps of a rank of
# four by step and context, and in us for a decode step's layer on two GPUs.
SLICE_TARGETS = {
    ("decode", 8192): (1.04, 1.75, 1.45),
    ("decode", 100_000): (1.21, 2.0, 1.65),
    ("verify4", 8192): (2.1, 3.4, 2.8),
    ("verify8", 8192): (3.5, 5.6, 4.6),
}
LAYER_TARGETS = (40.3, 60.0, 52.0)
NUM_LAYERS, NVFP4_LAYERS = 48, 40
# The sizes of drafters that are published for other models, with the model's heads.
DRAFTER: dict[str, Any] = {
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "rnn",
    "noise_token_id": 200_064,
    "target_layer_ids": [1, 12, 23, 35, 46],
    "num_hidden_layers": 5,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 8e6,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def main() -> int:
    """Write a configuration, or run the benchmark and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--write-config", type=Path, metavar="FOLDER")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    if options.write_config is not None:
        write_config(options.write_config, options.layers, has_drafter=options.drafter)
        return 0
    if not (options.engine and options.commit and options.out):
        parser.error("give ENGINE, --commit and -o, or --write-config")
    engine = json.loads((options.engine / "config.json").read_text(encoding="utf-8"))
    tp_size, layers = engine["tp_size"], engine["model"]["num_layers"]
    if tp_size == 2:
        write_rows(options.out, [layer_on_two(options, layers)])
        return 0
    if (tp_size, layers) != (4, NUM_LAYERS):
        parser.error(f"the engine has {layers} layers on {tp_size} ranks; the table is of 48 on 4")
    for step in dict.fromkeys(step for step, _ in SLICE_TARGETS):
        # After each step, so that a time limit loses nothing.
        write_rows(options.out, slice_steps(options, step))
    return 0


def write_config(folder: Path, num_layers: int, *, has_drafter: bool) -> None:
    """Write a config.json: the first layers of the full-size model, of the NVFP4 checkpoint."""
    formats = {
        f"model.llm.layers.{layer}.mlp.experts": {
            "quant_algo": "NVFP4" if layer < NVFP4_LAYERS else "MXFP8"
        }
        for layer in range(num_layers)
    }
    text: dict[str, Any] = {"model_type": "inkling2_text", "dtype": "bfloat16"}
    if num_layers != NUM_LAYERS:
        text["num_hidden_layers"] = num_layers
    if has_drafter:
        text |= {f"dspark_{key}": value for key, value in DRAFTER.items()}
    config = {
        "model_type": "inkling2",
        "dtype": "bfloat16",
        "text_config": text,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": formats,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def slice_steps(options: argparse.Namespace, step: str) -> list[dict[str, Any]]:
    """Figures of a step of one rank of four at its contexts."""
    contexts = ",".join(str(context) for name, context in SLICE_TARGETS if name == step)
    command = (
        f"ink-bench engine ENGINE --rank-slice 0/4 --steps {step} --contexts {contexts} --runs 60"
    )
    result = bench(options, command, cut_runs=NARROW_CUT_RUNS)
    return [
        figure_of(
            f"{step} at {row['context']}, rank slice 0/4, collectives looped back",
            row["median_us"],
            SLICE_TARGETS[step, row["context"]],
            command,
            options.commit,
            result["device"],
        )
        | {
            "model": "full-size Inkling-2-Small, NVFP4 experts in layers 0-39, MXFP8 in 40-47, "
            "dummy weights"
        }
        | facts_of(row)
        for row in result["rows"]
    ]


def layer_on_two(options: argparse.Namespace, num_layers: int) -> dict[str, Any]:
    """Time of a layer of a decode step on two GPUs, both collectives included."""
    options.profile = True  # prices tell the layers from the head
    command = "ink-bench engine ENGINE --steps decode --contexts 8192 --runs 60"
    result = bench(options, command, cut_runs=NARROW_CUT_RUNS)
    (row,) = result["rows"]
    of_layers = sum(
        us
        for kind in row["launches"]
        for module, us in kind["us_of_modules"].items()
        if module.startswith("layers.")
    )
    figure = figure_of(
        "decode at 8192 on two GPUs, a layer",
        1e3 * of_layers / num_layers,
        LAYER_TARGETS,
        f"{command} --profile --profile-runs {NARROW_CUT_RUNS}",
        options.commit,
        result["device"],
    )
    num_nvfp4 = min(num_layers, NVFP4_LAYERS)
    return figure | {
        "unit": "us",
        "model": f"first {num_layers} layers of Inkling-2-Small, NVFP4 experts in {num_nvfp4} of "
        f"them, dummy weights",
        "step": {"ms": round(row["median_us"] / 1e3, 4), **facts_of(row)},
    }


def facts_of(row: dict[str, Any]) -> dict[str, Any]:
    """What `ink-bench` says of a step: bytes, their floor in ms, experts, launches."""
    facts: dict[str, Any] = {
        "bytes": row["bytes"],
        "floor_of_bytes": round(row["floor_us"] / 1e3, 4),
    }
    if "experts" in row:
        facts["experts"] = round(row["experts"]["mean"], 2)
        facts["experts_if_independent"] = round(row["experts"]["independent"], 2)
    if "launches" in row:
        facts["launches"] = [
            {
                "op": kind["op"],
                "tactic": kind["tactic"],
                "count": kind["count"],
                "us": round(kind["us"], 2),
                "floor_us": round(kind["floor_us"], 2),
            }
            for kind in row["launches"]
        ]
    return facts


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into the table, in place of those of the same workload or at its end."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    places = {row["workload"]: place for place, row in enumerate(table)}
    for row in rows:
        if (place := places.get(row["workload"])) is None:
            table.append(row)
        else:
            table[place] = row
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
