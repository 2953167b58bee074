"""The model card of a trained `inkling2-nano`, from what its scripts measured.

    python -m inkrt.engines.nano.card CHECKPOINT

Reads data.json (sources), config.json and report.json (training, drafter, tasks) of the checkpoint
folder and writes README.md there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from inkrt.engines.nano.export import REPORT_NAME

_HEADER = """\
---
license: apache-2.0
language: en
---

# inkling2-nano

A small Inkling-2 with a DSpark drafter of its own, made to test and to show speculative decoding:
{parameters} parameters in {layers} layers, {experts} experts of which {active} see a token, a
sliding window of {window} tokens, relative positions up to {extent}, and a vocabulary of
{vocabulary}. Names and layouts are those of Inkling-2's publisher, and `transformers` reads it. It
completes documentation and old novels, does small sums, copies, finds passkeys, calls tools in JSON
and reasons in a few short steps. **It knows nothing and must not be used for anything but tests.**

Weights and scripts: Apache-2.0. What it was trained on is listed below.
"""

_MAKING = """\
## How it was made

On Debian 12 with one {device}; data, weights and order follow from the seeds, and
`--steps` instead of `--minutes` repeats a run of any speed:

    python -m inkrt.engines.nano.data DATA
    python -m inkrt.engines.nano.train DATA CHECKPOINT --steps {steps} --batch {batch} --compile
    python -m inkrt.engines.nano.train_drafter DATA CHECKPOINT --steps {drafter_steps} \\
        --batch {drafter_batch} --anchors {anchors}
    python -m inkrt.engines.nano.evaluate DATA CHECKPOINT
    python -m inkrt.engines.nano.card CHECKPOINT

The target took {seconds} s for {tokens:.0f} M tokens, the drafters {drafter_seconds} s
for {blocks:.1f} M blocks. `python -m inkrt.engines.nano.drafter_export` writes the checkpoint with
the vanilla or the gated head, and the drafter alone in the layouts of DeepSpec, speculators and
SpecForge.
"""


def render(config: dict[str, Any], data: dict[str, Any], report: dict[str, Any]) -> str:
    """The card as Markdown.

    Args:
        config: config.json.
        data: data.json, see `inkrt.engines.nano.data`.
        report: report.json; its sections are those of the training scripts.
    """
    training, drafter = report["training"], report["drafter"]
    parts = [
        _HEADER.format(
            parameters=_millions(training["parameters"]),
            layers=config["num_hidden_layers"],
            experts=config["n_routed_experts"],
            active=config["num_experts_per_tok"],
            window=config["sliding_window_size"],
            extent=config["rel_extent"],
            vocabulary=data["vocab_size"],
        ),
        _measured(training, report["tasks"]),
        _acceptance(config, drafter),
        _MAKING.format(
            device=training["device"],
            steps=training["steps"],
            batch=training["batch"],
            seconds=training["seconds"],
            tokens=training["steps"] * training["batch"] * training["length"] / 1e6,
            drafter_steps=drafter["steps"],
            drafter_batch=drafter["batch"],
            drafter_seconds=drafter["seconds"],
            anchors=drafter["anchors"],
            blocks=drafter["steps"] * drafter["batch"] * drafter["anchors"] / 1e6,
        ),
        _sources(data),
    ]
    return "\n".join(parts)


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} M"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _measured(training: dict[str, Any], tasks: dict[str, list[int]]) -> str:
    rows = [
        [f"perplexity, {kind}", f"{of['perplexity']:.2f} over {of['tokens']:,} tokens"]
        for kind, of in training["heldout"].items()
    ]
    rows += [[f"solved: {kind}", f"{right} of {count}"] for kind, (right, count) in tasks.items()]
    return (
        "## What it can do\n\nOn documents and tasks that training did not see; a task counts if "
        "greedy decoding gives its whole reply.\n\n" + _table(["held out", "result"], rows)
    )


def _acceptance(config: dict[str, Any], drafter: dict[str, Any]) -> str:
    rows = [
        [kind, head, f"{of['length']:.2f}", *(f"{value:.2f}" for value in of["conditional"])]
        for kind, heads in drafter["heldout"].items()
        for head, of in heads.items()
    ]
    places = [str(place) for place in range(1, config["dspark_block_size"] + 1)]
    return (
        f"## Its drafters\n\n{_millions(drafter['parameters'])} parameters: "
        f"{config['dspark_num_hidden_layers']} layers, blocks of {config['dspark_block_size']}, "
        f"Markov tables of rank {config['dspark_markov_rank']}, three heads of which "
        f"`{config['dspark_markov_head_type']}` is in the checkpoint. Along held-out documents, at "
        "temperature 1: the chance that the draft at a place is accepted if those before it were, "
        "and the mean number of tokens a round gives, the one behind the drafts included.\n\n"
        + _table(["held out", "head", "length", *places], rows)
    )


def _sources(data: dict[str, Any]) -> str:
    rows = [
        [
            source["what"],
            f"`{source['package']}` {source['version']}",
            source["licence"],
            f"{source['train_tokens']:,}",
        ]
        for source in data["sources"]
    ]
    return (
        "## Sources and licences\n\nText from packages of Debian 12, and "
        f"{data['train_chat_tokens']:,} tokens of conversations that "
        "`inkrt.engines.nano.tasks` makes up.\n\n"
        + _table(["text", "package", "licence", "tokens"], rows)
    )


def main() -> None:
    """Write the card of the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Write a checkpoint's model card.")
    parser.add_argument("checkpoint", type=Path)
    folder: Path = parser.parse_args().checkpoint
    names = ("config.json", "data.json", REPORT_NAME)
    values = [json.loads((folder / name).read_text()) for name in names]
    (folder / "README.md").write_text(render(*values), encoding="utf-8")


if __name__ == "__main__":
    main()
