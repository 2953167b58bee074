"""Speed of nano with its drafter and without, on the same prompts at temperature 1.

    ink-build CHECKPOINT -o ENGINE --costs
    python perf/nano_speed.py DATA ENGINE --commit HASH [-o FILE.json]

Every prompt is answered in turn by all ways, so that a machine that slows down slows all of them.
Time counts from the first token, as in `ink-run --stats`; texts go on for a fixed number of tokens,
tasks end where the model ends them.
"""

import argparse
import datetime
import json
import platform
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from nano_acceptance import say, tasks, texts

from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.spec.config import SpeculativeConfig

WAYS = {
    "plain": SpeculativeConfig("none"),
    "coupled, width cost": SpeculativeConfig("dspark", width="cost"),
    "coupled, width fixed": SpeculativeConfig("dspark", width="fixed"),
    "probabilistic, width cost": SpeculativeConfig("dspark", width="cost", accept="probabilistic"),
    "probabilistic, width fixed": SpeculativeConfig(
        "dspark", width="fixed", accept="probabilistic"
    ),
}


def main() -> None:
    """Print and write tokens/s of all ways."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tasks", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    prompts = {
        "text": texts(options.data, options.texts),
        "chat": tasks(options.data, options.tasks),
    }
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    steps: dict[tuple[str, str], int] = defaultdict(int)
    with ExitStack() as stack:
        models = {
            way: stack.enter_context(LLM(options.engine, speculative=config))
            for way, config in WAYS.items()
        }
        for kind, given in prompts.items():
            for seed, prompt in enumerate(given):
                params = SamplingParams(
                    temperature=1.0,
                    seed=seed,
                    ignore_eos=kind == "text",
                    max_tokens=options.max_tokens,
                )
                for way, llm in models.items():
                    sizes, spent = answer(llm, prompt, params)
                    tokens[kind, way] += sum(sizes)
                    steps[kind, way] += len(sizes)
                    seconds[kind, way] += spent
    rows = []
    for (kind, way), count in tokens.items():
        speed, plain = count / seconds[kind, way], tokens[kind, "plain"] / seconds[kind, "plain"]
        length = count / steps[kind, way]
        say(
            f"{kind:<6}{way:<28}{speed:>8.1f} tokens/s{speed / plain:>7.2f}x plain, "
            f"{length:.2f} tokens a step"
        )
        rows.append(
            {
                "workload": f"nano at T=1, {kind}, {way}",
                "value": round(speed, 2),
                "unit": "tokens/s",
                "over_plain": round(speed / plain, 3),
                "tokens_per_step": round(length, 3),
                "tokens": count,
            }
        )
    shared = {
        "command": f"python perf/nano_speed.py DATA ENGINE --texts {options.texts} "
        f"--tasks {options.tasks} --max-tokens {options.max_tokens}",
        "commit": options.commit,
        "device": f"cpu ({platform.machine()}), one thread",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if options.out is not None:
        content = json.dumps([row | shared for row in rows], indent=1)
        options.out.write_text(content + "\n", encoding="utf-8")


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """How many tokens each step gave behind the prompt's, and the seconds they took together."""
    begun, sizes = 0.0, []
    for delta in llm.stream(prompt, params):
        if begun:
            sizes.append(len(delta.token_ids))
        elif delta.token_ids:
            begun = time.perf_counter()
    return sizes, time.perf_counter() - begun


if __name__ == "__main__":
    main()
