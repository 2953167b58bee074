"""Flint's configuration, and that all spellings of a checkpoint give the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from inkrt.builder.checkpoint import CheckpointSource, open_checkpoint
from inkrt.builder.pack import packed_tensors, read_weight
from inkrt.engines.catalog import find_definition
from inkrt.engines.flint.config import FlintConfig, parse_config
from inkrt.engines.flint.model import Flint
from inkrt.engines.flint.weights import weight_sources
from inkrt.engines.interface import Sharding, StateOptions
from inkrt.engines.tiny import flint
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import CheckpointError, ConfigError
from inkrt.plugins.nvfp4 import dequantize

STATE = StateOptions(num_slots=1, max_seq_len=64, page_tokens=64)
NVFP4 = {"quant_method": "nvfp4"}


def test_defaults_are_the_published_ones() -> None:
    config = parse_config({"model_type": "flint"})
    full = [i for i, sliding in enumerate(config.is_sliding) if not sliding]
    assert full == [0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48]
    assert [i for i, dense in enumerate(config.is_dense) if dense] == [0, 1]
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (2048, 150144, 49)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 4, 128)
    assert (config.sliding_window, config.rope_theta) == (513, 10000.0)
    assert (config.num_experts, config.num_experts_per_tok) == (256, 6)
    assert (config.intermediate_size, config.moe_intermediate_size) == (6144, 512)
    assert (config.has_nvfp4, config.has_nvfp4_head, config.eos_token_ids) == (False, False, ())
    module = Flint(config, Sharding(1, "experts"), torch.bfloat16, STATE, False)
    # Ours lack nothing of the 39.8 billion parameters of section 10.
    assert sum(p.numel() for p in module.parameters()) == 39_785_287_456
    assert find_definition({"model_type": "flint"}).build_module is Flint


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    values = transformers.FlintConfig().to_dict()
    assert parse_config(values) == parse_config({"model_type": "flint", "dtype": values["dtype"]})


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for flint, only 'silu'"),
    ({"attention_bias": True}, "attention_bias = True is not supported"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
    ({"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
    ({"router_score_function": "softmax"}, "router_score_function = 'softmax' is not supported"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
    ({"use_sliding_window": False}, "use_sliding_window = False is not supported"),
    ({"rope_scaling": {"factor": 2}}, "rope_scaling = "),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_type = 'yarn' in rope_parameters is not supported for flint, only rotations of all",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 in rope_pa"),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, got -1"),
    ({"layer_types": ["full_attention"]}, "layer_types must list 49 layers"),
    (
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        "layer type 'linear_attention' is not supported, only 'full_attention' and 'sliding_at",
    ),
    (
        {"no_rope_layer_indices": []},
        "no_rope_layer_indices = [] is not supported, only the full-at",
    ),
    ({"mlp_only_layers": [-1]}, "mlp_only_layers must list layers, got [-1]"),
    ({"num_attention_heads": 30}, "num_attention_heads = 30 is no multiple of num_key_value_heads"),
    ({"head_dim": 127}, "head_dim = 127 must be even to be rotated"),
    ({"num_experts": 4}, "num_experts_per_tok 6 exceeds num_experts 4"),
    ({"dtype": "float16"}, "dtype 'float16' is not supported"),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config {'quant_method': 'fp8'",
    ),
    (
        {"quantization_config": NVFP4, "moe_intermediate_size": 520},
        "moe_intermediate_size = 520 cannot be the width of an NVFP4 matrix, only multiples of 16",
    ),
    ({"hidden_size": 0}, "hidden_size must be an integer from 1 to"),
]


@pytest.mark.parametrize(("changes", "message"), REJECTED)
def test_what_is_not_implemented_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model_type": "flint", **changes})
    assert str(caught.value).startswith(f"config.json: {message}")


def test_accepted_spellings() -> None:
    full = [0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48]
    config = parse_config(
        {
            "rope_theta": 5e5,
            "no_rope_layer_indices": full,
            "eos_token_id": [3, 4],
            "torch_dtype": "bfloat16",
            "quantization_config": {**NVFP4, "tensors": ["blk.0.attn_q.weight"]},
        }
    )
    assert (config.rope_theta, config.eos_token_ids, config.dtype) == (5e5, (3, 4), "bfloat16")
    assert (config.has_nvfp4, config.has_nvfp4_head) == (True, False)
    assert parse_config({"quantization_config": NVFP4}).has_nvfp4_head


@pytest.mark.parametrize(
    ("tp_size", "moe_split", "nvfp4", "message"),
    [
        (8, "experts", False, "tp size 8 does not divide num_key_value_heads = 4"),
        (4, "width", True, None),
        (4, "experts", True, None),
    ],
)
def test_sharding(tp_size: int, moe_split: Any, nvfp4: bool, message: str | None) -> None:
    config = parse_config({"quantization_config": NVFP4} if nvfp4 else {})
    if message is None:
        config.check_sharding(Sharding(tp_size, moe_split))
        return
    with pytest.raises(ConfigError, match=message):
        config.check_sharding(Sharding(tp_size, moe_split))


def test_blocks_of_16_columns_are_not_cut() -> None:
    changes = {"quantization_config": NVFP4, "shared_expert_intermediate_size": 1008}
    config = parse_config(changes)
    config.check_sharding(Sharding(1, "experts"))
    with pytest.raises(ConfigError, match="into 504 columns, which is no multiple of 16"):
        config.check_sharding(Sharding(2, "experts"))


Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[str, Path] = {}

    def make(**arguments: Any) -> Path:
        key = str(arguments)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("flint") / "checkpoint"
            write_checkpoint(made[key], model="flint", **arguments)
        return made[key]

    return make


def rank_weights(source: CheckpointSource, sharding: Sharding, rank: int) -> dict[str, Tensor]:
    """The packed weights of a rank; NVFP4 matrices as the bfloat16 numbers that they stand for."""
    config: FlintConfig = parse_config(source.config)
    sources = weight_sources(config, source.names, rank, sharding)
    module = Flint(config, sharding, torch.bfloat16, STATE, False)
    tensors = packed_tensors(module)
    assert {tensor.name for tensor in tensors} == set(sources)
    values = {tensor.name: read_weight(tensor, source, sources[tensor.name]) for tensor in tensors}
    for name in [name for name in values if name.endswith(".global_scale")]:
        matrix = name.removesuffix("global_scale")
        plain = dequantize(values[matrix + "weight"], values.pop(matrix + "scales"), torch.float64)
        factor = values.pop(name).double().view(-1, *[1] * (plain.dim() - 1))
        values[matrix + "weight"] = (plain * factor).bfloat16()
    return values


@pytest.mark.parametrize("sharding", [(1, "experts"), (2, "experts"), (2, "width")], ids=str)
def test_all_spellings_give_the_same_weights(folder: Folder, sharding: tuple[int, Any]) -> None:
    """Publisher's and transformers' safetensors, and GGUF; the tiny model's values are exact."""
    tp_size = sharding[0]
    for rank in range(tp_size):
        published, renamed, quantized = (
            rank_weights(open_checkpoint(folder(**kind)), Sharding(*sharding), rank)
            for kind in ({}, {"layout": "transformers"}, {"format": "gguf"})
        )
        assert set(published) == set(renamed) == set(quantized)
        for name, value in published.items():
            assert torch.equal(value, renamed[name]), name
            assert torch.equal(value, quantized[name]), name


