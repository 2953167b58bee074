"""Whatever is in the files of a checkpoint: it is built, or refused by one line of an InkError.

Nothing else is raised, nothing hangs, and no more memory is asked for than a tiny model needs.
Files are those of all tiny checkpoints: configurations, index, headers, metadata of quantization,
and the tokenizer's. Every example goes as far as `ink-build --dry-run` does before it traces; with
`-m slow` there are many more, every place of every configuration gets every hostile value, and odd
sizes are traced.
"""

import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mutations import HOSTILE, damaged, edited, header_size, places
from quantized_checkpoints import QUANTIZED, few_layers

from inkrt.builder import build
from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.dummy import dummy_weights
from inkrt.builder.options import BuildOptions
from inkrt.builder.pack import PackedTensor
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tiny.drafter import TinyDrafter
from inkrt.errors import ConfigError, EngineFormatError, InkError
from inkrt.runtime.chat import ChatTemplate
from inkrt.runtime.llm import _default_params
from inkrt.runtime.tokenizer import Tokenizer

OPTIONS = BuildOptions(max_verify_tokens=2, max_seq_len=32, prefill_chunk=16)
WITHOUT_WEIGHTS = BuildOptions(
    max_verify_tokens=2, max_seq_len=32, prefill_chunk=16, weights="dummy"
)
SECONDS, BYTES = 20, 3 * 2**30
TINY: dict[str, dict[str, Any]] = {
    **{model: {"model": model, **arguments} for model, arguments in QUANTIZED.items()},
    "inkling": {"model": "inkling"},
    "inkling2": {"model": "inkling2", "drafter": TinyDrafter("embedded", "rnn", False)},
    "inkling2-transformers": {"model": "inkling2", "layout": "transformers"},
    "flint-safetensors": {"model": "flint"},
}
CONFIGS = ("config.json", "hf_quant_config.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
)  # fmt: skip
GGUF_HEADER = 12_000  # bytes; all of the tiny one's
Files = dict[str, bytes]
Sound = Callable[[str], Files]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """Files of a tiny checkpoint."""

    @cache
    def make(name: str) -> Files:
        folder = tmp_path_factory.mktemp("sound") / "checkpoint"
        with few_layers():
            write_checkpoint(folder, **TINY[name])
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return make


class HangError(BaseException):
    """An example took SECONDS of the processor."""


class ReachedError(Exception):
    """A build has come to its first trace: nothing more depends on the checkpoint's files."""


@contextmanager
def bounds() -> Iterator[None]:
    """Raise HangError after SECONDS of work, and MemoryError beyond BYTES more of address space.

    Who waits without work runs into the limit of the whole test.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise HangError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, before)


def is_accepted(use: Callable[[], object]) -> bool:
    """Whether something gets along with files; any error but an InkError of one line is raised."""
    with bounds():
        try:
            use()
        except InkError as error:
            text = str(error)
            if "\n" in text or not text.isprintable():
                raise RuntimeError(f"not one line: {text!r}") from error
            return False
    return True


def can_be_built(folder: Path, options: BuildOptions = OPTIONS, *, traces: bool = False) -> bool:
    """Whether `ink-build --dry-run` accepts a checkpoint, as far as it is asked to go."""

    def reached(*_: object) -> NoReturn:
        raise ReachedError

    def dry_run() -> None:
        with suppress(ReachedError):
            build.prepare(open_checkpoint(folder), options)

    with pytest.MonkeyPatch.context() as patch:
        if not traces:
            patch.setattr(build, "tower_steps", reached)
        return is_accepted(dry_run)


def can_be_used(folder: Path) -> bool:
    """Whether an engine with these tokenizer files can be opened and asked."""

    def use() -> None:
        tokenizer = Tokenizer(folder / "tokenizer.json")
        template = ChatTemplate.load(folder)
        _default_params(folder)
        tokenizer.decode(tokenizer.encode("Hello <|end_message|>", parse_special=True))
        if template is not None:
            template.encode_chat([{"role": "user", "content": "hello"}], tokenizer)

    return is_accepted(use)


def write(folder: Path, files: Files) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def fuzz(examples: int) -> settings:
    """The same examples every time."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def examine_checkpoints(sound: Sound, folder: Path, names: list[str], examples: int) -> None:
    counts = {True: 0, False: 0}

    @fuzz(examples)
    @given(st.sampled_from(names), st.randoms(use_true_random=False))
    def examine(name: str, random: Random) -> None:
        files = sound(name)
        file = random.choice(sorted(file for file in files if file not in TOKENIZER_FILES))
        write(folder, files | {file: damaged(random, file, files[file], GGUF_HEADER)})
        counts[can_be_built(folder)] += 1

    examine()
    assert counts[False] > examples // 4  # changes do matter,
    assert counts[True] > 0  # and not everything is refused


