"""Builds the tokenizer, the training data and the evaluation tasks of the trained checkpoint.

    python -m inkrt.engines.nano.data OUT [--cache DIR]

The same Debian packages and seed give the same files:
    tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json
    train.npz, heldout.npz: tokens uint16 [N]; loss uint8 [N], 1 where the token is to be predicted;
        starts int64 [D] of documents; is_chat uint8 [D]
    tasks.json: prompts as token ids, with the answers
    data.json: sizes, and the sources with versions, licences and shares
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from inkrt.engines.nano import sources, tasks, tokenizer
from inkrt.engines.nano.chat import DEFAULT_EFFORT, Conversation, Rendered, render
from inkrt.engines.nano.tokenizer import TextEncoder

SEED = 20
CONTEXT = 2048
DISTANCES = (64, 128, 256, 512, 1024, 1900)
NUM_TASKS = 96  # of each kind; a multiple of the number of distances
# Samples of chat for training. Passkeys are long, so they are few.
NUM_CHATS = {
    "arithmetic": 24000,
    "copy": 8000,
    "tool_call": 5000,
    "reasoning": 16000,
    "passkey": 2400,
    "many": 2500,
}
HELDOUT_PERCENT = 2
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Be brief.",
    "Answer in few words.",
    "You help with small tasks.",
)

Document = tuple[list[int], list[int]]  # tokens, loss
Filler = Callable[[Random, int], str]


def is_heldout(document: str) -> bool:
    """Whether a document of plain text is kept from training; depends on its text alone."""
    return hashlib.sha256(document.encode()).digest()[0] * 100 < HELDOUT_PERCENT * 256


def make_filler(documents: Sequence[list[int]], encoder: TextEncoder) -> Filler:
    """A function that gives about as many tokens of text as asked for, of one document or more."""
    whole = [document for document in documents if len(document) > 64]

    def fill(random: Random, size: int) -> str:
        tokens: list[int] = []
        while len(tokens) < size:
            document = random.choice(whole)
            first = random.randrange(len(document) - 64)
            tokens += document[first : first + size - len(tokens)]
        # A cut may lie within a character.
        return encoder.decode(tokens).replace("\ufffd", "")

    return fill


def passkey(
    random: Random, fill: Filler, distance: int, *, room: int = CONTEXT - 128
) -> tasks.Task:
    """A passkey task with about `distance` tokens between the number and the question."""
    before = random.randrange(room - distance) if room > distance and random.random() < 0.5 else 0
    return tasks.passkey(random, fill(random, before), fill(random, distance))


def sample(kind: str, random: Random, fill: Filler, taken: frozenset[str]) -> Conversation:
    """A conversation for training; "many" are several tasks in one."""
    messages: list[dict[str, Any]] = []
    tools: tuple[dict[str, Any], ...] = ()
    effort = DEFAULT_EFFORT if random.random() < 0.8 else random.choice([0.0, 0.1, 0.2, 0.7, 0.99])
    if random.random() < 0.2:
        messages.append({"role": "system", "content": random.choice(SYSTEM_PROMPTS)})
    begin, end = tasks.small_talk(random)
    if kind == "many":
        todo = [
            tasks.fresh(random.choice(["arithmetic", "copy", "reasoning"]), random, taken)
            for _ in range(random.randint(1, 3))
        ]
        messages += begin
    elif kind == "passkey":
        distance = round(math.exp(random.uniform(math.log(16), math.log(1900))))
        task = passkey(random, fill, distance)
        while f"passkey {task.key}" in taken:
            task = passkey(random, fill, distance)
        todo = [task]
    else:
        todo = [tasks.fresh(kind, random, taken)]
    for task in todo:
        messages += [{"role": "user", "content": task.question}, task.reply(think=effort > 0)]
        tools = task.tools
    if kind == "many":
        messages += end
    if kind == "tool_call" and random.random() < 0.2:
        name = messages[-1]["tool_calls"][0]["function"]["name"]
        result = random.choice(["done", "ok", "failed", "not found"])
        said = "That is done." if result in ("done", "ok") else f"That did not work: {result}."
        messages += [
            {"role": "tool", "content": result, "name": name, "tool_call_id": "call_1"},
            {"role": "assistant", "content": said},
        ]
    return Conversation(messages, tools, effort)


def evaluation(encoder: TextEncoder, fill: Filler) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """The evaluation tasks, and their contents as "kind key", which training must not have."""
    random = Random(SEED + 1)
    found: list[tuple[tasks.Task, int | None]] = []
    taken: set[str] = set()
    for kind in tasks.GENERATORS:
        for _ in range(NUM_TASKS):
            task = tasks.fresh(kind, random, frozenset(taken))
            taken.add(f"{kind} {task.key}")
            found.append((task, None))
    for index in range(NUM_TASKS):
        distance = DISTANCES[index % len(DISTANCES)]
        task = passkey(random, fill, distance)
        while f"passkey {task.key}" in taken:
            task = passkey(random, fill, distance)
        taken.add(f"passkey {task.key}")
        found.append((task, distance))
    return [entry(task, distance, encoder) for task, distance in found], frozenset(taken)


def entry(task: tasks.Task, distance: int | None, encoder: TextEncoder) -> dict[str, Any]:
    """A task as tasks.json has it.

    Its prompt ends where the answer begins, `reply` are the tokens of the right answer to its end.
    """
    question = {"role": "user", "content": task.question}
    chat = Conversation([question], task.tools)
    prompt = render(chat, encoder, add_generation_prompt=True).tokens
    whole = render(Conversation([question, task.reply()], task.tools), encoder).tokens
    assert whole[: len(prompt)] == prompt
    out: dict[str, Any] = {
        "kind": task.kind,
        "key": task.key,
        "prompt": prompt,
        "reply": whole[len(prompt) :],
        "answer": task.answer,
    }
    if distance is not None:
        after = task.question.rpartition("\n")[0].partition(task.key)[2]
        out |= {"distance": distance, "measured_distance": len(encoder.encode(after))}
    return out


def save(path: Path, documents: Sequence[Document], is_chat: Sequence[bool]) -> int:
    """Write documents one after another; returns the number of tokens."""
    sizes = np.array([len(tokens) for tokens, _ in documents], np.int64)
    tokens = np.concatenate([np.array(t, np.uint16) for t, _ in documents])
    np.savez_compressed(
        path,
        tokens=tokens,
        loss=np.concatenate([np.array(loss, np.uint8) for _, loss in documents]),
        starts=np.cumsum(sizes) - sizes,
        is_chat=np.array(is_chat, np.uint8),
    )
    return len(tokens)


def chats(
    encoder: TextEncoder, fill: Filler, taken: frozenset[str], seed: int, share: float
) -> list[Document]:
    """A share of NUM_CHATS of conversations of every kind."""
    documents = []
    for place, (kind, count) in enumerate(NUM_CHATS.items()):
        random = Random(seed * 100 + place)
        for _ in range(round(count * share)):
            out: Rendered = render(sample(kind, random, fill, taken), encoder)
            if len(out.tokens) <= CONTEXT:
                documents.append((out.tokens, out.loss))
    return documents


def build(out: Path, cache: Path) -> dict[str, Any]:
    """Build everything; returns what data.json says.

    Args:
        out: folder to make.
        cache: where Debian packages are kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts = sources.load(cache)
    seen: set[str] = set()
    for text in texts:
        text.documents[:] = [d for d in dict.fromkeys(text.documents) if d not in seen]
        seen.update(text.documents)
    nothing: Filler = lambda _random, _size: ""  # noqa: E731
    spoken = [
        str(sample(kind, Random(place), nothing, frozenset()).messages)
        for place, kind in enumerate(list(tasks.GENERATORS) * 300)
    ]
    learned = tokenizer.train(
        [*spoken, *(d for text in texts for d in text.documents if not is_heldout(d))]
    )
    tokenizer.write_files(learned, out)
    encoder = TextEncoder(learned)
    end = encoder.special("endoftext")
    plain: dict[bool, list[list[int]]] = {False: [], True: []}
    about = []
    for text in texts:
        counts = {False: 0, True: 0}
        for document, ids in zip(text.documents, encoder.encode_many(text.documents), strict=True):
            heldout = is_heldout(document)
            plain[heldout].append([*ids, end])
            counts[heldout] += len(ids) + 1
        about.append(
            {
                "package": text.source.package,
                "version": text.version,
                "what": text.source.what,
                "licence": text.source.licence,
                "train_tokens": counts[False],
                "heldout_tokens": counts[True],
            }
        )
    # Without their ends, which would decode to nothing.
    fill = {part: make_filler([d[:-1] for d in plain[part]], encoder) for part in plain}
    entries, taken = evaluation(encoder, fill[True])
    report: dict[str, Any] = {
        "vocab_size": tokenizer.VOCAB_SIZE,
        "padded_vocab_size": tokenizer.PADDED_VOCAB_SIZE,
        "eos_token_id": encoder.special("content_model_end_sampling"),
        "seed": SEED,
        "sources": about,
    }
    for part, name, share in ((False, "train", 1.0), (True, "heldout", 0.01)):
        spoken_ids = chats(encoder, fill[part], taken, SEED + 2 + part, share)
        documents: list[Document] = [(ids, [1] * len(ids)) for ids in plain[part]]
        order = list(range(len(documents) + len(spoken_ids)))
        Random(SEED).shuffle(order)
        first_chat = len(documents)
        documents += spoken_ids
        is_chat = [place >= first_chat for place in order]
        report[f"{name}_tokens"] = save(
            out / f"{name}.npz", [documents[place] for place in order], is_chat
        )
        report[f"{name}_chat_tokens"] = sum(len(ids) for ids, _ in spoken_ids)
        report[f"{name}_documents"] = len(documents)
    (out / "tasks.json").write_text(json.dumps(entries) + "\n", encoding="utf-8")
    (out / "data.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def main() -> int:
    """Build into the folder that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m inkrt.engines.nano.data", description="Build tokenizer and training data."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--cache", type=Path, help="for Debian packages (default: OUT/packages)")
    options = parser.parse_args()
    try:
        report = build(options.out, options.cache or options.out / "packages")
    except (FileNotFoundError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
