"""Running a tower: inputs of any number of rows to feature rows, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.executor import Executor
from inkrt.runtime.tower_spec import TowerSpec


@dataclass(frozen=True, slots=True, eq=False)
class TowerInputs:
    """What a tower takes of one image or recording.

    Attributes:
        num_rows: feature rows that it gives: placeholders in the prompt.
        values: by input name, of the input's shape or shorter in the first dimension.
    """

    num_rows: int
    values: Mapping[str, NDArray[np.generic]]


def encode(
    executor: Executor, tower: TowerSpec, items: Sequence[TowerInputs], width: int
) -> NDArray[np.float32]:
    """Feature rows of images or recordings, one after the other, float32 [rows, D].

    Args:
        executor: of the engine.
        tower: which.
        items: if the tower is not rowwise, of as many rows as it has at most.
        width: D.
    """
    rows = [np.zeros((0, width), np.float32)]
    most = tower.steps[-1].num_rows
    for item in _joined(items) if tower.is_rowwise else items:
        if not tower.is_rowwise and item.num_rows > most:
            raise RequestError(
                f"an item has {item.num_rows} rows, tower {tower.kind} has steps of up to {most}; "
                "give a smaller one",
                param="images",
            )
        start = 0
        while start < item.num_rows:
            left = item.num_rows - start
            step = next((x for x in tower.steps if x.num_rows >= left), tower.steps[-1])
            stop = min(start + step.num_rows, item.num_rows)
            values = item.values
            if tower.is_rowwise:
                values = {name: value[start:stop] for name, value in values.items()}
            rows.append(executor.encode(tower.name_of(step), values, stop - start))
            start = stop
    return np.concatenate(rows)


def _joined(items: Sequence[TowerInputs]) -> list[TowerInputs]:
    """All as one, where their rows do not depend on each other: fewer steps."""
    if not items:
        return []
    return [
        TowerInputs(
            sum(item.num_rows for item in items),
            {name: np.concatenate([x.values[name] for x in items]) for name in items[0].values},
        )
    ]
