"""The engine folder: its layout, its metadata and its checks.

The format has this one owner: the builder writes folders through these types and functions and the
runtime reads them. Nothing here needs torch or a GPU, and nothing found in a folder is executed.

    config.json                        EngineConfig; a person can read it
    rank0.engine                       safetensors container: "plan/<step>" is a msgpack Plan,
                                       "ratio/<step>" one of a ratio test,
                                       "cubin/<hash>" the code of GPU kernels,
                                       "template/<kind>" what fills dummy weights
    rank0-00001-of-0000N.safetensors   packed weights of rank 0, each file 4 GiB or one tensor
    tokenizer.json, ...                copied from the checkpoint
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from inkrt.errors import EngineFormatError, EngineMismatchError
from inkrt.runtime.plan import Plan
from inkrt.runtime.tower_spec import TowerSpec

FORMAT = "ink-engine"
FORMAT_VERSION = 6
CONFIG_NAME = "config.json"
DRAFT_STEP = "draft"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


class StateSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One state buffer of a rank.

    Attributes:
        name: buffer name, as plans spell it.
        kind: "paged": [num_pages, page_tokens, ...], addressed through a page table;
            "ring": [num_slots, ring_tokens, ...], position p stands in row p mod ring_tokens.
        shape: in elements.
        dtype: as in plans.
    """

    name: str
    kind: Literal["paged", "ring"]
    shape: tuple[int, ...]
    dtype: str


class StateLayout(Struct, frozen=True, forbid_unknown_fields=True):
    """State of all sessions on one rank.

    Attributes:
        num_slots: sessions that can be open at once.
        page_tokens: positions per page.
        num_pages: pages shared by all sessions; page ids are 0..num_pages-1.
        rollback_tokens: a session can always go back this many positions from the furthest one it
            has written; beyond that a ring may have lost what is needed.
        buffers: every state buffer.
    """

    num_slots: int
    page_tokens: int
    num_pages: int
    rollback_tokens: int
    buffers: tuple[StateSpec, ...]


class StepSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A step that the engine has a plan for; see `Plan` for the fields."""

    name: str
    num_tokens: int
    num_rows: int


class DraftSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The drafter of an engine, whose plan is DRAFT_STEP.

    Attributes:
        method: kind of drafter.
        block_size: tokens it drafts at once.
        head: kind of its sequential head; None for MTP heads, which have none.
        has_confidence: whether it says how likely each draft is to be accepted.
    """

    method: Literal["dspark", "mtp"]
    block_size: int
    head: Literal["vanilla", "gated", "rnn"] | None
    has_confidence: bool

    @property
    def step(self) -> StepSpec:
        """One token, the anchor, to a row for each draft."""
        return StepSpec(DRAFT_STEP, 1, self.block_size)


class ModelInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """What a user of the engine must know of its model.

    Attributes:
        vocab_size: size of the logits: tokens that can be sampled. Larger ids may stand in prompts.
        num_embeddings: prompt token ids are below this.
        eos_token_ids: generation ends after one of these.
    """

    model_type: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_embeddings: int
    eos_token_ids: tuple[int, ...]


