"""What steps of an engine take on a machine, measured: the table that cost-aware widths go by.

`ink-bench engine ENGINE --costs` writes it into the engine folder, where it is no part of the
engine: the folder's configuration does not list it, and an engine copied to another machine should
be measured there. So a table names the engine and the device that it was measured with.
"""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from inkrt.errors import ConfigError, EngineFormatError
from inkrt.runtime.engine_file import EngineConfig, plan_file
from inkrt.runtime.spec.width import CostsByContext, RoundCosts

COSTS_NAME = "costs.json"


class CostTable(Struct, frozen=True, forbid_unknown_fields=True):
    """Times in seconds, by context.

    Attributes:
        engine: sha256 of the engine's first plan file.
        device: where it was measured, for people.
        contexts: tokens in front of the steps, rising.
        decode_s: of a plain step among others, by context.
        verify_s: by context, of a step that reads 1, 2, ... tokens and is waited for.
        draft_s: of the engine's draft step, by context; None without one.
        round_s: by context, of rounds that the device runs by itself, one behind the other: a
            plain step, then rounds that draft and verify 0, 1, 2, ... drafts; None where the host
            runs all rounds, from the steps above.
    """

    engine: str
    device: str
    contexts: tuple[int, ...]
    decode_s: tuple[float, ...]
    verify_s: tuple[tuple[float, ...], ...]
    draft_s: tuple[float, ...] | None
    round_s: tuple[tuple[float, ...], ...] | None = None

    @classmethod
    def read(cls, folder: Path, config: EngineConfig) -> Self | None:
        """The table of an engine; None if it has not been measured.

        Raises:
            EngineFormatError: the file is damaged or belongs to another engine.
        """
        path = folder / COSTS_NAME
        again = f"choose width=fixed or measure again with: ink-bench engine {folder} --costs"
        try:
            table = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineFormatError(f"{path} is damaged ({error}); {again}") from None
        if table.engine != engine_hash(config):
            raise EngineFormatError(f"{path} was measured with another engine; {again}")
        if problem := table._problem() or table._lacking(config):
            raise EngineFormatError(f"{path} is damaged ({problem}); {again}")
        return table

    def write(self, folder: Path) -> Path:
        """Write the table into an engine folder: the whole file or nothing.

        Raises:
            ConfigError: the folder cannot be written.
        """
        assert self._problem() is None, self._problem()
        path = folder / COSTS_NAME
        staged = folder / f".{COSTS_NAME}.tmp-{secrets.token_hex(4)}"
        try:
            with staged.open("wb") as file:
                file.write(self.encode())
                file.flush()
                os.fsync(file.fileno())
            staged.replace(path)
        except OSError as error:
            staged.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write {path} ({error.strerror}); make the engine folder writable"
            ) from None
        return path

    def encode(self) -> bytes:
        """The file's content."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def costs(self, most: int, *, with_draft_step: bool) -> CostsByContext:
        """Costs of rounds with up to `most` drafts that the host runs.

        Args:
            most: below the number of tokens of the widest measured step.
            with_draft_step: whether the engine's draft step runs in each.
        """
        draft_s: Sequence[float] = [0.0] * len(self.contexts)
        if with_draft_step:
            assert self.draft_s is not None, "no draft step was measured"
            draft_s = self.draft_s
        rows = [
            [draft + seconds for seconds in row[: most + 1]]
            for draft, row in zip(draft_s, self.verify_s, strict=True)
        ]
        return self._by_context(self.decode_s, rows, most)

    def device_costs(self, most: int) -> CostsByContext | None:
        """Costs of rounds with up to `most` drafts that the device runs; None if not measured."""
        if self.round_s is None:
            return None
        plain = [row[0] for row in self.round_s]
        return self._by_context(plain, [row[1 : most + 2] for row in self.round_s], most)

    def _by_context(
        self, plain: Sequence[float], rounds: Sequence[Sequence[float]], most: int
    ) -> CostsByContext:
        assert {len(row) for row in rounds} == {most + 1}, (rounds, most)
        costs = [RoundCosts(*row) for row in zip(plain, rounds, strict=True)]
        return CostsByContext(self.contexts, tuple(costs))

    def _lacking(self, config: EngineConfig) -> str | None:
        widths = len(self.verify_s[0])
        if widths != config.widest_verify:
            return f"times of {widths} widths, not of {config.widest_verify}"
        if (self.draft_s is None) != (config.draft is None):
            return "times of a draft step are where there is none, or the other way round"
        if self.round_s is not None and len(self.round_s[0]) != most_drafted(config) + 2:
            return f"rounds of {len(self.round_s[0]) - 1} widths, not of {most_drafted(config) + 1}"
        return None

    def _problem(self) -> str | None:
        count = len(self.contexts)
        columns = [self.decode_s, *zip(*self.verify_s, strict=False)]
        if self.draft_s is not None:
            columns.append(self.draft_s)
        if self.round_s is not None:
            if len({len(row) for row in self.round_s}) != 1:
                return "rows of different lengths"
            columns += zip(*self.round_s, strict=True)
        if not count or list(self.contexts) != sorted(set(self.contexts)):
            return "contexts do not rise"
        if self.contexts[0] < 0:
            return "contexts below 0"
        if len({len(row) for row in self.verify_s}) != 1 or any(len(c) != count for c in columns):
            return "rows of different lengths"
        if min(min(column) for column in columns) <= 0:
            return "times that are not above 0"
        return None


def most_drafted(config: EngineConfig) -> int:
    """Most drafts of a round with the engine's own drafter; 0 without one."""
    return min(config.draft.block_size, config.widest_verify - 1) if config.draft else 0


def engine_hash(config: EngineConfig) -> str:
    """What a table remembers of its engine."""
    return config.files[plan_file(0)].sha256
