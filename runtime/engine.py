"""An open engine: the checked folder, its executor and its sessions."""

from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from inkrt.errors import EngineMismatchError, InkError, RequestError
from inkrt.runtime.code_check import code_problems
from inkrt.runtime.engine_file import (
    EngineConfig,
    check_files,
    read_code,
    read_config,
    require_files,
)
from inkrt.runtime.executor import Executor, open_executor
from inkrt.runtime.executor.peers import RankSlice
from inkrt.runtime.session import Session
from inkrt.runtime.state import StateManager
from inkrt.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inkrt.runtime.chat import ChatTemplate


class Engine:
    """An engine ready to run. Made by `Engine.open`; not thread-safe.

    Attributes:
        folder: the engine folder.
        config: its configuration.
        states: owner of slots and pages.
        executor: runs its steps; sessions share it.
    """

    def __init__(self, folder: Path, config: EngineConfig, executor: Executor) -> None:
        self.folder = folder
        self.config = config
        self.executor = executor
        self.states = StateManager(config.state, config.max_seq_len, config.rebuild_command)

    @classmethod
    def open(
        cls, folder: str | Path, *, verify: bool = False, rank_slice: str | None = None
    ) -> Self:
        """Check an engine folder and load it.

        Args:
            folder: written by ink-build.
            verify: also compare the sha256 of every file.
            rank_slice: "R/N" runs rank R of N alone on one GPU, what it sends to others coming back
                to itself, to time it; it gives no tokens. None runs all ranks.

        Raises:
            EngineFormatError: damaged, or not an engine.
            EngineMismatchError: this machine or this version cannot run it.
            CapacityError: it does not fit into memory.
            ConfigError: `rank_slice` is none.
        """
        part = None if rank_slice is None else RankSlice.parse(rank_slice)
        folder = Path(folder)
        config = read_config(folder)
        require_files(folder, config, verify_hashes=verify)
        return cls(folder, config, open_executor(folder, config, part))

    @staticmethod
    def check(folder: str | Path, *, verify: bool = False) -> list[str]:
        """Problems of an engine folder, one sentence each; needs neither torch nor a GPU.

        Args:
            folder: written by ink-build.
            verify: also compare the sha256 of every file.
        """
        folder = Path(folder)
        try:
            config = read_config(folder)
            problems = check_files(folder, config, verify_hashes=verify)
            if not problems:
                for rank in range(config.tp_size):
                    problems += code_problems(config, rank, read_code(folder, rank))
        except InkError as error:
            return [str(error)]
        return problems

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer, loaded on first use; None if the folder has none."""
        path = self.folder / "tokenizer.json"
        return Tokenizer(path) if path.is_file() else None

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The chat template, loaded on first use; None if the folder has none. May be set."""
        from inkrt.runtime.chat import ChatTemplate  # jinja2 is slow to import

        return ChatTemplate.load(self.folder)

    def refit(self, source: str | Path, *, draft_checkpoint: str | Path | None = None) -> None:
        """Replace all weights by those of another checkpoint of the same shapes.

        Everything is checked before anything changes: an error leaves the engine as it was. Its
        folder stays as it is.

        Args:
            source: a checkpoint, which is built with the options of this engine beside its folder,
                or an engine folder that was built so.
            draft_checkpoint: of the drafter, if the engine was built with one.

        Raises:
            RequestError: sessions are open, whose state comes from the old weights.
            EngineMismatchError: more than weights would change, or the executor cannot do it.
            BuildError: the checkpoint cannot be built like this engine.
            EngineFormatError: the engine folder is damaged.
        """
        from inkrt.runtime import refit

        layout = self.states.layout
        if self.states.is_closed:
            raise RequestError("the engine is closed; open it again", param="engine")
        if count := layout.num_slots - self.states.num_free_slots:
            raise RequestError(
                f"{count} sessions are open, whose state comes from the old weights; close them, "
                "then refit",
                param="engine",
            )
        if not self.executor.can_refit:
            raise EngineMismatchError(
                f"engine {self.folder} is for {self.config.target}, this version replaces weights "
                f"on the cpu only; build another engine and open it"
            )
        source = Path(source)
        refit.require_folder(source)
        if refit.is_engine(source):
            self._refit(source)
            return
        draft = None if draft_checkpoint is None else Path(draft_checkpoint)
        with refit.built(source, self.folder, self.config, draft) as folder:
            self._refit(folder)

    def _refit(self, folder: Path) -> None:
        from inkrt.runtime.refit import require_alike

        config = require_alike(folder, self.folder, self.config)
        self.executor.refit(folder, config)
        fingerprint = config.checkpoint_fingerprint
        self.config = replace(self.config, checkpoint_fingerprint=fingerprint)

    def session(self) -> Session:
        """Open an empty session.

        Raises:
            CapacityError: all slots are in use.
            RequestError: the engine is closed.
        """
        return Session(self.executor, self.states, self.config, self.states.open())

    def close(self) -> None:
        """Release all memory; sessions can only be closed afterwards. May be called again."""
        if not self.states.is_closed:
            self.states.is_closed = True
            self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
