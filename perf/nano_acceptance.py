"""Acceptance of the trained drafter at temperature 1: as rounds find it, and as p and q say.

    python perf/nano_acceptance.py DATA CHECKPOINT ENGINE... --commit HASH [-o FILE.json]

Engines are of that checkpoint, one for each head. Each continues held-out texts and answers chat
tasks by rounds of both rules. What should be accepted behind each anchor is computed apart from the
engine, by the training code in float32 from the distributions p of target and q of drafter, along
the tokens x that came behind the anchor, however they were accepted: they are drawn from p. With
f(x) = q(x) / p(x), at least i drafts are accepted with probability

    probabilistic: E of P_i f(x_1)..f(x_i) with P_i = min(1, P_{i-1} / f(x_i)); given all but x_i
                   that is f(x_1)..f(x_{i-1}) times the sum over x of min(q(x), P_{i-1} p(x))
    coupled:       E of c_1..c_i, c_j = 1 / (p(x_j) times the sum over y of max(p(y) / p(x_j),
                   q(y) / q(x_j))), the chance that shared noise draws x_j from q if it does from p

Rounds and prediction differ by noise only; its size is estimated from the prompts, which are
independent. The last column is what `train_drafter` reports, from 1 - TV along the tokens, at the
same anchors: it is no prediction of a rule, only near to one.
"""

import argparse
import datetime
import json
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkrt.engines.nano import corpus, export
from inkrt.engines.nano.drafter import Drafter
from inkrt.engines.nano.drafter_export import read_drafter
from inkrt.engines.nano.model import Nano
from inkrt.engines.nano.parts import plain_rows
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.spec.config import SpeculativeConfig

COUNTED = 40  # tokens behind a prompt in which anchors count
SHORTEST, LONGEST = 48, 256  # prompts
Round = tuple[int, int]  # place of the anchor, drafts accepted