class MemoryTable(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on one rank (all ranks need the same).

    Attributes:
        weights: packed weights.
        paged_state: all pages of all paged buffers.
        ring_state: all rings of all slots.
        arena: scratch memory of the largest step.
        kept: what launches of all steps keep from run to run, tables of addresses and the inbox for
            other ranks.
        paged_bytes_per_token: what one more token of context costs.
    """

    weights: int
    paged_state: int
    ring_state: int
    arena: int
    kept: int
    paged_bytes_per_token: int

    @property
    def total(self) -> int:
        """Bytes of a rank, but for the inputs of steps and padding between tensors."""
        return self.weights + self.paged_state + self.ring_state + self.arena + self.kept


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and sha256 (hex) of one file of the folder."""

    size: int
    sha256: str


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `config.json`.

    Attributes:
        format: always FORMAT.
        format_version: FORMAT_VERSION of the writer.
        inkrt_version: package version of the writer.
        target: "cpu", "sm_90a", ...: what the engine runs on.
        tp_size: ranks.
        max_seq_len: positions a session can hold, prompt and output together.
        steps: of the model; that of the drafter is not among them.
        draft: the drafter, if there is one.
        build: the effective build configuration, as the builder spells it.
        rebuild_command: the command line that makes this engine again.
        plugins: version of every plugin that the plans call.
        checkpoint_fingerprint: sha256 over names, sizes and headers of the checkpoint's files.
        files: every other file of the folder.
        towers: what reads images and recordings; their steps are not among `steps`.
    """

    format: str
    format_version: int
    inkrt_version: str
    model: ModelInfo
    target: str
    tp_size: int
    max_seq_len: int
    steps: tuple[StepSpec, ...]
    state: StateLayout
    memory: MemoryTable
    build: dict[str, Any]
    rebuild_command: str
    plugins: dict[str, int]
    checkpoint_fingerprint: str
    files: dict[str, FileEntry]
    draft: DraftSpec | None = None
    towers: tuple[TowerSpec, ...] = ()

    @property
    def all_steps(self) -> tuple[StepSpec, ...]:
        """Steps that there is a plan for."""
        draft = () if self.draft is None else (self.draft.step,)
        return (*self.steps, *draft, *self.tower_steps)

    @property
    def tower_steps(self) -> tuple[StepSpec, ...]:
        """Steps of the towers."""
        sizes = (size for tower in self.towers for size in tower.named_rows.items())
        return tuple(StepSpec(name, num_rows, num_rows) for name, num_rows in sizes)

    @property
    def widest_verify(self) -> int:
        """Tokens of the widest step with a row for each; 1 if nothing can be verified."""
        return max((s.num_tokens for s in self.steps if s.num_rows == s.num_tokens), default=1)


def plan_file(rank: int) -> str:
    """Name of the file with the plans of `rank`."""
    return f"rank{rank}.engine"


def weight_files(config: EngineConfig, rank: int) -> list[str]:
    """Names of the weight files of `rank`, in order; empty with `--weights dummy`."""
    return sorted(name for name in config.files if name.startswith(f"rank{rank}-"))


def encode_config(config: EngineConfig) -> bytes:
    """`config.json` as bytes: sorted, indented, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(config, order="sorted"), indent=2) + b"\n"


class EngineCode(Struct, frozen=True):
    """The content of a rank's `.engine` file.

    Attributes:
        plans: by step name.
        cubins: code of GPU kernels by name; empty on the CPU.
        template_of: without weight files, the template that fills a weight, by the weight's name.
        templates: bytes that are repeated over a weight, by name.
        ratio_tests: by the name of a step that verifies drafts, what judges them behind it in
            rounds that a GPU runs by itself; see `builder.ratio_tests`.
    """

    plans: dict[str, Plan]
    cubins: dict[str, bytes] = msgspec.field(default_factory=dict)
    template_of: dict[str, str] = msgspec.field(default_factory=dict)
    templates: dict[str, bytes] = msgspec.field(default_factory=dict)
    ratio_tests: dict[str, Plan] = msgspec.field(default_factory=dict)

    @property
    def all_plans(self) -> dict[str, Plan]:
        """Steps and ratio tests, by the names of the plans."""
        return self.plans | {plan.name: plan for plan in self.ratio_tests.values()}


def encode_code(code: EngineCode) -> bytes:
    """A `.engine` file as bytes."""
    tensors = {
        f"{kind}/{name}": np.frombuffer(msgspec.msgpack.encode(plan, order="sorted"), np.uint8)
        for kind, plans in (("plan", code.plans), ("ratio", code.ratio_tests))
        for name, plan in sorted(plans.items())
    }
    for kind, blobs in (("cubin", code.cubins), ("template", code.templates)):
        for name, data in sorted(blobs.items()):
            tensors[f"{kind}/{name}"] = np.frombuffer(data, np.uint8)
    template_of = msgspec.msgpack.encode(code.template_of, order="sorted")
    tensors["template_of"] = np.frombuffer(template_of, np.uint8)
    return safetensors_numpy.save(tensors, metadata={"format": FORMAT})


