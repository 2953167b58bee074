"""Arguments that do not fit are refused at build time: operator, what was got, what is expected."""

from typing import Any

import pytest
import torch

from inkrt.errors import BuildError
from inkrt.plugins.registry import Arguments, plugins

BAD: list[tuple[str, Arguments, str]] = [
    (
        "router",
        {"top_k": 6},
        "ink::router: top_k is 6, expected 1 to E=5",
    ),
    (
        "router",
        {"bias": torch.empty(4)},
        "ink::router: bias has shape [4], expected [E=5]",
    ),
    (
        "experts",
        {"expert_ids": torch.empty(1, 1, dtype=torch.int64)},
        "ink::experts: expert_ids has dtype int64, expected int32",
    ),
    (
        "experts",
        {"gate_up": torch.empty(4, 7, 5, dtype=torch.bfloat16)},
        "ink::experts: gate_up has 7 rows per expert, expected 2F=6",
    ),
    (
        "moe",
        {"down": torch.empty(23, 19, 5)},
        "ink::moe: down has dtype float32, expected bfloat16",
    ),
    (
        "all_reduce",
        {"x": torch.empty(2, 3, dtype=torch.bfloat16)},
        "ink::all_reduce: x has dtype bfloat16, expected float32",
    ),
    ("all_gather", {"tp_size": 0}, "ink::all_gather: tp_size is 0, expected >= 1"),
    ("softcap", {"cap": 0.0}, "ink::softcap: cap is 0.0, expected > 0"),
    (
        "sample",
        {"seed": torch.empty(1, dtype=torch.int32)},
        "ink::sample: seed has dtype int32, expected int64",
    ),
    ("sample", {"last_row": True}, "ink::sample: logits has 5 rows, expected 1 with last_row"),
    (
        "linear_group",
        {"input_of": [0, 2, 0]},
        "ink::linear_group: input_of is [0, 2, 0], expected an index below 1 for each of 3 weights",
    ),
    (
        "linear_group",
        {"xs": []},
        "ink::linear_group: 0 inputs, expected 1 to 4",
    ),
    (
        "linear_group_quantized",
        {"input_of": [0, 0, 0]},
        "ink::linear_group_quantized: input_of is [0, 0, 0], expected an index below 1 for each of "
        "4 weights",
    ),
    (
        "linear_group_quantized",
        {"codes": [], "scales": [], "global_scales": []},
        "ink::linear_group_quantized: 0 quantized weights of 2, expected at least 1 of up to 8",
    ),
    (
        "lm_head_sample",
        {"vocab_size": 65},
        "ink::lm_head_sample: vocab_size is 65, expected 1 to 64",
    ),
    (
        "qkv_post",
        {"q": torch.empty(1, 61, dtype=torch.bfloat16)},
        "ink::qkv_post: q has 61 columns, expected H*d=60",
    ),
    (
        "qkv_post",
        {"k_conv_state": torch.empty(3, 2, 30, dtype=torch.bfloat16)},
        "ink::qkv_post: k_conv_state keeps 2 positions, expected at least W-1=3",
    ),
    (
        "allreduce_conv_mix",
        {"norm_weights": [torch.empty(5, dtype=torch.bfloat16)] * 2},
        "ink::allreduce_conv_mix: norm_weights has 2 tensors, expected one per query, m=1, or none",
    ),
    (
        "allreduce_conv_mix",
        {"tp_size": 2},
        "ink::allreduce_conv_mix: partial has dtype bfloat16, expected float32",
    ),
    (
        "flint_layers",
        {"sinks": []},
        "ink::flint_layers: sinks has 0 entries and windows has 1, expected as many",
    ),
    (
        "flint_layers",
        {"windows": []},
        "ink::flint_layers: windows is empty, expected an entry per layer",
    ),
    (
        "flint_layers",
        {"qkv_scales": [torch.empty(192, 3, dtype=torch.uint8)]},
        "ink::flint_layers: layer 0: qkv has 64 columns and qkv_scales has 3, expected D=64 "
        "and D/16",
    ),
    (
        "flint_layers",
        {"windows": [0]},
        "ink::flint_layers: layer 0: window is 0 (all keys) without pages, expected a page table",
    ),
    (
        "flint_layers",
        {"windows": [13]},
        "ink::flint_layers: layer 0: k_cache keeps 12 positions, expected at least window-1+T=13",
    ),
    ("flint_layers", {"top_k": 9}, "ink::flint_layers: layer 0: top_k is 9, expected 1 to E=8"),
    (
        "flint_layers",
        {"sinks": [torch.empty(7)]},
        "ink::flint_layers: layer 0: qkv has 192 rows, expected (H+2*KV)*d with H=7, KV=2, d=16 "
        "and H a multiple of KV",
    ),
]


def _to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_meta(item) for item in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_build_error(name: str, changes: Arguments, message: str):
    case = plugins()[name].cases()[0]
    arguments = case.arguments(torch.bfloat16, torch.Generator().manual_seed(0)) | changes
    with pytest.raises(BuildError) as error:
        plugins()[name].op(**{key: _to_meta(value) for key, value in arguments.items()})
    assert str(error.value).startswith(message + ";")
