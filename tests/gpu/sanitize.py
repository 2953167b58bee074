"""Runs small engines under compute-sanitizer: every kernel of every width of step.

    python tests/gpu/sanitize.py [--tools memcheck,racecheck] [--engines nvfp4,bf16,layers]
    python tests/gpu/sanitize.py --engines inkling2,drafter --timeout 60

Each engine is built once, outside the sanitizer; the steps are a prompt in chunks, verify steps of
every width, a rollback, and decode steps, greedy and with every sampling filter. Of Flint, engine
"layers" has the model's sizes in five layers, which decode in one launch. Of Inkling-2, "inkling2"
is seven small layers with heads of the full size and experts in NVFP4, MXFP8 and BF16, one of which
attends to all keys, "loop" a small Inkling-2-Mini, and "drafter" the small trained model itself,
which also drafts. Prints a line for each engine and tool, and what a tool says if it is not clean;
exits with 1 if any is not.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flint_config import CONFIG
from loop_config import loop_config
from nano_engines import CHECKPOINT

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

NVFP4 = {"quantization_config": {"quant_method": "nvfp4"}}
CONFIGS = {
    "nvfp4": {**CONFIG, **NVFP4},
    "bf16": CONFIG,
    "layers": {
        "model_type": "flint",
        "dtype": "bfloat16",
        "vocab_size": 1000,
        "num_hidden_layers": 5,
        "num_experts": 40,
        "max_position_embeddings": 2048,
        **NVFP4,
    },
}
ENGINES = (*CONFIGS, "inkling2", "loop", "drafter")
TOOLS = {
    "memcheck": ["--leak-check", "no"],
    "initcheck": [],
    # It takes asynchronous copies for writes of the thread that requests them, which no barrier
    # orders; docs/kernels.md.
    "racecheck": ["--racecheck-report", "all", "--racecheck-memcpy-async", "no"],
    # More barriers in shared memory than any block has; left to itself the tool tracks too few, and
    # says so.
    "synccheck": ["--num-cuda-barriers", "64"],
}
MOST_LINES = 60  # of a report


@dataclass(frozen=True)
class Report:
    """What a tool has found.

    Attributes:
        summary: in a line.
        lines: all that it printed.
        is_clean: whether it ran to its end and found nothing.
    """

    summary: str
    lines: list[str]
    is_clean: bool


def build(kind: str, folder: Path) -> Path:
    """The engine of that name, in `folder`."""
    folder.mkdir()
    if kind == "drafter":
        options = BuildOptions(target="sm_90a", prefill_chunk=64, max_seq_len=256, spec="dspark")
        build_engine(CHECKPOINT, folder / "engine", options)
        return folder / "engine"
    if kind == "inkling2":
        config = inkling2_config()
    else:
        config = loop_config(with_drafter=False) if kind == "loop" else CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    options = BuildOptions(target="sm_90a", weights="dummy", prefill_chunk=64, spec="none")
    build_engine(folder, folder / "engine", options)
    return folder / "engine"


def inkling2_config() -> dict[str, Any]:
    """The first layers of the small model, each with experts of another format than the one before.

    The last begins a block, and takes in what the block before has summed up.
    """
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    layers = config["layer_types"][:7]
    config = {name: value for name, value in config.items() if not name.startswith("dspark_")}
    formats = {
        f"model.layers.{layer}.mlp.experts": {"quant_algo": ("NVFP4", "MXFP8")[layer % 3]}
        for layer in range(len(layers))
        if layer % 3 < 2
    }
    return config | {
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "head_dim": 128,
        "swa_head_dim": 128,
        "d_rel": 16,
        "max_position_embeddings": 256,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": formats,
        },
    }


def run_steps(path: Path) -> None:
    """What runs under the sanitizer."""
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=5)
    with Engine.open(path) as engine, engine.session() as session:
        # Wide steps but those of a prompt give a row a token.
        widths = [s.num_tokens for s in engine.config.steps if s.num_rows == s.num_tokens > 1]
        assert widths, "the engine has no verify steps"
        session.prefill([(37 * i + i * i) % 1000 for i in range(75)], Sampling())
        for width in widths:
            session.step(list(range(width)), Sampling())
        session.rollback(session.length - 3)
        for token in range(3):
            session.step([token], Sampling())
            session.step([token], sampling)
        if engine.config.draft is not None:
            for given, is_coupled in ((Sampling(), True), (sampling, True), (sampling, False)):
                session.draft(5, given, coupled=is_coupled, wants_logits=not is_coupled)


def sanitize(tool: str, engine: Path, timeout: float) -> Report:
    """Run the steps of an engine under a tool, for at most `timeout` seconds."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool]]
    command += [sys.executable, __file__, "--steps-of", str(engine)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what runs under the tool
        output, _ = process.communicate()
        return Report(f"not done after {timeout:.0f} s", output.splitlines(), is_clean=False)
    lines = output.strip().splitlines()
    summaries = [line.strip("= ") for line in lines if "SUMMARY" in line]
    clean = [re.search(r"\b0 (errors|hazards)\b", summary) for summary in summaries]
    is_clean = process.returncode == 0 and bool(clean) and all(clean)
    summary = " ".join(summaries) or f"no summary, exit status {process.returncode}"
    return Report(summary, lines, is_clean)


def say(line: str) -> None:
    """Print at once: a run that is ended has told how far it came."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def sanitize_all(engines: list[str], tools: list[str], timeout: float) -> bool:
    """Run every tool on every engine and say what they find; whether all is clean."""
    is_clean = True
    with tempfile.TemporaryDirectory() as folder:
        for kind in engines:
            engine = build(kind, Path(folder) / kind)
            for tool in tools:
                start = time.monotonic()
                report = sanitize(tool, engine, timeout)
                say(f"{kind} {tool} ({time.monotonic() - start:.0f} s): {report.summary}")
                if not report.is_clean:
                    named = Counter(re.findall(r" at (\w+)\+0x", "\n".join(report.lines)))
                    say(f"named in its lines: {dict(named.most_common())}")
                    for line in report.lines[:MOST_LINES]:
                        say(line)
                is_clean &= report.is_clean
    return is_clean


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS), help="with commas")
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas")
    parser.add_argument("--timeout", type=float, default=120, help="seconds, of a tool's run")
    parser.add_argument("--steps-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps_of:
        run_steps(options.steps_of)
        return 0
    engines, tools = options.engines.split(","), options.tools.split(",")
    return int(not sanitize_all(engines, tools, options.timeout))


if __name__ == "__main__":
    sys.exit(main())