def read_config(folder: Path) -> EngineConfig:
    """Read `config.json` and check that this version understands it.

    Raises:
        EngineFormatError: not an engine, or the file is damaged.
        EngineMismatchError: an engine of another format version.
    """
    path = folder / CONFIG_NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise EngineFormatError(
            f"{folder} is not an engine: cannot read {CONFIG_NAME} ({error.strerror}); "
            f"make one with: ink-build CHECKPOINT -o {folder}"
        ) from None
    try:
        header = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise EngineFormatError(
            f"{path} is damaged ({error}); copy the engine again or rebuild it"
        ) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise EngineFormatError(
            f"{path} does not describe an engine (no format {FORMAT!r}); "
            f"if {folder} is a checkpoint, build it first: ink-build {folder} -o ENGINE"
        )
    version = header.get("format_version")
    if version != FORMAT_VERSION:
        command = header.get("rebuild_command", "ink-build CHECKPOINT -o ENGINE")
        mend = (
            "upgrade inkrt"
            if isinstance(version, int) and version > FORMAT_VERSION
            else f"rebuild it with: {command}"
        )
        raise EngineMismatchError(
            f"{folder} has engine format version {version}, this inkrt reads {FORMAT_VERSION}; "
            f"{mend}"
        )
    try:
        return msgspec.json.decode(raw, type=EngineConfig)
    except msgspec.ValidationError as error:
        raise EngineFormatError(
            f"{path} is damaged ({error}); copy the engine again or rebuild it"
        ) from None


def check_files(folder: Path, config: EngineConfig, *, verify_hashes: bool = False) -> list[str]:
    """Problems of the folder's files, one sentence each: missing, wrong size, wrong hash.

    Args:
        folder: the engine folder.
        config: its configuration.
        verify_hashes: also read every file and compare its sha256. Plans and kernels are small and
            decide what runs, so theirs are always compared.
    """
    problems = []
    for name, entry in sorted(config.files.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry.size:
            problems.append(f"{name} has {size} bytes, {entry.size} expected (truncated copy?)")
        elif (verify_hashes or path.suffix == ".engine") and sha256_of(path) != entry.sha256:
            problems.append(f"{name} has a wrong sha256 (damaged)")
    return problems


def require_files(folder: Path, config: EngineConfig, *, verify_hashes: bool = False) -> None:
    """Raise EngineFormatError if `check_files` finds anything."""
    require_sound(folder, config, check_files(folder, config, verify_hashes=verify_hashes))


def require_sound(folder: Path, config: EngineConfig, problems: Sequence[str]) -> None:
    """Raise EngineFormatError if there are problems."""
    if problems:
        more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        raise EngineFormatError(
            f"engine {folder} is damaged: {problems[0]}{more}; "
            f"copy it again or rebuild it with: {config.rebuild_command}"
        )


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_plans(folder: Path, rank: int) -> dict[str, Plan]:
    """The plans of one rank by step name; see `read_code`."""
    return read_code(folder, rank).plans


def read_code(folder: Path, rank: int) -> EngineCode:
    """The content of a rank's `.engine` file.

    Raises:
        EngineFormatError: the file is missing or damaged.
    """
    path = folder / plan_file(rank)
    try:
        tensors = safetensors_numpy.load_file(path)
        plans, ratio_tests = (
            {
                name: msgspec.msgpack.decode(data, type=Plan)
                for name, data in _under(prefix, tensors).items()
            }
            for prefix in ("plan/", "ratio/")
        )
        template_of = msgspec.msgpack.decode(tensors["template_of"].tobytes(), type=dict[str, str])
        return EngineCode(
            plans,
            _under("cubin/", tensors),
            template_of,
            _under("template/", tensors),
            ratio_tests,
        )
    except (OSError, KeyError, SafetensorError, msgspec.MsgspecError) as error:
        raise EngineFormatError(
            f"{path} is damaged ({error}); copy the engine again or rebuild it"
        ) from None


def _under(prefix: str, tensors: Mapping[str, Any]) -> dict[str, bytes]:
    return {
        name.removeprefix(prefix): data.tobytes()
        for name, data in tensors.items()
        if name.startswith(prefix)
    }
