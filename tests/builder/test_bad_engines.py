"""Damaged, foreign and outdated engine folders are refused by name when they are opened."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_model import Damage, edit_config

from inkrt.errors import DeviceError, EngineFormatError, EngineMismatchError, InkError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import FORMAT_VERSION, plan_file, read_config

WEIGHTS = "rank0-00001-of-00001.safetensors"
PLANS = plan_file(0)
# {folder}, {rebuild} and {size} stand for what is known when the test runs.
CASES: dict[str, tuple[type[InkError], str, Damage]] = {}


def expect(name: str, error: type[InkError], message: str, damage: Damage) -> None:
    CASES[name] = (error, message, damage)


def config(edit: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: edit_config(folder, edit)


def write(content: bytes) -> Damage:
    return lambda folder: (folder / "config.json").write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


for name in (WEIGHTS, PLANS, "tokenizer.json"):
    expect(
        f"missing {name}",
        EngineFormatError,
        f"engine {{folder}} is damaged: {name} is missing; copy it again or rebuild it with: "
        "{rebuild}",
        lambda folder, name=name: (folder / name).unlink(),  # type: ignore[misc]
    )
expect(
    "truncated weights",
    EngineFormatError,
    f"engine {{folder}} is damaged: {WEIGHTS} has {{size-1}} bytes, {{size}} expected (truncated "
    "copy?); copy it again or rebuild it with: {rebuild}",
    cut,
)
expect(
    "several problems",
    EngineFormatError,
    "engine {folder} is damaged: chat_template.jinja is missing and 2 more problems; copy it again "
    "or rebuild it with: {rebuild}",
    lambda folder: [
        (folder / name).unlink()
        for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
    ],
)
expect(
    "damaged plan",
    EngineFormatError,
    f"engine {{folder}} is damaged: {PLANS} has a wrong sha256 (damaged); copy it again or rebuild "
    "it with: {rebuild}",
    lambda folder: _replace_first_byte_of_plan(folder, 0xC1),
)
expect(
    "other thing than a plan",
    EngineFormatError,
    f"engine {{folder}} is damaged: {PLANS} has a wrong sha256 (damaged); copy it again or rebuild "
    "it with: {rebuild}",
    lambda folder: _replace_first_byte_of_plan(folder, 0x05),
)
expect(
    "damaged header of plans",
    EngineFormatError,
    f"engine {{folder}} is damaged: {PLANS} has a wrong sha256 (damaged); copy it again or rebuild "
    "it with: {rebuild}",
    lambda folder: _replace_byte(folder / PLANS, 5, 0xFF),
)
expect(
    "damaged header of weights",
    EngineFormatError,
    f"{{folder}}/{WEIGHTS} is damaged (Error while deserializing header: header too large); copy "
    "the engine again or rebuild it with: {rebuild}",
    lambda folder: _replace_byte(folder / WEIGHTS, 5, 0xFF),
)
expect(
    "no config",
    EngineFormatError,
    "{folder} is not an engine: cannot read config.json (No such file or directory); make one "
    "with: ink-build CHECKPOINT -o {folder}",
    lambda folder: (folder / "config.json").unlink(),
)
expect(
    "cut config",
    EngineFormatError,
    "{folder}/config.json is damaged (Input data was truncated); copy the engine again or rebuild "
    "it",
    write(b'{"format": "ink-engine", '),
)
expect(
    "binary config",
    EngineFormatError,
    "{folder}/config.json is damaged (JSON is malformed: invalid character (byte 0)); copy the "
    "engine again or rebuild it",
    write(b"\x80\x81"),
)
expect(
    "config without a field",
    EngineFormatError,
    "{folder}/config.json is damaged (Object missing required field `state`); copy the engine "
    "again or rebuild it",
    config(lambda content: content.pop("state")),
)
expect(
    "config with one more field",
    EngineFormatError,
    "{folder}/config.json is damaged (Object contains unknown field `more`); copy the engine again "
    "or rebuild it",
    config(lambda content: content.update(more=1)),
)
expect(
    "config with another type",
    EngineFormatError,
    "{folder}/config.json is damaged (Expected `int`, got `str` - at `$.tp_size`); copy the engine "
    "again or rebuild it",
    config(lambda content: content.update(tp_size="1")),
)
expect(
    "newer format",
    EngineMismatchError,
    f"{{folder}} has engine format version {FORMAT_VERSION + 1}, this inkrt reads "
    f"{FORMAT_VERSION}; upgrade inkrt",
    config(lambda content: content.update(format_version=FORMAT_VERSION + 1, more=1)),
)
expect(
    "older format",
    EngineMismatchError,
    f"{{folder}} has engine format version {FORMAT_VERSION - 1}, this inkrt reads "
    f"{FORMAT_VERSION}; rebuild it with: {{rebuild}}",
    config(lambda content: content.update(format_version=FORMAT_VERSION - 1, state=None)),
)
expect(
    "other version of an operator",
    EngineMismatchError,
    "engine {folder} calls operator moe version 99, this inkrt has version 1; rebuild it with: "
    "{rebuild}",
    config(lambda content: content["plugins"].update(moe=99)),
)
expect(
    "unknown operator",
    EngineMismatchError,
    "engine {folder} calls operator conjure version 1, this inkrt has none; rebuild it with: "
    "{rebuild}",
    config(lambda content: content["plugins"].update(conjure=1)),
)


def _replace_byte(path: Path, at: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)


def _replace_first_byte_of_plan(folder: Path, value: int) -> None:
    content = (folder / PLANS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    start = header["plan/decode"]["data_offsets"][0]
    _replace_byte(folder / PLANS, 8 + size + start, value)


@pytest.fixture
def copy(engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine, tmp_path / "copy"))


@pytest.mark.parametrize("name", CASES)
def test_refusal(engine: Path, copy: Path, name: str) -> None:
    error, message, damage = CASES[name]
    damage(copy)
    with pytest.raises(InkError) as caught:
        Engine.open(copy)
    size = (engine / WEIGHTS).stat().st_size
    expected = {
        "{folder}": str(copy),
        "{rebuild}": read_config(engine).rebuild_command,
        "{size}": str(size),
        "{size-1}": str(size - 1),
    }
    for key, value in expected.items():
        message = message.replace(key, value)
    assert type(caught.value) is error
    assert str(caught.value) == message
    assert "\n" not in message


@pytest.mark.parametrize("file", [WEIGHTS, PLANS, "tokenizer.json"])
def test_one_other_bit_is_found_by_hashes(engine: Path, copy: Path, file: str) -> None:
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / file).write_bytes(content)
    with pytest.raises(EngineFormatError) as caught:
        Engine.open(copy, verify=True)
    assert str(caught.value) == (
        f"engine {copy} is damaged: {file} has a wrong sha256 (damaged); copy it again or rebuild "
        f"it with: {read_config(engine).rebuild_command}"
    )


def test_another_target_is_refused(copy: Path) -> None:
    edit_config(copy, lambda content: content.update(target="sm_70"))
    # Without bindings, without a GPU, or with another one: what is missing depends on the machine.
    with pytest.raises((EngineMismatchError, DeviceError)) as caught:
        Engine.open(copy)
    assert str(caught.value).startswith(f"engine {copy} was built for sm_70, ")


@pytest.mark.parametrize("kind", ["checkpoint", "list"])
def test_what_is_no_engine_is_refused(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    folder = checkpoint if kind == "checkpoint" else tmp_path
    if kind == "list":
        write(b"[1, 2]")(folder)
    with pytest.raises(EngineFormatError) as caught:
        Engine.open(folder)
    assert str(caught.value) == (
        f"{folder}/config.json does not describe an engine (no format 'ink-engine'); if {folder} "
        f"is a checkpoint, build it first: ink-build {folder} -o ENGINE"
    )


def damage_at_random(copy: Path, file: str, size: int) -> list[str]:
    """Names of what opening raises, after one flipped bit each in the first bytes of a file."""
    sound = (copy / file).read_bytes()
    generator = random.Random(8)
    raised = []
    for _ in range(100):
        damaged = bytearray(sound)
        damaged[generator.randrange(min(size, len(sound)))] ^= 1 << generator.randrange(8)
        (copy / file).unlink()  # not in place: the file may still be mapped
        (copy / file).write_bytes(damaged)
        try:
            Engine.open(copy).close()
        except Exception as error:
            raised.append(type(error).__name__)
        else:
            raised.append("nothing")
    return raised


def test_damaged_plans_never_run(copy: Path) -> None:
    assert set(damage_at_random(copy, PLANS, 2**30)) == {"EngineFormatError"}


def test_damaged_headers_of_weights_never_crash(copy: Path) -> None:
    header = 8 + int.from_bytes((copy / WEIGHTS).read_bytes()[:8], "little")
    raised = set(damage_at_random(copy, WEIGHTS, header))
    assert raised <= {"EngineFormatError", "nothing"}
