"""`--projections`: what builds make of plain projections, by search and by dequantized weights."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import write_small
from torch import Tensor

from inkrt.builder.build import build_engine, prepare
from inkrt.builder.checkpoint import Checkpoint
from inkrt.builder.options import BuildOptions
from inkrt.builder.pack import PackedTensor, packed_tensors, read_weight
from inkrt.builder.quantize import Quantizer, quantize
from inkrt.engines.inkling2.config import parse_config, quantize_projections
from inkrt.engines.inkling2.model import Inkling2
from inkrt.engines.inkling2.weights import weight_sources
from inkrt.engines.interface import Part, Quantize, Sharding, StateOptions, WeightSource
from inkrt.engines.tiny.inkling2_quantized import PROJECTIONS
from inkrt.errors import CheckpointError, ConfigError
from inkrt.plugins import mxfp8, nvfp4
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_code
from inkrt.runtime.executor import Sampling

OPTIONS = BuildOptions(
    dtype="float32", max_verify_tokens=1, max_seq_len=200, prefill_chunk=16, moe_split="width"
)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def matrix(rows: int, width: int, seed: int = 0) -> Tensor:
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02
    weight[0, :32] = 0
    weight[1, :32] *= 2.0**-115  # too small for an exponent that kernels take
    weight[2, 5] = 3.0
    return weight.bfloat16()


def values(weight: Tensor, form: str) -> Tensor:
    """Quantized and back, float64."""
    made = quantize(weight, form)
    if form == "mxfp8":
        return mxfp8.dequantize(made.codes, made.scales, torch.float64)
    return nvfp4.dequantize(made.codes, made.scales, torch.float64) * made.global_scale.double()


def test_mxfp8_takes_the_least_exponent_and_the_nearest_codes() -> None:
    weight = matrix(7, 96)
    made = quantize(weight, "mxfp8")
    blocks, exponents = weight.double().view(7, 3, 32), made.scales.int()
    largest = blocks.abs().amax(dim=-1)
    live = largest >= 2.0**-100
    assert not made.codes.view(7, 3, 32)[~live].any()
    at = largest / torch.exp2(exponents.double() - 127)
    assert bool((at[live] <= 448).all())
    assert bool((2 * at[live] > 448).all())
    numbers = E4M3[~E4M3.isnan()]
    scaled = blocks / torch.exp2(exponents.double() - 127)[..., None]
    nearest = (scaled[..., None] - numbers).abs().amin(dim=-1)
    taken = (scaled - E4M3[made.codes.view(7, 3, 32).int()]).abs()
    assert torch.equal(taken[live], nearest[live])


def test_nvfp4_has_one_scale_of_the_matrix_and_no_worse_blocks_than_at_six() -> None:
    weight = matrix(6, 96).double()
    made = quantize(weight.bfloat16(), "nvfp4")
    torch.testing.assert_close(
        made.global_scale.double(), weight.abs().max().reshape(1) / 2688, rtol=1e-6, atol=0
    )
    assert int(made.scales.max()) == nvfp4.MAX_SCALE
    errors = (values(weight.bfloat16(), "nvfp4") - weight).view(6, 6, 16)
    blocks = weight.view(6, 6, 16)
    scale = (blocks.abs().amax(dim=-1) / 6 / made.global_scale).float()
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn).double() * made.global_scale.double()
    grid = torch.tensor([*nvfp4.E2M1, *(-v for v in nvfp4.E2M1)], dtype=torch.float64)
    plain = (grid * scale[..., None, None] - blocks[..., None]).abs().amin(dim=-1)
    assert bool((errors.abs().sum(dim=-1) <= plain.sum(dim=-1) * (1 + 1e-4) + 1e-12).all())


@pytest.mark.parametrize(("form", "bound"), [("mxfp8", (0.02, 0.03)), ("nvfp4", (0.05, 0.11))])
def test_the_error_is_told_and_parts_are_those_of_the_whole(
    form: str, bound: tuple[float, float]
) -> None:
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    made = quantize(weight, form)
    error = (made.squared_error / made.squares) ** 0.5
    wanted = torch.linalg.vector_norm(values(weight, form) - weight.double())
    assert error == pytest.approx(float(wanted / torch.linalg.vector_norm(weight.double())))
    assert bound[0] < error < bound[1]
    amax = weight.abs().max().float().reshape(1)
    part = quantize(weight[8:24, 64:], form, amax)
    columns = made.codes.shape[1] // 2
    assert torch.equal(part.codes, made.codes[8:24, columns:])
    assert torch.equal(part.scales, made.scales[8:24, made.scales.shape[1] // 2 :])
    assert torch.equal(part.global_scale, made.global_scale)


def logits(folder: Path) -> np.ndarray[Any, Any]:
    """Of prefill steps and decode steps."""
    tokens = [(7 * i + i * i) % 470 for i in range(30)]
    greedy = Sampling()
    with Engine.open(folder) as engine, engine.session() as session:
        rows = [session.prefill(tokens[:26], greedy).logits[-1:]]
        rows += [session.step([token], greedy).logits for token in tokens[26:]]
    return np.concatenate(rows)


def dequantize_projections(folder: Path, form: str) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, value in tensors.items():
            if name.split(".")[-2] in PROJECTIONS:
                tensors[name] = values(value, form).to(value.dtype)
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("form", "tp_size"), [pytest.param("mxfp8", 1, marks=pytest.mark.slow), ("nvfp4", 2)]
)
def test_an_engine_is_that_of_the_dequantized_checkpoint(
    tmp_path: Path, form: str, tp_size: int
) -> None:
    checkpoint = write_small(tmp_path / "checkpoint", model="inkling2-quantized", dtype="float32")
    plain_options = replace(OPTIONS, tp_size=tp_size)
    lines: list[str] = []
    made = replace(plain_options, projections=form)
    build_engine(checkpoint, tmp_path / "engine", made, lines.append)
    plan = read_code(tmp_path / "engine", 0).plans["decode"]
    ops = [launch.op for launch in plan.launches]
    assert ops.count("linear_group_quantized") == 3
    assert ops.count(f"linear_{form}") == 3
    (line,) = (line for line in lines if line.startswith("quantized attention projections"))
    errors = re.findall(r"(\w+) (\d\.\d\de-\d\d)", line)
    assert {name for name, _ in errors} == {"wq", "wk", "wv", "wr", "wgate", "wo"}
    least, most = (0.02, 0.03) if form == "mxfp8" else (0.05, 0.11)
    assert all(least < float(error) < most for _, error in errors)
    got = logits(tmp_path / "engine")
    dequantize_projections(checkpoint, form)
    build_engine(checkpoint, tmp_path / "other", plain_options)
    expected = logits(tmp_path / "other")
    scale = np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) <= 5e-6 * scale


def test_dummy_weights_have_the_form(tmp_path: Path) -> None:
    checkpoint = write_small(tmp_path / "checkpoint", model="inkling2-quantized")
    plain = parse_config(Checkpoint(checkpoint).config)
    state = StateOptions(num_slots=1, max_seq_len=200, page_tokens=64)
    sizes = {}
    for form in ("checkpoint", "mxfp8", "nvfp4"):
        config = plain if form == "checkpoint" else quantize_projections(plain, form)  # type: ignore[arg-type]
        module = Inkling2(config, Sharding(1, "experts"), torch.bfloat16, state, False)
        sizes[form] = sum(tensor.num_bytes for tensor in packed_tensors(module))
    # q, gate 96 x 64 each, k, v 32 x 64 each, relative states 48 x 64, output 64 x 96: 3 layers.
    count = 3 * (3 * 96 + 2 * 32 + 48) * 64
    assert sizes["checkpoint"] - sizes["mxfp8"] == 2 * count - count * 33 // 32
    assert sizes["checkpoint"] - sizes["nvfp4"] == 2 * count - count * 9 // 16 - 3 * 6 * 4
    lines: list[str] = []
    options = replace(OPTIONS, projections="nvfp4", weights="dummy", dtype="bfloat16")
    build_engine(checkpoint, tmp_path / "engine", options, lines.append)
    told = "attention projections in nvfp4 where the checkpoint has plain ones; weights are dummies"
    assert any(line.startswith(told) for line in lines)
    assert np.isfinite(logits(tmp_path / "engine")).all()


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_is_refused(tmp_path: Path, form: str, value: float) -> None:
    weight = torch.ones(4, 64)
    weight[2, 3] = value
    save_file({"w": weight}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    part = Part("w", (4, 64), (slice(None), slice(None)))
    source = WeightSource((part,), quantize=Quantize(form, "codes"))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="tensor w has values that are no finite numbers"):
        Quantizer().piece("layers.0.attn.wq.e4m3", Checkpoint(tmp_path), source)


def test_a_quantized_checkpoint_is_taken_as_it_is(tmp_path: Path) -> None:
    """Codes and scales of every rank, whatever the build asks for; also where forms differ."""
    folder = write_small(tmp_path, model="inkling2-quantized-attention")
    checkpoint = Checkpoint(folder)
    tensors = {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    config = quantize_projections(parse_config(checkpoint.config), "nvfp4")
    attn = "model.llm.layers.1.attn."
    for rank in range(2):
        sources = weight_sources(config, checkpoint.names, rank, Sharding(2, "width"))

        def read(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
            full = f"layers.1.attn.{name}"
            return read_weight(PackedTensor(full, shape, dtype), checkpoint, sources[full])  # noqa: B023

        rows, columns = slice(48 * rank, 48 * rank + 48), slice(24 * rank, 24 * rank + 24)
        raw = tensors[f"{attn}wq_du.weight"].view(torch.uint8)
        assert torch.equal(read("wq.e4m3", (48, 64)), raw[rows])
        raw = tensors[f"{attn}wq_du.weight_scale"]
        assert torch.equal(read("wq.exponents", (48, 2)), raw[rows])
        assert torch.equal(read("wo.codes", (64, 24)), tensors[f"{attn}wo_ud.weight"][:, columns])
        raw = tensors[f"{attn}wo_ud.weight_scale"].view(torch.uint8)
        assert torch.equal(read("wo.scales", (64, 3)), raw[:, 3 * rank : 3 * rank + 3])
        amax = tensors[f"{attn}wo_ud.weight_amax"] / 1536.0
        assert torch.equal(read("wo.global_scale", (1,), torch.float32), amax)
        # Keys of this layer are plain there: the build quantizes them.
        made = quantize(tensors[f"{attn}wk_dv.weight"], "nvfp4")
        assert torch.equal(read("wk.codes", (16, 32)), made.codes[16 * rank : 16 * rank + 16])
        assert torch.equal(read("wk.global_scale", (1,), torch.float32), made.global_scale)
    last = [config.projections[2].wo, config.projections[2].wq]
    assert last == ["nvfp4", "nvfp4"]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("flint", {}, "projections mxfp8: this version quantizes those of Inkling-2 only"),
        ("inkling2", {}, "tp size 1 gives ranks 60 columns of wq in layer 0, which is no multiple"),
        ("inkling2-quantized", {"tp_size": 2}, "tp size 2 gives ranks 48 columns of wo in layer 0"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    tmp_path: Path, model: str, options: dict[str, Any], message: str
) -> None:
    checkpoint = write_small(tmp_path / "checkpoint", model=model)
    wanted = BuildOptions(projections="mxfp8", max_seq_len=200, **options)
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(Checkpoint(checkpoint), wanted)
    with pytest.raises(ConfigError, match="projections must be one of"):
        BuildOptions(projections="fp4")  # type: ignore[arg-type]