def test_ranks_share_what_one_rank_has(folder: Folder) -> None:
    source = open_checkpoint(folder())
    one = rank_weights(source, Sharding(1, "experts"), 0)
    by_split: dict[str, list[dict[str, Tensor]]] = {
        split: [rank_weights(source, Sharding(2, split), rank) for rank in range(2)]
        for split in ("experts", "width")
    }
    ranks = by_split["experts"]
    for name, whole in one.items():
        shares = [weights[name] for weights in ranks]
        if name.endswith(("qkv.weight", "gate_up.weight")) and whole.dim() == 2:
            continue
        if "norm" in name or name.endswith(("embed", "router")):
            joined = shares[0]
            assert torch.equal(shares[0], shares[1])
        elif name.endswith(("o_proj.weight", ".down.weight")) and whole.dim() == 2:
            joined = torch.cat(shares, dim=1)
        else:  # sinks, head, experts
            joined = torch.cat(shares)[: len(whole)]
        assert torch.equal(joined, whole), name
    heads, kv = (
        flint.TINY.num_heads * flint.TINY.head_dim,
        flint.TINY.num_kv_heads * flint.TINY.head_dim,
    )
    q, k, v = one["layers.2.attn.qkv.weight"].split([heads, kv, kv])
    for rank, weights in enumerate(ranks):
        mine = [part.chunk(2)[rank] for part in (q, k, v)]
        assert torch.equal(weights["layers.2.attn.qkv.weight"], torch.cat(mine))
    gate, up = one["layers.4.mlp.gate_up.weight"].chunk(2, dim=1)
    for rank, weights in enumerate(by_split["width"]):
        mine = torch.cat([gate.chunk(2, dim=1)[rank], up.chunk(2, dim=1)[rank]], dim=1)
        assert torch.equal(weights["layers.4.mlp.gate_up.weight"], mine)
        down = one["layers.4.mlp.down.weight"].chunk(2, dim=2)[rank]
        assert torch.equal(weights["layers.4.mlp.down.weight"], down)