def examine_tokenizers(sound: Sound, folder: Path, names: list[str], examples: int) -> None:
    counts = {True: 0, False: 0}

    @fuzz(examples)
    @given(st.sampled_from(names), st.randoms(use_true_random=False))
    def examine(name: str, random: Random) -> None:
        files = {file: sound(name)[file] for file in TOKENIZER_FILES}
        file = random.choice(TOKENIZER_FILES)
        changed = damaged(random, file, files[file], len(files[file]))
        write(folder, files | {file: changed})
        counts[can_be_used(folder)] += 1

    examine()
    assert counts[False] > examples // 4
    assert counts[True] > 0


@pytest.mark.parametrize("name", TINY)
def test_sound_ones_are_accepted(sound: Sound, tmp_path: Path, name: str) -> None:
    write(tmp_path / "checkpoint", sound(name))
    assert can_be_built(tmp_path / "checkpoint")
    assert can_be_used(tmp_path / "checkpoint")


def test_damaged_files(sound: Sound, tmp_path: Path) -> None:
    examine_checkpoints(sound, tmp_path / "checkpoint", list(TINY), 150)


def test_damaged_tokenizer_files(sound: Sound, tmp_path: Path) -> None:
    examine_tokenizers(sound, tmp_path / "files", ["inkling2", "flint"], 60)


@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "n_layers"])
def test_patches_that_no_tower_has(sound: Sound, tmp_path: Path, key: str) -> None:
    config = json.loads(sound("inkling")["config.json"])
    assert key in config["vision_config"]
    config["vision_config"][key] = 2**31 - 1
    write(tmp_path / "checkpoint", {"config.json": json.dumps(config).encode()})
    assert not can_be_built(tmp_path / "checkpoint", WITHOUT_WEIGHTS)


# What examples found, each for a mechanism that has been mended since.
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**31 - 1),
        ("num_hidden_layers", 65_536),
        ("n_routed_experts", 2**31 - 1),
        ("layer_types", ["hybrid"] * 100_000),
    ],
)
@pytest.mark.parametrize("name", ["inkling", "inkling2-quantized"])
def test_counts_that_no_model_has(
    sound: Sound, tmp_path: Path, name: str, key: str, value: object
) -> None:
    config = json.loads(sound(name)["config.json"])
    config["text_config"][key] = value
    write(tmp_path / "checkpoint", {"config.json": json.dumps(config).encode()})
    assert not can_be_built(tmp_path / "checkpoint", WITHOUT_WEIGHTS)


@pytest.mark.parametrize(
    "shard", ["", ".", "..", "../up", "/dev/zero", "a\0b", "a\nb", "\ud800", "x" * 300]
)
def test_names_of_shards_that_are_none(sound: Sound, tmp_path: Path, shard: str) -> None:
    files = sound("inkling")
    name = "model.safetensors.index.json"
    index = json.loads(files[name])
    index["weight_map"]["model.llm.norm.weight"] = shard
    write(tmp_path / "checkpoint", files | {name: json.dumps(index).encode()})
    assert not can_be_built(tmp_path / "checkpoint")


