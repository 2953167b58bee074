"""The token files and the packing of their documents into sequences of one length.

A data folder has train.npz and heldout.npz (`tokens` uint16 [N], `loss` uint8 [N]: 1 where a token
is to be predicted, `starts` int64: where documents begin), tokenizer.json and tasks.json.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EOS_TOKEN = "<|content_model_end_sampling|>"
OPEN_SEQUENCES = 64  # that packing looks at for a place


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What training knows of the tokenizer.

    Attributes:
        size: ids with a meaning, 0..size-1.
        special: id by text of every added token.
    """

    size: int
    special: dict[str, int]

    @property
    def padded_size(self) -> int:
        """Rows of the embedding: at least one more than tokens, for the drafter's mask."""
        return (self.size // 64 + 1) * 64

    @property
    def eos(self) -> int:
        """The id that ends a model's turn."""
        return self.special[EOS_TOKEN]


def read_vocabulary(folder: Path) -> Vocabulary:
    """Sizes and special tokens from a tokenizer.json."""
    values = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in values["added_tokens"]}
    ids = [*values["model"]["vocab"].values(), *special.values()]
    return Vocabulary(max(ids) + 1, special)


@dataclass(frozen=True, slots=True)
class Documents:
    """Token ids of several documents, one after the other."""

    tokens: NDArray[np.uint16]
    loss: NDArray[np.uint8]
    starts: NDArray[np.int64]

    def bounds(self) -> NDArray[np.int64]:
        """[documents + 1]: where each begins, and the end."""
        return np.append(self.starts, len(self.tokens)).astype(np.int64)

    def subset(self, chosen: NDArray[np.bool_]) -> "Documents":
        """The documents marked true."""
        bounds = self.bounds()
        lengths = np.diff(bounds)
        keep = np.repeat(chosen, lengths)
        starts = np.append(0, np.cumsum(lengths[chosen]))[:-1]
        return Documents(self.tokens[keep], self.loss[keep], starts)


def read_documents(path: Path) -> Documents:
    """One of the npz files."""
    with np.load(path) as arrays:
        return Documents(arrays["tokens"], arrays["loss"], arrays["starts"])


def split_kinds(documents: Documents, vocabulary: Vocabulary) -> dict[str, Documents]:
    """Chats, which begin with a role, and plain texts; kinds without documents are left out."""
    roles = [id_ for text, id_ in vocabulary.special.items() if text.startswith("<|message_")]
    is_chat = np.isin(documents.tokens[documents.starts], roles)
    kinds = {"text": ~is_chat, "chat": is_chat}
    return {kind: documents.subset(mask) for kind, mask in kinds.items() if mask.any()}


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of one length, each with whole documents and padding at its end.

    Attributes:
        tokens: int32 [N, S].
        loss: bool [N, S]; the first token of a document is never to be predicted.
        position: int32 [N, S], counted within the document.
        segment: int32 [N, S], the number of the document in its sequence; -1 for padding.
    """

    tokens: Tensor
    loss: Tensor
    position: Tensor
    segment: Tensor

    def to(self, device: torch.device) -> "Packed":
        """All of it on `device`."""
        return Packed(*(getattr(self, name).to(device) for name in Packed.__slots__))

    def pick(self, rows: Tensor) -> "Packed":
        """The sequences with these numbers."""
        return Packed(*(getattr(self, name)[rows] for name in Packed.__slots__))


def pack(documents: Documents, length: int, seed: int) -> Packed:
    """Put shuffled documents into sequences, each where it fits best among the open ones.

    A document longer than a sequence is cut into several.
    """
    pieces = []
    bounds = documents.bounds()
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        pieces += [(at, min(at + length, end)) for at in range(begin, end, length)]
    order = np.random.default_rng(seed).permutation(len(pieces))
    closed: list[list[tuple[int, int]]] = []
    opened: list[tuple[int, list[tuple[int, int]]]] = []  # room left and pieces
    for number in order.tolist():
        piece = pieces[number]
        size = piece[1] - piece[0]
        fitting = [(room, at) for at, (room, _) in enumerate(opened) if room >= size]
        if fitting:
            room, at = min(fitting)
            opened[at][1].append(piece)
            opened[at] = (room - size, opened[at][1])
            if room == size:
                closed.append(opened.pop(at)[1])
            continue
        if len(opened) == OPEN_SEQUENCES:
            fullest = min(range(len(opened)), key=lambda index: opened[index][0])
            closed.append(opened.pop(fullest)[1])
        opened.append((length - size, [piece]))
    closed += [content for _, content in opened]
    shape = (len(closed), length)
    tokens, loss = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    position, segment = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    for row, content in enumerate(closed):
        at = 0
        for number, (begin, end) in enumerate(content):
            place = slice(at, at + end - begin)
            tokens[row, place] = documents.tokens[begin:end]
            loss[row, place] = documents.loss[begin:end]
            loss[row, at] = False
            position[row, place] = np.arange(end - begin)
            segment[row, place] = number
            at += end - begin
    return Packed(*(torch.from_numpy(array) for array in (tokens, loss, position, segment)))


def say(line: str) -> None:
    """Print a line of a script's log at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