def main() -> int:
    """Print and write both; 1 if they are more than 4 standard errors apart."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("engines", type=Path, nargs="+")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = export.read_model(options.checkpoint, torch.float32).eval().requires_grad_(False)
    drafter = read_drafter(options.checkpoint, torch.float32).eval().requires_grad_(False)
    prompts = {
        "text": texts(options.data, options.texts),
        "chat": tasks(options.data, options.tasks),
    }
    objects, is_far = [], False
    say(f"{'':<28}{'rounds':>8}{'found':>8}{'p and q':>9}{'error':>8}{'trained':>9}")
    for folder in options.engines:
        with Engine.open(folder) as engine:
            assert engine.config.draft is not None, f"{folder} has no drafter"
            head = engine.config.draft.head
            for kind, rule in ((k, r) for k in prompts for r in ("probabilistic", "coupled")):
                row = measure(engine, target, drafter, prompts[kind], rule)
                name = f"{head}, {kind}, {rule}"
                say(
                    f"{name:<28}{row['rounds']:>8}{row['found']:>8.3f}{row['expected']:>9.3f}"
                    f"{row['error']:>8.3f}{row['teacher_forced']:>9.3f}"
                )
                is_far |= abs(row["found"] - row["expected"]) > 4 * row["error"]
                of = {"checkpoint": engine.config.checkpoint_fingerprint}
                objects.append({"workload": f"nano drafter at T=1, {name}"} | row | of)
    shared = {
        "unit": "tokens a round",
        "command": "python perf/nano_acceptance.py DATA CHECKPOINT ENGINE "
        f"--texts {options.texts} --tasks {options.tasks}",
        "commit": options.commit,
        "device": "cpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if options.out is not None:
        content = json.dumps([each | shared for each in objects], indent=1)
        options.out.write_text(content + "\n", encoding="utf-8")
    return int(is_far)


def texts(data: Path, count: int) -> list[list[int]]:
    """Beginnings of held-out texts."""
    kinds = corpus.split_kinds(
        corpus.read_documents(data / "heldout.npz"), corpus.read_vocabulary(data)
    )
    documents, generator = kinds["text"], random.Random(1)
    bounds = documents.bounds().tolist()
    begins = [a for a, b in pairwise(bounds) if b - a >= LONGEST]
    chosen = [begins[i * len(begins) // count] for i in range(count)]
    return [
        documents.tokens[begin : begin + generator.randint(SHORTEST, LONGEST)].tolist()
        for begin in chosen
    ]


def tasks(data: Path, count: int) -> list[list[int]]:
    """Chat tasks of every kind that are not too long."""
    given = json.loads((data / "tasks.json").read_text(encoding="utf-8"))
    prompts = [task["prompt"] for task in given if len(task["prompt"]) <= 2 * LONGEST]
    return [prompts[i * len(prompts) // count] for i in range(count)]


def measure(
    engine: Engine, target: Nano, drafter: Drafter, prompts: Sequence[list[int]], rule: Any
) -> dict[str, Any]:
    """Acceptance lengths, over the anchors of all rounds that count."""
    sums = []  # by prompt: rounds, accepted, expected, expected by 1 - TV
    for number, prompt in enumerate(prompts):
        tokens, rounds = speculate(engine, prompt, number, rule)
        anchors = [anchor for anchor, _ in rounds]
        predicted, by_distance = predict(
            target, drafter, engine.config.draft.head, tokens, anchors, rule
        )
        accepted = sum(number for _, number in rounds)
        sums.append((len(rounds), accepted, predicted.sum(), by_distance.sum()))
    counts, accepted, expected, by_distance = np.array(sums, np.float64).T
    total = counts.sum()
    excess = accepted - expected
    spread = excess - counts * excess.sum() / total
    return {
        "rounds": int(total),
        "found": round(1 + accepted.sum() / total, 4),
        "expected": round(1 + expected.sum() / total, 4),
        "error": round(float(np.sqrt((spread**2).sum())) / total, 4),
        "teacher_forced": round(1 + by_distance.sum() / total, 4),
    }


def speculate(
    engine: Engine, prompt: list[int], seed: int, rule: Any
) -> tuple[list[int], list[Round]]:
    """Generate by rounds; those whose anchor is among the first tokens and before the end token.

    Whether a round counts is known before it begins, so that leaving others out is no choice.
    """
    sampling = Sampling(temperature=1.0, seed=seed)
    speculation = SpeculativeConfig("dspark", accept=rule, width="fixed").resolve(
        engine.folder, engine.config
    )
    assert speculation is not None
    speculator, block = speculation.speculator(), speculation.num_draft_tokens
    rounds: list[Round] = []
    with engine.session() as session:
        output = session.prefill(prompt, sampling, wants_logits=False)
        tokens = [*prompt, int(output.tokens[-1])]
        counted = len(prompt) + COUNTED
        while len(tokens) < counted + block + 1:
            anchor = len(tokens) - 1
            ends = engine.config.model.eos_token_ids
            if any(token in ends for token in tokens[len(prompt) :]):
                counted = min(counted, anchor)
            step = speculator.run(session, tokens, sampling, 100)
            assert step.drafted == block
            tokens += step.tokens
            if anchor < counted:
                rounds.append((anchor, len(step.tokens) - 1))
    return tokens, rounds


@torch.no_grad()
def predict(
    target: Nano, drafter: Drafter, head: str, tokens: list[int], anchors: list[int], rule: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accepted drafts behind each anchor that the rule should give, and those by 1 - TV."""
    if not anchors:
        return np.zeros(0), np.zeros(0)
    line = torch.tensor([tokens])
    rows, output = plain_rows(line), target(line, taps=drafter.config.target_layer_ids)
    hidden = drafter(
        target, output.taps, line, rows.position, rows.segment, torch.tensor([anchors])
    )[0]
    places = torch.tensor(anchors)[:, None] + torch.arange(drafter.config.block_size)
    p = target.logits(output.final[0, places]).double().softmax(-1)
    q = drafter.draft(head, target, hidden, line[0, places])[0].double().softmax(-1)
    drawn = line[0, places + 1]
    by_distance = torch.minimum(p, q).sum(-1).cumprod(-1).sum(-1)
    chances = _coupled(p, q, drawn) if rule == "coupled" else _probabilistic(p, q, drawn)
    return chances.sum(-1).numpy(), by_distance.numpy()


def _coupled(p: Tensor, q: Tensor, drawn: Tensor) -> Tensor:
    """[A, G]: at least so many drafts are accepted, given the tokens of the target."""
    ours, theirs = p.gather(-1, drawn[..., None]), q.gather(-1, drawn[..., None])
    both = 1 / torch.maximum(p / ours, q / theirs).sum(-1)
    return (both / ours.squeeze(-1)).cumprod(-1)


def _probabilistic(p: Tensor, q: Tensor, drawn: Tensor) -> Tensor:
    """[A, G]: at least so many drafts are accepted, see above."""
    ratio = (q.gather(-1, drawn[..., None]) / p.gather(-1, drawn[..., None])).squeeze(-1)
    share, weight = torch.ones(len(p)).double(), torch.ones(len(p)).double()
    chances = []
    for i in range(p.shape[1]):
        chances.append(weight * torch.minimum(q[:, i], share[:, None] * p[:, i]).sum(-1))
        share = (share / ratio[:, i]).clamp_max(1.0)
        weight = weight * ratio[:, i]
    return torch.stack(chances, -1)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
