"""An open engine: the checked folder, its executor and its sessions."""

from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from inkrt.errors import InkError
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
        """The engine's chat template, loaded on first use; None if the folder has none."""
        from inkrt.runtime.chat import ChatTemplate  # jinja2 is slow to import

        return ChatTemplate.load(self.folder)

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
