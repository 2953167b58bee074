"""The table of full-size Inkling-2 on H200s: `ink-bench` figures beside floor, must and goal.

    python perf/inkling2.py --write-config CONFIG
    ink-build CONFIG -o ENGINE --target sm_90a --weights dummy --tp-size 4 --moe-split width
    python perf/inkling2.py ENGINE --commit HASH --profile -o perf/results/inkling2-h200.json

An engine of four ranks gives the steps of one of them on one GPU, its collectives looped back; with
262,144 positions also those at the last ones. One of two ranks gives the time of a layer on two
GPUs, which do not hold all 48: its configuration is written with `--layers 36`, and all these are
NVFP4. GPU time by graph replay, median of 60, weights cold in the L2. Rows of FILE that are
measured anew are replaced, all others stay: those of kernels come from `perf/kernels`. With
`--profile` each figure of a step has its `launches`: what the step takes longer for each, which
adds up. A configuration that is written with `--drafter` has a drafter of published
proportions, whose step `ink-bench engine ENGINE --rank-slice 0/4 --steps draft` times.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flint import bench, figure_of

Targets = tuple[float, float, float] | None
# The project's targets for H200s at 4.55 TB/s: floor, must and goal, in ms for steps of a rank of
# four by step and context, and in us for a decode step's layer on two GPUs.
SLICE_TARGETS: dict[tuple[str, int], Targets] = {
    ("decode", 8192): (1.04, 1.75, 1.45),
    ("decode", 100_000): (1.21, 2.0, 1.65),
    ("verify4", 8192): (2.1, 3.4, 2.8),
    ("verify8", 8192): (3.5, 5.6, 4.6),
}
LAYER_TARGETS: dict[tuple[str, int], Targets] = {
    ("decode", 8192): (40.3, 60.0, 52.0),
    ("verify4", 8192): None,
    ("verify8", 8192): None,
}
# The last positions that a step can have of as many as Inkling-2-Small is trained for.
LAST_POSITION = 262_144
LAST_TARGETS: dict[tuple[str, int], Targets] = {
    ("decode", LAST_POSITION - 1): None,
    ("verify8", LAST_POSITION - 8): None,
}
CUT_RUNS = 10  # replays of each cut of a profile, of which there are some 340
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
        options.profile = True  # prices tell the layers from the head
        write_rows(options.out, layers_on_two(options, layers))
        return 0
    if (tp_size, layers) != (4, NUM_LAYERS):
        parser.error(f"the engine has {layers} layers on {tp_size} ranks; the table is of 48 on 4")
    targets = dict(SLICE_TARGETS)
    if engine["max_seq_len"] >= LAST_POSITION:
        targets |= LAST_TARGETS
    # After each context, so that a time limit loses nothing.
    for context in dict.fromkeys(context for _, context in targets):
        write_rows(options.out, slice_steps(options, targets, context))
    return 0


def write_config(folder: Path, num_layers: int, *, has_drafter: bool) -> None:
    """Write a config.json: the first layers of the full-size model, of the NVFP4 checkpoint."""
    text: dict[str, Any] = {}
    if num_layers != NUM_LAYERS:
        text["num_hidden_layers"] = num_layers
    write_mixed(folder, "inkling2", text, num_layers, NVFP4_LAYERS, DRAFTER if has_drafter else {})


def write_mixed(
    folder: Path,
    model_type: str,
    text: Mapping[str, Any],
    num_layers: int,
    num_nvfp4: int,
    drafter: Mapping[str, Any],
) -> None:
    """Write a config.json whose experts are in NVFP4 in the first layers, in MXFP8 behind.

    Args:
        folder: of the file.
        model_type: of the whole model.
        text: keys of the text model that are not the defaults.
        num_layers: of the text model.
        num_nvfp4: of them in NVFP4.
        drafter: its settings; empty for none.
    """
    formats = {
        f"model.llm.layers.{layer}.mlp.experts": {
            "quant_algo": "NVFP4" if layer < num_nvfp4 else "MXFP8"
        }
        for layer in range(num_layers)
    }
    config = {
        "model_type": model_type,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": f"{model_type}_text",
            "dtype": "bfloat16",
            **text,
            **{f"dspark_{key}": value for key, value in drafter.items()},
        },
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": formats,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def slice_steps(
    options: argparse.Namespace, targets: Mapping[tuple[str, int], Targets], context: int
) -> list[dict[str, Any]]:
    """Figures of the steps of one rank of four at a context."""
    command, result = measure(options, targets, context, "--rank-slice 0/4 ")
    return [
        figure_of(
            f"{row['step']} at {context}, rank slice 0/4, collectives looped back",
            row["median_us"],
            targets[row["step"], context] or (None, None, None),
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


def measure(
    options: argparse.Namespace,
    targets: Mapping[tuple[str, int], Targets],
    context: int,
    extra: str = "",
) -> tuple[str, dict[str, Any]]:
    """The command that times all steps wanted at a context, and what it gives."""
    steps = ",".join(name for name, wanted in targets if wanted == context)
    command = f"ink-bench engine ENGINE {extra}--steps {steps} --contexts {context} --runs 60"
    result = bench(options, command, cut_runs=CUT_RUNS)
    return f"{command} --profile --profile-runs {CUT_RUNS}" if options.profile else command, result


def layers_on_two(options: argparse.Namespace, num_layers: int) -> list[dict[str, Any]]:
    """Time of a layer of each step on two GPUs, both collectives included."""
    ((_, context), *_) = LAYER_TARGETS
    command, result = measure(options, LAYER_TARGETS, context)
    num_nvfp4 = min(num_layers, NVFP4_LAYERS)
    rows = []
    for row in result["rows"]:
        of_layers = sum(
            us
            for kind in row["launches"]
            for module, us in kind["us_of_modules"].items()
            if module.startswith("layers.")
        )
        figure = figure_of(
            f"{row['step']} at {context} on two GPUs, a layer",
            1e3 * of_layers / num_layers,
            LAYER_TARGETS[row["step"], context] or (None, None, None),
            command,
            options.commit,
            result["device"],
        )
        rows.append(
            figure
            | {
                "unit": "us",
                "model": f"first {num_layers} layers of Inkling-2-Small, NVFP4 experts in "
                f"{num_nvfp4} of them, dummy weights",
                "step": {"ms": round(row["median_us"] / 1e3, 4), **facts_of(row)},
            }
        )
    return rows


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
