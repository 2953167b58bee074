"""Hostile changes to the files of a checkpoint.

What is changed and how is left to a `random.Random`, which hypothesis draws (`st.randoms`).
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

Json = Any

# What a careless reader trips over.
_NUMBERS = [
    0, 1, -1, 2, 3, 7, 255, 65_536, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63, 2**64, 10**30, 0.5,
    -0.5, 1e-45, 1e-320, 1e38, 1e300,
]  # fmt: skip
_TEXTS = [
    "", "a", "\0", "\n", "\ud800", "../x", "/dev/zero", "x" * 5000, "BF16", "U8", "nvfp4", "NVFP4",
    "MXFP8", "flint", "inkling2", "*", "[", "(a+)+$", "1" * 5000, "é\u202e",
]  # fmt: skip
_KEYS = [*_TEXTS, "quantization_config", "quantized_layers", "layer_types", "dtype", "__metadata__"]
HOSTILE: list[Json] = [
    None, True, False, *_NUMBERS, *_TEXTS, [], {}, [[]], [None], [-1], [2**62, 2**62], ["a"] * 3,
    {"": None}, {"a": {"a": {"a": 1}}}, [0] * 4096,
]  # fmt: skip


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into a document."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def _edit(document: Json, path: tuple[Any, ...], kind: str, value: Json, key: str) -> Json:
    """The document with one change at a path."""
    if not path:
        return value
    document = json.loads(json.dumps(document))
    at = document
    for step in path[:-1]:
        at = at[step]
    last = path[-1]
    if kind == "delete":
        del at[last]
    elif kind == "add" and isinstance(at, dict):
        at[key] = value
    elif kind == "add":
        at.insert(last, value)
    elif kind == "copy":
        at[last] = [at[last], at[last]]
    elif kind == "number" and isinstance(at[last], int | float) and isinstance(value, int | float):
        at[last] = at[last] + value
    else:
        at[last] = value
    return document


def edited(value: Json, path: tuple[Any, ...], new: Json) -> Json:
    """The document with another value at a path."""
    return _edit(value, path, "set", new, "")


def document(random: Random, value: Json) -> bytes:
    """A JSON document with one to three changes."""
    for _ in range(random.randint(1, 3)):
        path = random.choice(list(places(value)))
        kind = random.choice(["set", "set", "number", "delete", "add", "copy"])
        value = _edit(value, path, kind, random.choice(HOSTILE), random.choice(_KEYS))
    return json.dumps(value).encode()


def blob(random: Random, data: bytes, within: int) -> bytes:
    """Bytes with some of the first `within` flipped, left out, doubled, or all behind one cut."""
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        if not out:
            break
        kind = random.choice(["flip", "flip", "flip", "flip", "set", "delete", "double", "cut"])
        place = random.randrange(min(within, len(out)))
        if kind == "flip":
            out[place] ^= 1 << random.randrange(8)
        elif kind == "set":
            out[place] = random.choice([0, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B])
        elif kind == "cut":
            del out[place:]
        else:
            end = place + random.randint(1, 9)
            out[place:end] = out[place:end] * (2 if kind == "double" else 0)
    return bytes(out)


def header_size(shard: bytes) -> int:
    """Bytes of a safetensors file before its data."""
    return 8 + int.from_bytes(shard[:8], "little")


def shard(random: Random, data: bytes) -> bytes:
    """A safetensors file with another document for a header, of the right length."""
    size = header_size(data)
    header = document(random, json.loads(data[8:size]))
    return len(header).to_bytes(8, "little") + header + data[size:]


def damaged(random: Random, name: str, data: bytes, header: int) -> bytes:
    """A file of a checkpoint, changed; of a GGUF file at most the first `header` bytes."""
    knows_format = random.random() < 0.6
    if name.endswith(".json"):
        if knows_format:
            return document(random, json.loads(data))
        return blob(random, data, len(data))
    if name.endswith(".safetensors"):
        return shard(random, data) if knows_format else blob(random, data, header_size(data))
    return blob(random, data, header)
