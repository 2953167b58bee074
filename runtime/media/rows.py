"""Feature rows of a prompt: what stands in place of the embeddings of placeholder tokens.

They come from the towers (`runtime.media.encode`) or from a caller's own encoder. A model sees a
row of an image like any other of the prompt: attention stays causal and nothing is scaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.tower_spec import Kind, TowerSpec

# Fields of a request.
MEDIA_NAMES: dict[Kind, str] = {"vision": "images", "audio": "audio"}


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """Rows at some of the tokens of a list.

    Attributes:
        places: int64 [n], ascending indices of tokens.
        rows: float32 [n, D].
    """

    places: NDArray[np.int64]
    rows: NDArray[np.float32]

    def within(self, start: int, stop: int) -> "FeatureRows | None":
        """Those of tokens start..stop-1, with indices from `start`; None if there are none."""
        first, last = np.searchsorted(self.places, (start, stop))
        if first == last:
            return None
        return FeatureRows(self.places[first:last] - start, self.rows[first:last])


def place_rows(
    tokens: Sequence[int], rows: Mapping[Kind, NDArray[np.float32]], config: EngineConfig
) -> FeatureRows:
    """Give every placeholder its row, in order.

    Args:
        tokens: of a prompt.
        rows: by the kind of the tower, float32 [n, D]: those of all images, one after the other,
            and of all recordings. Placeholders of a kind that is absent keep their embeddings.
        config: of the engine.

    Raises:
        RequestError: there are more or fewer placeholders than rows, rows of another width or not
            finite, or the engine has no such tower.
    """
    places: list[NDArray[np.int64]] = []
    chosen: list[NDArray[np.float32]] = []
    for kind, given in rows.items():
        name, tower = MEDIA_NAMES[kind], require_tower(kind, config)
        found = np.flatnonzero(np.asarray(tokens) == tower.token_id)
        values = np.asarray(given, np.float32)
        if values.ndim != 2 or values.shape[1] != config.model.hidden_size:
            raise RequestError(
                f"{name} have features of shape {list(values.shape)}, they must be [rows, "
                f"{config.model.hidden_size}]",
                param=name,
            )
        if len(found) != len(values):
            raise RequestError(
                f"{name} have {len(values)} feature rows, but the prompt has {len(found)} "
                f"placeholders (token {tower.token_id}); give one placeholder for each row",
                param=name,
            )
        if not np.isfinite(values).all():
            raise RequestError(f"{name} have features that are not finite", param=name)
        places.append(found)
        chosen.append(values)
    if not places:
        return FeatureRows(np.zeros(0, np.int64), np.zeros((0, config.model.hidden_size), "f4"))
    joined = np.concatenate(places)
    order = np.argsort(joined)
    return FeatureRows(joined[order], np.concatenate(chosen)[order])


def check_features(features: FeatureRows, num_tokens: int, config: EngineConfig) -> None:
    """Check that an engine can take feature rows at some of `num_tokens` tokens.

    Raises:
        RequestError: it has no towers, or the rows are no rows of these tokens.
    """
    places, rows, width = features.places, features.rows, config.model.hidden_size
    if not config.towers:
        raise RequestError(
            "features cannot be read, this engine was built without towers; build it from a "
            "checkpoint that has them, with --towers auto and --target cpu",
            param="features",
        )
    if rows.shape != (len(places), width):
        raise RequestError(
            f"features of {len(places)} tokens have rows of shape {list(rows.shape)}, they must be "
            f"[{len(places)}, {width}]",
            param="features",
        )
    if len(places) and not (
        places[0] >= 0 and places[-1] < num_tokens and (np.diff(places) > 0).all()
    ):
        raise RequestError(
            f"features have places that are not ascending indices of the {num_tokens} tokens",
            param="features",
        )


def require_tower(kind: Kind, config: EngineConfig) -> TowerSpec:
    """The tower of a kind.

    Raises:
        RequestError: the engine has none.
    """
    for tower in config.towers:
        if tower.kind == kind:
            return tower
    name = MEDIA_NAMES[kind]
    raise RequestError(
        f"{name} cannot be read, this engine has no {kind} tower; build one from a checkpoint that "
        f"has it, with --towers auto and --target cpu",
        param=name,
    )
