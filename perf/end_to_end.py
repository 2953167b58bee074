"""Tokens per second that a user gets at a context of 8192, beside the GPU time of the same step.

    ink-build FOLDER_WITH_CONFIG -o ENGINE --target sm_90a --weights dummy
    python perf/end_to_end.py ENGINE --commit HASH [-o perf/results/end-to-end-h200.json]

The prompt is so long that the mean context of the tokens generated is 8192; reading it does not
count. `LLM.stream` runs here, `ink-run` as a command, both without drafts. An engine without a
tokenizer gets one of its vocabulary's size, so that every token makes text. The step's time is the
median of graph replays before and after.
"""

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flint import TARGETS
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders, models, pre_tokenizers

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.errors import EngineMismatchError
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.executor.cuda_timing import Timer
from inkrt.runtime.tokenizer import Tokenizer

CONTEXT = 8192
MAX_RATIO = 1.03
NUM_REPLAYS = 200
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 1},
    "greedy with stop strings": {"temperature": 0.0, "stop": ["\n\nUser:", "\n\nObservation:"]},
}


def main() -> int:
    """Measure, print a table, write the figures; 1 if one is over 3 % above the step's time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--tokens", type=int, default=512, help="generated per request")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = linked_engine(options.engine, Path(temporary))
        with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
            executor = llm.engine.executor
            if not isinstance(executor, CudaExecutor):
                raise EngineMismatchError(f"{options.engine} is not an engine for a GPU")
            device, model = executor.device_name, llm.engine.config.model.model_type
            stream_ms(llm, 64, REQUESTS["greedy"])  # warms up
            times = {}
            for name, request in REQUESTS.items():
                before = graph_ms(llm, executor, request)
                token_ms = stream_ms(llm, options.tokens, request)
                after = graph_ms(llm, executor, request)
                times[name] = token_ms, statistics.median(before + after)
        times["ink-run"] = ink_run_ms(folder, options.tokens), times["greedy"][1]
    targets: dict[str, float | None] = dict.fromkeys(("floor", "must", "goal"))
    if model == "flint":
        limits = TARGETS["decode", CONTEXT]
        targets = {name: round(1e3 / ms, 1) for name, ms in zip(targets, limits, strict=True)}
    objects = []
    for name, (token_ms, step_ms) in times.items():
        ratio = token_ms / step_ms
        figures = f"{1e3 / token_ms:8.1f} tokens/s, {token_ms:.4f} ms a token, {step_ms:.4f} a step"
        say(f"{name:<26} {figures}: {ratio:.4f}")
        shared = {
            "command": f"python perf/end_to_end.py ENGINE --tokens {options.tokens}",
            "commit": options.commit,
            "device": device,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        kind = "Flint NVFP4" if model == "flint" else model
        workload = f"{kind} generation at {CONTEXT}, {name}"
        objects.append(
            {"workload": workload, "value": round(1e3 / token_ms, 1), "unit": "tokens/s"}
            | targets
            | shared
        )
        objects.append(
            {"workload": f"{workload}, over the step", "value": round(ratio, 4), "unit": "ratio"}
            | {"floor": 1.0, "must": MAX_RATIO, "goal": 1.0, **shared}
        )
    if options.out is not None:
        options.out.write_text(json.dumps(objects, indent=1) + "\n", encoding="utf-8")
    return int(any(token_ms > MAX_RATIO * step_ms for token_ms, step_ms in times.values()))


def linked_engine(engine: Path, folder: Path) -> Path:
    """A folder that links to the engine's files, and has a tokenizer."""
    for path in engine.resolve().iterdir():
        (folder / path.name).symlink_to(path)
    if not (folder / "tokenizer.json").exists():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_tokenizer(folder / "tokenizer.json", config["model"]["vocab_size"])
    return folder


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: a token for each byte, and words that encoding never makes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    while len(vocab) < vocab_size:
        vocab[f"Ġw{len(vocab):x}"] = len(vocab)
    tokenizer = TokenizerFile(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def prompt_tokens(num_generated: int) -> int:
    """Length of a prompt behind which the generated tokens have a mean context of CONTEXT."""
    return CONTEXT - num_generated // 2


def stream_ms(llm: LLM, num_tokens: int, request: dict[str, Any]) -> float:
    """Milliseconds per token of `LLM.stream`, from its first token to its last."""
    vocab_size = llm.engine.config.model.vocab_size
    prompt = [(17 + 31 * i + i * i) % vocab_size for i in range(prompt_tokens(num_tokens))]
    params = SamplingParams(**request, max_tokens=num_tokens, ignore_eos=True)
    ends = []
    for delta in llm.stream(prompt, params):
        ends.append(time.perf_counter())
        assert len(delta.token_ids) == 1, delta
    assert len(ends) == num_tokens, f"{len(ends)} tokens, a stop string came up"
    return (ends[-1] - ends[0]) / (num_tokens - 1) * 1e3


def graph_ms(llm: LLM, executor: CudaExecutor, request: dict[str, Any]) -> list[float]:
    """GPU milliseconds of single decode steps on the state that the last request has left."""
    sampling = Sampling(**{name: value for name, value in request.items() if name != "stop"})
    config = llm.engine.config
    pages = list(range(-(-config.max_seq_len // config.state.page_tokens)))
    step_input = StepInput([17], CONTEXT, 0, pages, sampling)
    return [us / 1e3 for us in Timer(executor).step("decode", step_input, NUM_REPLAYS)]


def ink_run_ms(folder: Path, num_tokens: int) -> float:
    """Milliseconds per token as `ink-run --stats` prints them."""
    tokenizer = Tokenizer(folder / "tokenizer.json")
    text = "The sea is blue because water swallows red light. " * CONTEXT
    prompt = tokenizer.decode(tokenizer.encode(text)[: prompt_tokens(num_tokens)])
    command = [sys.executable, "-m", "inkrt.commands.run", str(folder), "--raw", "--stats"]
    command += ["--spec", "none", "--temperature", "0", "--max-tokens", str(num_tokens)]
    result = subprocess.run(command, input=prompt, text=True, check=True, capture_output=True)
    pattern = r"(\d+) prompt tokens, (\d+) output tokens, .* then ([\d.]+) tokens/s"
    found = re.search(pattern, result.stderr)
    assert found, f"ink-run printed no rate: {result.stderr}"
    say(f"ink-run: {found[0]}")
    return 1e3 / float(found[3])


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
