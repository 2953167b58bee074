"""A small Inkling-2-Mini: fifteen visits of seven layers of the trained small model's sizes."""

import json
from typing import Any

from nano_engines import CHECKPOINT

SLIDING, FULL = "hybrid_sliding", "hybrid"
# Three heads of queries for one of keys as in the large one; experts of all formats.
LOOP: dict[str, Any] = {
    "model_type": "inkling2_loop_text",
    "num_hidden_layers": 7,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
    "n_layers_per_attn_res_block": 2,
    "loop_config": {"core_start": 2, "core_end": 6, "num_passes": 3, "gate_rank": 64},
    "num_attention_heads": 6,
    "swa_num_attention_heads": 6,
    "head_dim": 128,
    "swa_head_dim": 128,
    "d_rel": 16,
    "max_position_embeddings": 1024,
    # All experts are chosen. Of eight, rounding would soon choose others, as these dummy ones are
    # as good as each other, and what follows would have nothing in common.
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            f"model.layers.{layer}.mlp.experts": {"quant_algo": algorithm}
            for layer, algorithm in ((0, "NVFP4"), (2, "NVFP4"), (3, "MXFP8"), (6, "MXFP8"))
        },
    },
}
# The first token that is drafted stands behind the anchor's row, as the published model has it.
DRAFTER = {"block_size": 8, "sample_from_anchor": False, "target_layer_ids": [1, 5, 13, 15]}


def loop_config(*, with_drafter: bool) -> dict[str, Any]:
    """A config.json, which is enough for dummy weights."""
    config: dict[str, Any] = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    if with_drafter:
        config |= {f"dspark_{name}": value for name, value in DRAFTER.items()}
    else:
        config = {name: value for name, value in config.items() if not name.startswith("dspark_")}
    return config | LOOP
