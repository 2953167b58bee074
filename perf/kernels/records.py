"""What the scripts of this folder print: one JSON object a line."""

import json
import sys


def emit(record: dict[str, str | int | float | bool]) -> None:
    """Print a record at once."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


class Tally:
    """Counts checks and prints those that fail; with `verbose`, all."""

    def __init__(self, *, verbose: bool) -> None:
        self.failed = self.total = 0
        self._verbose = verbose

    def __call__(self, name: str, ok: bool, detail: str) -> None:
        """Take in one check."""
        self.total += 1
        self.failed += not ok
        if not ok or self._verbose:
            emit({"check": name, "ok": ok, "detail": detail})

    def sum_up(self, name: str) -> None:
        """Print the counts so far."""
        emit({"checks": name, "failed": self.failed, "total": self.total})