def test_a_tensor_whose_name_is_none(sound: Sound, tmp_path: Path) -> None:
    """It would make a message of two lines."""
    files = {name: data for name, data in sound("inkling").items() if "index" not in name}
    for name, data in files.items():
        if name.endswith(".safetensors"):
            size = header_size(data)
            header = data[8:size].replace(b"model.visual.final_norm", b"model.visual\\nfinal_norm")
            files[name] = len(header).to_bytes(8, "little") + header + data[size:]
    assert sum(data != sound("inkling")[name] for name, data in files.items()) == 1
    write(tmp_path / "checkpoint", files)
    assert not can_be_built(tmp_path / "checkpoint")


def test_a_long_array_in_a_gguf_header(sound: Sound, tmp_path: Path) -> None:
    """A length of 2^56 flags, which is one flipped bit, is not gone through."""
    files = sound("flint")
    (name,) = (file for file in files if file.endswith(".gguf"))
    data = bytearray(files[name])
    key = b"general.tensor_extra.prec_a4"
    length = data.index(key) + len(key) + 8
    assert 0 < int.from_bytes(data[length : length + 8], "little") < 10_000
    data[length + 7] ^= 1
    write(tmp_path / "checkpoint", files | {name: bytes(data)})
    assert not can_be_built(tmp_path / "checkpoint")


def test_rows_that_no_model_has() -> None:
    """Of dummy weights, which are made while a dry run is under way."""
    with pytest.raises(ConfigError, match=r"weight norm is \[2147483647\] by config\.json"):
        dummy_weights([PackedTensor("norm", (2**31 - 1,), torch.float32)])


def test_two_lines_would_be_noticed() -> None:
    class UnescapedError(EngineFormatError):
        __str__ = Exception.__str__

    def use() -> NoReturn:
        raise UnescapedError("one\ntwo")

    with pytest.raises(RuntimeError, match="not one line"):
        is_accepted(use)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TINY)
def test_many_damaged_files(sound: Sound, tmp_path: Path, name: str) -> None:
    examine_checkpoints(sound, tmp_path / "checkpoint", [name], 2000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_damaged_tokenizer_files(sound: Sound, tmp_path: Path) -> None:
    examine_tokenizers(sound, tmp_path / "files", ["inkling2", "flint"], 2000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [OPTIONS, WITHOUT_WEIGHTS], ids=["weights", "no_weights"])
@pytest.mark.parametrize("name", TINY)
def test_every_place_of_a_configuration(
    sound: Sound, tmp_path: Path, name: str, options: BuildOptions
) -> None:
    """Every hostile value there, and one at a time, so that nothing else hides what it does."""
    files, folder = sound(name), tmp_path / "checkpoint"
    if options.weights == "dummy":
        files = {file: data for file, data in files.items() if file in CONFIGS}
    write(folder, files)
    for file in (file for file in CONFIGS if file in files):
        document = json.loads(files[file])
        for path in places(document):
            for value in HOSTILE:
                (folder / file).write_text(json.dumps(edited(document, path, value)))
                can_be_built(folder, options)
        (folder / file).write_bytes(files[file])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["inkling-nvfp4", "inkling2-quantized", "flint-safetensors"])
def test_odd_sizes_are_traced_or_refused(sound: Sound, tmp_path: Path, name: str) -> None:
    """Least and largest numbers at every place, to the end of a dry run without weights."""
    folder, document = tmp_path / "checkpoint", json.loads(sound(name)["config.json"])
    options = replace(WITHOUT_WEIGHTS, max_verify_tokens=1)
    write(folder, {file: data for file, data in sound(name).items() if file in CONFIGS})
    counts = {True: 0, False: 0}
    for path in places(document):
        at = document
        for step in path:
            at = at[step]
        if isinstance(at, bool) or not isinstance(at, int | float):
            continue
        for value in (1, 3, 2**31 - 1) if isinstance(at, int) else (1e300, 1e-45):
            (folder / "config.json").write_text(json.dumps(edited(document, path, value)))
            counts[can_be_built(folder, options, traces=True)] += 1
    assert min(counts.values()) > 10
