"""How many tasks of tasks.json a trained `inkling2-nano` solves by greedy decoding.

    python -m inkrt.engines.nano.evaluate DATA CHECKPOINT

A task is solved if greedy decoding gives its reply token for token, end included. That is so
exactly if every token of the reply is the likeliest after the prompt and the reply's tokens before
it, which one forward over prompt and reply tells.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from inkrt.engines.nano import export
from inkrt.engines.nano.corpus import say
from inkrt.engines.nano.model import Nano


@torch.no_grad()
def solved(model: Nano, tasks: list[dict[str, Any]], batch: int) -> list[bool]:
    """Whether each task's `reply` is what greedy decoding gives after its `prompt`."""
    device = model.embed.weight.device
    order = sorted(
        range(len(tasks)), key=lambda i: len(tasks[i]["prompt"]) + len(tasks[i]["reply"])
    )
    is_solved = [False] * len(tasks)
    for begin in range(0, len(order), batch):
        numbers = order[begin : begin + batch]
        texts = [tasks[number]["prompt"] + tasks[number]["reply"] for number in numbers]
        length = max(map(len, texts))
        # Padding comes after the text, where a causal model cannot see it.
        tokens = torch.tensor([text + [0] * (length - len(text)) for text in texts], device=device)
        best = model.logits(model(tokens).final).argmax(-1).tolist()
        for row, number in enumerate(numbers):
            reply, at = tasks[number]["reply"], len(tasks[number]["prompt"])
            is_solved[number] = best[row][at - 1 : at - 1 + len(reply)] == reply
    return is_solved


def accuracies(tasks: list[dict[str, Any]], is_solved: list[bool]) -> dict[str, tuple[int, int]]:
    """Solved and all tasks by kind, passkeys also by distance."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for task, one in zip(tasks, is_solved, strict=True):
        groups[task["kind"]].append(one)
        if "distance" in task:
            groups[f"{task['kind']} at {task['distance']}"].append(one)
    return {name: (sum(values), len(values)) for name, values in groups.items()}


def main() -> None:
    """Print the accuracies and put them into the checkpoint's report."""
    parser = argparse.ArgumentParser(description="Task accuracy of inkling2-nano.")
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = export.read_model(options.checkpoint, dtype).to(device).eval()
    tasks = json.loads((options.data / "tasks.json").read_text())
    found = accuracies(tasks, solved(model, tasks, options.batch))
    for name, (right, count) in found.items():
        say(f"{name}: {right}/{count} = {right / count:.1%}")
    export.add_report(options.checkpoint, "tasks", {k: list(v) for k, v in found.items()})


if __name__ == "__main__":
    main()
