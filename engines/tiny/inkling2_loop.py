"""A tiny looped Inkling-2: seven layers, four of which run three times, so fifteen visits.

Of the core two blocks of layers come back as messages, a sliding and a full layer in each; the coda
is one layer, a tail without a full one. All else is as in the tiny Inkling-2.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inkrt.engines.tiny import inkling2
from inkrt.engines.tiny.inkling2 import Sizes
from inkrt.engines.tiny.random_tensor import RandomTensor, draw

TINY = Sizes(hidden=60, expert_width=20, num_layers=7, block_layers=2)
CORE_START, CORE_END = 2, 6
NUM_PASSES = 3
GATE_RANK = 5
_GATES = {"attn": "q", "k": "k", "v": "v", "mlp": "mlp"}
_GATE_WEIGHTS = {"down": "down_proj", "forget": "forget_gate_proj", "gain": "message_gate_proj"}
_QUERIES = "model.llm.middle_cycle_cross_pass_queries"
_KV_QUERIES = "model.llm.middle_cycle_cross_pass_kv_queries"


def config(dtype: str, sizes: Sizes = TINY) -> dict[str, Any]:
    """The content of `config.json`; see `inkling2.config`."""
    values = inkling2.config(dtype, sizes)
    loop = {
        "core_start": CORE_START,
        "core_end": CORE_END,
        "num_passes": NUM_PASSES,
        "gate_rank": GATE_RANK,
    }
    text = values["text_config"] | {"model_type": "inkling2_loop_text", "loop_config": loop}
    return values | {
        "architectures": ["Inkling2LoopForConditionalGeneration"],
        "model_type": "inkling2_loop",
        "text_config": text,
    }


def tensors(seed: int, dtype: torch.dtype, sizes: Sizes = TINY) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its publisher's name; see `inkling2.tensors`."""
    yield from inkling2.tensors(seed, dtype, sizes)
    for spec in _loop_specs(sizes):
        yield spec.name, draw(spec, seed, dtype)


def to_transformers(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and values in `Inkling2LoopForConditionalGeneration.state_dict()`."""
    rest = dict(published)
    own: dict[str, Tensor] = {}
    pairs = [rest.pop(name).unflatten(0, (-1, 2)) for name in (_QUERIES, _KV_QUERIES)]  # type: ignore[no-untyped-call]
    both, keys_values = pairs
    merged = torch.cat([both[:, :1], keys_values, both[:, 1:]], dim=1)
    own["model.language_model.message_input.query"] = merged
    for name in list(rest):
        if match := re.fullmatch(r"(.*)\.controllers\.(\w+)\.(\w+)_weight", name):
            layer = match[1].replace("model.llm.", "model.language_model.")
            gate, weight = _GATES[match[2]], _GATE_WEIGHTS[match[3]]
            own[f"{layer}.{gate}_message_gate.{weight}.weight"] = rest.pop(name)
    return inkling2.to_transformers(rest) | own


def _loop_specs(sizes: Sizes) -> Iterator[RandomTensor]:
    hidden = sizes.hidden
    for layer in range(CORE_START, CORE_END):
        for gate in _GATES:
            prefix = f"model.llm.layers.{layer}.controllers.{gate}."
            columns = 2 * hidden
            yield RandomTensor(f"{prefix}down_weight", (GATE_RANK, columns), columns**-0.5)
            for name in ("forget_weight", "gain_weight"):
                yield RandomTensor(prefix + name, (hidden, GATE_RANK), 0.5 * GATE_RANK**-0.5)
    rows = 2 * (CORE_END - CORE_START)
    for name in (_QUERIES, _KV_QUERIES):
        yield RandomTensor(name, (rows, hidden), 0.6, float32=True)