def rewrite(source: Path, target: Path, change: Callable[[str, np.ndarray], Any]) -> Path:
    """Copy a GGUF checkpoint; `change` gives a tensor's new name and data, or None to leave it out.

    Data of quantized and BF16 tensors are raw bytes.
    """
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    (path,) = source.glob("*.gguf")
    writer = gguf.GGUFWriter(target / path.name, "flint")
    for tensor in gguf.GGUFReader(path).tensors:
        changed = change(tensor.name, np.array(tensor.data))
        if changed is not None:
            writer.add_tensor(changed[0], changed[1], raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_a_head_that_is_not_quantized() -> None:
    """It is read as it is, beside NVFP4 projections."""
    config = parse_config({"quantization_config": {**NVFP4, "tensors": ["blk.0.attn_q.weight"]}})
    marker, one = frozenset({"token_embd.weight"}), Sharding(1, "experts")
    sources = weight_sources(config, marker, 0, one)
    assert "lm_head.scales" not in sources
    (part,) = sources["lm_head.weight"].parts
    assert (part.name, part.shape) == ("output.weight", (150144, 2048))
    (part,) = sources["layers.9.attn.o_proj.scales"].parts
    assert (part.name, part.shape) == ("blk.9.attn_output.weight_scale", (2048, 256))
    names = {
        name for name, _ in Flint(config, one, torch.bfloat16, STATE, False).named_parameters()
    }
    assert names == set(sources)


def scaled(wanted: str, index: int = 0) -> Callable[[str, np.ndarray], Any]:
    def change(name: str, data: np.ndarray) -> tuple[str, np.ndarray]:
        if name == wanted:
            data[index] *= 2
        return name, data

    return change


@pytest.mark.parametrize(
    ("wanted", "index", "pair"),
    [
        ("blk.3.attn_k.scale", 0, "blk.3.attn_q.scale and blk.3.attn_k.scale"),
        ("blk.0.ffn_up.scale", 0, "blk.0.ffn_gate.scale and blk.0.ffn_up.scale"),
        ("blk.4.ffn_up_exps.scale", 7, "blk.4.ffn_gate_exps.scale and blk.4.ffn_up_exps.scale"),
        (
            "blk.5.ffn_gate_shexp.scale",
            0,
            "blk.5.ffn_gate_shexp.scale and blk.5.ffn_up_shexp.scale",
        ),
    ],
)
def test_scales_that_must_be_equal(
    folder: Folder, tmp_path: Path, wanted: str, index: int, pair: str
) -> None:
    changed = rewrite(folder(format="gguf"), tmp_path / "x", scaled(wanted, index))
    with pytest.raises(CheckpointError, match=pair.replace(".", r"\.") + " must be equal"):
        rank_weights(open_checkpoint(changed), Sharding(1, "experts"), 0)


def test_other_tensors_of_a_gguf_file_are_refused(folder: Folder, tmp_path: Path) -> None:
    source = folder(format="gguf")
    renamed = rewrite(
        source, tmp_path / "x", lambda name, data: (name.replace("blk.7.attn_k.", "blk.8.k."), data)
    )
    with pytest.raises(CheckpointError, match=r"holds blk\.8\.k\.scale, which has no place in a F"):
        rank_weights(open_checkpoint(renamed), Sharding(1, "experts"), 0)
    missing = rewrite(
        source, tmp_path / "y", lambda name, data: None if "7.attn_k." in name else (name, data)
    )
    with pytest.raises(CheckpointError, match=r"has no tensor blk\.7\.attn_k\.weight"):
        rank_weights(open_checkpoint(missing), Sharding(1, "experts"), 0)


def test_checkpoints_of_other_models_are_refused(folder: Folder, tmp_path: Path) -> None:
    config = parse_config({})
    with pytest.raises(CheckpointError, match="has no Flint model: neither"):
        weight_sources(config, frozenset({"model.x"}), 0, Sharding(1, "experts"))
    quantized = parse_config({"quantization_config": NVFP4})
    with pytest.raises(CheckpointError, match="reads NVFP4 from GGUF files only"):
        weight_sources(
            quantized, frozenset({"model.embed_tokens.weight"}), 0, Sharding(1, "experts")
        )
    # The config of another size: the shapes do not fit.
    values = json.loads((folder() / "config.json").read_text())
    wide = parse_config(values | {"moe_intermediate_size": 128})
    source = open_checkpoint(folder())
    sources = weight_sources(wide, source.names, 0, Sharding(1, "experts"))
    part = sources["layers.2.mlp.gate_up.weight"].parts[0]
    with pytest.raises(CheckpointError, match=r"shape \[64, 192\], \[128, 192\] expected"):
        source.check(part)
