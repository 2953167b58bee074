"""Placeholders in prompts: one token for each feature row of an image or a recording.

A prompt may have one placeholder for each image or recording, which stands for as many as it needs;
or all of them; or, as some chat templates write it, none but the marker that opens a run of them.
"""

from collections.abc import Mapping, Sequence

from inkrt.errors import RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.media.rows import MEDIA_NAMES
from inkrt.runtime.tower_spec import Kind, TowerSpec

# Behind the placeholders of a recording, in the chat format of Inkling.
AUDIO_END = "<|audio_end|>"


def expand(
    tokens: Sequence[int],
    counts: Mapping[Kind, Sequence[int]],
    config: EngineConfig,
    special_ids: Mapping[str, int],
) -> list[int]:
    """The prompt with a placeholder for each feature row.

    Args:
        tokens: see the module.
        counts: by the kind of the tower, rows of each image or recording in the prompt's order.
        config: of the engine.
        special_ids: ids of added tokens by their text.

    Raises:
        RequestError: there is no place for one, or no image or recording for a placeholder.
    """
    ids = list(tokens)
    for tower in config.towers:
        end = special_ids.get(AUDIO_END) if tower.kind == "audio" else None
        ids = _expand(ids, tower, counts.get(tower.kind, ()), end)
    return ids


def in_front(
    tokens: Sequence[int],
    counts: Mapping[Kind, Sequence[int]],
    config: EngineConfig,
    special_ids: Mapping[str, int],
) -> list[int]:
    """A prompt of text alone with all images and recordings before it, each behind its marker."""
    ids: list[int] = []
    for tower in config.towers:
        marker = [] if tower.marker_id is None else [tower.marker_id]
        end = special_ids.get(AUDIO_END) if tower.kind == "audio" else None
        for count in counts.get(tower.kind, ()):
            ids += [*marker, *[tower.token_id] * count, *([] if end is None else [end])]
    return [*ids, *tokens]


def _expand(ids: list[int], tower: TowerSpec, counts: Sequence[int], end: int | None) -> list[int]:
    found, left = ids.count(tower.token_id), iter(counts)
    if found == len(counts):
        runs = {i: [tower.token_id] * next(left) for i, x in enumerate(ids) if x == tower.token_id}
    elif found == sum(counts):
        return ids
    elif found == 0 and tower.marker_id is not None and ids.count(tower.marker_id) == len(counts):
        runs = {}
        for i, token in enumerate(ids):
            if token == tower.marker_id:
                is_ended = end is None or ids[i + 1 : i + 2] == [end]
                run = [tower.token_id] * next(left)
                runs[i] = [token, *run, *([] if is_ended or end is None else [end])]
    else:
        name = MEDIA_NAMES[tower.kind]
        raise RequestError(
            f"{name} are {len(counts)} of {sum(counts)} tokens together, but the prompt has "
            f"{found} placeholders (token {tower.token_id}); give one for each of the {name}, "
            f"or one for each token of theirs",
            param=name,
        )
    return [token for i, x in enumerate(ids) for token in runs.get(i, [x])]
