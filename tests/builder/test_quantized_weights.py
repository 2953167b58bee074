"""Quantized weights are packed without loss: both sides are decoded to float64 and compared.

The decoder of this file knows the published formats only: tables of E2M1, E4M3 and E8M0 written
from their definitions, and how weights are named. It shares no code with the engine's.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from quantized_checkpoints import QUANTIZED, read_all, sources_of, write_few
from safetensors.torch import load_file
from small_model import edit_tensors
from torch import Tensor

from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.dequantize import choose_experts, dequantized
from inkrt.builder.options import BuildOptions
from inkrt.engines.catalog import find_definition
from inkrt.engines.interface import Sharding
from inkrt.errors import CheckpointError, ConfigError
from inkrt.plugins.moe.tactics import find_tactics
from inkrt.plugins.tactic import CallArgs, TensorArg

Values = NDArray[np.float64]
SPLITS = [Sharding(1, "experts"), Sharding(2, "experts"), Sharding(2, "width")]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 512 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return float("nan") if byte & 0x7F == 0x7F else -size if byte & 0x80 else size


E4M3 = np.array([_e4m3(byte) for byte in range(256)])
E8M0 = 2.0 ** (np.arange(256) - 127.0)


def nvfp4(codes: Tensor, scales: Tensor, factors: Tensor) -> Values:
    """Float64 values of packed codes [..., N, K / 2]."""
    pairs = codes.numpy()
    out = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]))
    out[..., 0::2], out[..., 1::2] = E2M1[pairs & 15], E2M1[pairs >> 4]
    out *= np.repeat(E4M3[scales.view(torch.uint8).numpy()], 16, axis=-1)
    return out * factors.double().numpy().reshape(-1, *[1] * (out.ndim - 1))


def mxfp8(codes: Tensor, exponents: Tensor) -> Values:
    """Float64 values of codes [..., N, K]."""
    scales = np.repeat(E8M0[exponents.view(torch.uint8).numpy()], 32, axis=-1)
    return E4M3[codes.view(torch.uint8).numpy()] * scales


def published(tensors: dict[str, Tensor], name: str) -> Values:
    """Float64 values of a weight as its publisher stores it."""
    weight = tensors[name]
    if f"{name}_amax" in tensors:
        factor = tensors[f"{name}_amax"] / tensors[f"{name}_outer_scale_denominator"]
        return nvfp4(weight, tensors[f"{name}_scale"], factor)
    if f"{name}.scale2" in tensors:
        return nvfp4(weight, tensors[f"{name}.scale"], tensors[f"{name}.scale2"])
    if f"{name}_scale" in tensors:
        return mxfp8(weight, tensors[f"{name}_scale"])
    return weight.double().numpy()


def packed(weights: dict[str, Tensor], name: str) -> Values:
    """Float64 values of a weight as an engine holds it."""
    if f"{name}.codes" in weights:
        parts = (weights[f"{name}.{part}"] for part in ("codes", "scales", "global_scale"))
        return nvfp4(*parts)
    if f"{name}.e4m3" in weights:
        return mxfp8(weights[f"{name}.e4m3"], weights[f"{name}.exponents"])
    if f"{name}.matrix" in weights:
        factors = weights[f"{name}.global_scale"].double().numpy().reshape(-1, 1, 1)
        return weights[f"{name}.matrix"].double().numpy() * factors
    return weights[name].double().numpy()


def whole(ranks: list[dict[str, Tensor]], name: str, split: str) -> Values:
    """A weight of experts, [L, 2 F, D] or [L, D, F], from the parts of all ranks."""
    parts = [packed(weights, name) for weights in ranks]
    if split == "experts":
        return np.concatenate(parts)
    if name.endswith("down"):
        return np.concatenate(parts, axis=2)
    halves = [np.split(part, 2, axis=1) for part in parts]
    return np.concatenate([half[side] for side in (0, 1) for half in halves], axis=1)


def uneven(tensors: dict[str, Tensor]) -> None:
    """Global scales that are no powers of two, and other for every expert."""
    generator = torch.Generator().manual_seed(9)
    for name, value in tensors.items():
        if name.endswith(("_amax", ".scale2")):
            value.mul_(0.7 + torch.rand(value.shape, generator=generator))


@pytest.mark.parametrize("sharding", SPLITS, ids=lambda s: f"{s.tp_size}-{s.moe_split}")
@pytest.mark.parametrize("model", [name for name in QUANTIZED if name != "flint"])
def test_every_value_is_kept(model: str, sharding: Sharding, tmp_path: Path) -> None:
    folder = write_few(tmp_path / "checkpoint", model, seed=2)
    edit_tensors(folder, uneven)
    tensors = load_file(folder / "model.safetensors")
    exact = read_all(folder, sharding)
    decoded = read_all(folder, sharding, decoded=True)
    layers = {name.split(".")[1] for name in exact[0] if name.startswith("layers.")}
    num_quantized = 0
    for layer in sorted(layers):
        root = f"model.llm.layers.{layer}.mlp.experts."
        if f"{root}w13_weight" not in tensors:
            continue
        num_quantized += f"{root}w13_weight_scale" in tensors
        num_quantized += f"{root}w13_weight.scale" in tensors
        both = published(tensors, f"{root}w13_weight")
        wanted = {
            "gate_up": np.concatenate([both[:, 0::2], both[:, 1::2]], axis=1),
            "down": published(tensors, f"{root}w2_weight"),
        }
        for name, values in wanted.items():
            for ranks in (exact, decoded):
                got = whole(ranks, f"layers.{layer}.mlp.{name}", sharding.moe_split)
                np.testing.assert_array_equal(got, values)
    assert num_quantized >= 1
    if model == "inkling2-quantized-attention" and sharding.tp_size == 1:
        for layer in range(5):
            for ours, theirs in (("wq", "wq_du"), ("wk", "wk_dv"), ("wo", "wo_ud")):
                got = packed(exact[0], f"layers.{layer}.attn.{ours}")
                name = f"model.llm.layers.{layer}.attn.{theirs}.weight"
                np.testing.assert_array_equal(got, published(tensors, name))


def super_blocks(raw: NDArray[np.uint8]) -> Values:
    """Float64 values of a GGUF file's NVFP4 bytes, without the tensor's own scale."""
    blocks = raw.reshape(*raw.shape[:-1], -1, 36)
    scales = np.where(blocks[..., :4] == 0x7F, 0, E4M3[blocks[..., :4] & 0x7F])
    codes = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    values = np.concatenate([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1) * scales[..., None]
    return values.reshape(*raw.shape[:-1], -1)


@pytest.fixture(scope="module")
def flint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_few(tmp_path_factory.mktemp("flint") / "checkpoint", "flint", seed=2)


@pytest.mark.parametrize("sharding", SPLITS, ids=lambda s: f"{s.tp_size}-{s.moe_split}")
def test_every_value_of_a_gguf_file_is_kept(sharding: Sharding, flint_folder: Path) -> None:
    """Read with the package's own reader on this side."""
    (path,) = flint_folder.glob("*.gguf")
    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    exact = read_all(flint_folder, sharding)
    decoded = read_all(flint_folder, sharding, decoded=True)
    layers = [int(name.split(".")[1]) for name in stored if name.endswith("gate_exps.weight")]
    assert layers

    def values(name: str) -> Values:
        factors = stored[f"{name}.scale"].astype(float).reshape(-1, 1, 1)
        return super_blocks(stored[f"{name}.weight"]) * factors

    def flint(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """The engine's parameters under the names that `packed` knows."""
        if f"{name}.scales" in weights:
            return {
                f"{name}.codes": weights[f"{name}.weight"],
                f"{name}.scales": weights[f"{name}.scales"],
                f"{name}.global_scale": weights[f"{name}.global_scale"],
            }
        return {
            f"{name}.matrix": weights[f"{name}.weight"],
            f"{name}.global_scale": weights[f"{name}.global_scale"],
        }

    for layer in layers:
        root = f"blk.{layer}.ffn_"
        both = [values(f"{root}{x}_exps") for x in ("gate", "up")]
        for ours, wanted in (
            ("gate_up", np.concatenate(both, axis=1)),
            ("down", values(f"{root}down_exps")),
        ):
            name = f"layers.{layer}.mlp.{ours}"
            for ranks in (exact, decoded):
                renamed = [flint(weights, name) for weights in ranks]
                np.testing.assert_array_equal(whole(renamed, name, sharding.moe_split), wanted)


def test_decoding_refuses_what_bfloat16_cannot_hold(tmp_path: Path) -> None:
    """Far ends of MXFP8's exponents; the quantized engine keeps them."""
    name = "model.llm.layers.2.mlp.experts.w2_weight"

    def tiny_block(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[0, 0, :32] = 1  # 2^-9
        tensors[f"{name}_scale"][0, 0, 0] = 0  # 2^-127

    folder = write_few(tmp_path / "checkpoint", "inkling2-mxfp8")
    edit_tensors(folder, tiny_block)
    read_all(folder)
    checkpoint = open_checkpoint(folder)
    _, (sources,) = sources_of(checkpoint, Sharding(1, "experts"), decoded=True)
    with pytest.raises(CheckpointError) as caught:
        dequantized(checkpoint, sources["layers.2.mlp.down"], torch.bfloat16)
    assert str(caught.value) == (
        f"{folder}: tensor {name} has values that bfloat16 cannot hold exactly, with block scales "
        f"at an end of their range; leave --experts out"
    )


def test_decoded_nvfp4_is_for_the_cpu(tmp_path: Path) -> None:
    options = BuildOptions(target="sm_90a", experts="bf16")
    for model in ("inkling-nvfp4", "inkling2-mxfp8", "flint"):
        opened = open_checkpoint(write_few(tmp_path / model, model))
        definition = find_definition(opened.config)
        config = definition.parse_config(opened.config)
        assert choose_experts(definition, config, BuildOptions()) is config
        if model == "inkling2-mxfp8":
            assert choose_experts(definition, config, options) != config
            continue
        with pytest.raises(ConfigError) as caught:
            choose_experts(definition, config, options)
        assert str(caught.value) == (
            "experts bf16: kernels of target sm_90a take no global scale beside BF16 experts, "
            "which those of an NVFP4 release have; build for cpu or leave the option out"
        )


def test_no_kernel_leaves_a_global_scale_out() -> None:
    """Those for plain experts would; so an operator with both has none."""

    def experts(factors: TensorArg | None) -> CallArgs:
        return {
            "x": TensorArg((1, 256), torch.bfloat16),
            "router_weight": TensorArg((8, 256), torch.float32),
            "gate_up": TensorArg((8, 128, 256), torch.bfloat16),
            "gate_up_scales": None,
            "gate_up_global_scale": factors,
            "top_k": 2, "route_scale": 8.0, "gate_softcap": 4.0, "up_softcap": 25.0,
            "partial": False, "rank": None,
        }  # fmt: skip

    assert find_tactics("sm_90a", experts(None))
    assert find_tactics("sm_90a", experts(TensorArg((8,), torch.float32))) == []
