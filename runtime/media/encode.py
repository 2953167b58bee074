"""Running a tower: inputs of any number of rows to feature rows, step by step."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.executor import Executor
from inkrt.runtime.media.rows import MEDIA_NAMES
from inkrt.runtime.tower_spec import TowerSpec

# By input name, [rows, ...]: what a tower takes of one image or recording.
TowerInputs = Mapping[str, NDArray[np.generic]]


def num_rows(inputs: TowerInputs) -> int:
    """Feature rows that they give."""
    return len(next(iter(inputs.values())))


def check_rows(tower: TowerSpec, inputs: TowerInputs) -> None:
    """Check that a tower can take one image or recording.

    Raises:
        RequestError: it has no rows, or too many.
    """
    count, most = num_rows(inputs), tower.sizes[-1]
    name = MEDIA_NAMES[tower.kind]
    if count == 0:
        raise RequestError(f"{name} have one that is empty", param=name)
    if count > most and not tower.is_rowwise:
        raise RequestError(
            f"{name} have one of {count} tokens, the engine's {tower.kind} tower takes {most} at "
            f"most; make it smaller",
            param=name,
        )


def encode(
    executor: Executor, tower: TowerSpec, items: Sequence[TowerInputs], width: int
) -> NDArray[np.float32]:
    """Feature rows of images or recordings, one after the other, float32 [rows, D].

    Args:
        executor: of the engine.
        tower: which.
        items: each checked by `check_rows`.
        width: D.
    """
    pieces = [np.zeros((0, width), np.float32)]
    for item in _joined(items) if tower.is_rowwise else items:
        count, start = num_rows(item), 0
        while start < count:
            left = count - start
            size = next((size for size in tower.sizes if size >= left), tower.sizes[-1])
            stop = min(start + size, count)
            part = {name: values[start:stop] for name, values in item.items()}
            pieces.append(executor.encode(tower.step_of(size), part, stop - start))
            start = stop
    return np.concatenate(pieces)


def _joined(items: Sequence[TowerInputs]) -> list[TowerInputs]:
    """All as one, where their rows do not depend on each other: fewer steps."""
    if not items:
        return []
    return [{name: np.concatenate([item[name] for item in items]) for name in items[0]}]
