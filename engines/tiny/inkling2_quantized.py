"""A tiny Inkling-2 with quantized experts, as its publisher ships them, or projections too.

Layers have NVFP4 experts, then MXFP8 ones, and the last one plain ones. Sizes are multiples of what
shares a scale on two ranks. Global scales are powers of two, so that the dequantized twin is the
same model bit for bit; amax and denominators are none, the latter one number for a tensor or one
for each expert.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from inkrt.engines.quantization import WeightForm
from inkrt.engines.tiny.inkling2 import Sizes
from inkrt.engines.tiny.nvfp4 import exact, packed, quantize_stack
from inkrt.plugins import mxfp8, nvfp4

SIZES = Sizes(hidden=64, expert_width=64)
LOOP_SIZES = Sizes(hidden=64, expert_width=64, num_layers=7, block_layers=2)
# Projections of attention that may be quantized.
PROJECTIONS = ("wq_du", "wk_dv", "wv_dv", "wr_du", "gate_attn", "wo_ud")
_ALGORITHMS: dict[WeightForm, str] = {"nvfp4": "NVFP4", "mxfp8": "MXFP8"}
_LARGEST_E4M3 = 448.0


class Plain(Protocol):
    """A tiny model without quantized weights: the modules `inkling2` and `inkling2_loop`."""

    def config(self, dtype: str, sizes: Sizes) -> dict[str, Any]:
        """The content of `config.json`."""
        ...

    def tensors(self, seed: int, dtype: torch.dtype, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its publisher's name."""
        ...

    def to_transformers(self, published: dict[str, Tensor]) -> dict[str, Tensor]:
        """Names and values in transformers."""
        ...


def form_of(layer: int, num_layers: int, *, is_mixed: bool = True) -> WeightForm:
    """How the experts of a layer of so many are stored."""
    if not is_mixed:
        return "mxfp8"
    if layer == num_layers - 1:
        return "plain"
    return "nvfp4" if layer < num_layers - 4 else "mxfp8"


def projection_form(layer: int, name: str, num_layers: int) -> WeightForm:
    """How a layer's attention projection is stored.

    As its experts, but for keys of the first layers, and output projections, whose columns make no
    whole blocks of MXFP8 on two ranks.
    """
    if name == "wk_dv" and layer < 2:
        return "mxfp8" if layer == 0 else "plain"
    form = form_of(layer, num_layers)
    return "nvfp4" if name == "wo_ud" and form == "mxfp8" else form


def config(
    dtype: str, *, plain: Plain, sizes: Sizes = SIZES, has_projections: bool = False,
    is_mixed: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The content of `config.json`; see `inkling2.config`.

    Args:
        dtype: main dtype.
        plain: the model.
        sizes: its own.
        has_projections: whether attention projections are quantized too.
        is_mixed: whether layers have different forms, as in the main release; else all experts are
            MXFP8, as in the other one.
    """
    if not is_mixed:
        uniform = {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": mxfp8.BLOCK}
        return plain.config(dtype, sizes) | {"quantization_config": uniform}
    forms: dict[str, WeightForm] = {}
    for layer in range(sizes.num_layers):
        root = f"model.llm.layers.{layer}"
        forms[f"{root}.mlp.experts"] = form_of(layer, sizes.num_layers)
        if has_projections:
            for name in PROJECTIONS:
                forms[f"{root}.attn.{name}"] = projection_form(layer, name, sizes.num_layers)
    quantized = {
        name: {"quant_algo": _ALGORITHMS[form]} for name, form in forms.items() if form != "plain"
    }
    return plain.config(dtype, sizes) | {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": quantized,
        }
    }


def tensors(
    seed: int, dtype: torch.dtype, *, plain: Plain, sizes: Sizes = SIZES,
    has_projections: bool = False, is_mixed: bool = True,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Every tensor by its publisher's name; see `config` and `inkling2.tensors`."""
    for name, value in plain.tensors(seed, dtype, sizes):
        is_expert = name.endswith(("experts.w13_weight", "experts.w2_weight"))
        *_, module, _ = name.rsplit(".", 2)
        if not is_expert and not (has_projections and module in PROJECTIONS):
            yield name, value
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        count = sizes.num_layers
        form = projection_form(layer, module, count)
        if is_expert:
            form = form_of(layer, count, is_mixed=is_mixed)
        if form == "plain":
            yield name, value
        elif form == "nvfp4":
            yield from _nvfp4(name, value.double())
        else:
            yield from _mxfp8(name, value.float())


def dequantize(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """The twin: the same names with the values that quantized weights stand for.

    They have the dtype of the other weights, which holds them exactly.
    """
    dtype = published["model.llm.embed.weight"].dtype
    values_of: dict[str, Tensor] = {}
    for name, value in published.items():
        if name.endswith(("_scale", "_amax", "_denominator")):
            continue
        values = value
        if (amax := published.get(f"{name}_amax")) is not None:
            denominator = published[f"{name}_outer_scale_denominator"]
            scales = published[f"{name}_scale"].view(torch.uint8)
            scale = (amax / denominator).reshape(-1, *[1] * (value.dim() - 1))
            values = exact(nvfp4.dequantize(value, scales, torch.float32) * scale, dtype, name)
        elif (exponents := published.get(f"{name}_scale")) is not None:
            codes = value.view(torch.uint8)
            values = exact(mxfp8.dequantize(codes, exponents, torch.float32), dtype, name)
        else:
            values = value
        values_of[name] = values
    return values_of


def to_transformers(published: dict[str, Tensor], *, plain: Plain) -> dict[str, Tensor]:
    """The twin under the names of transformers."""
    return plain.to_transformers(dequantize(published))


def _nvfp4(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    whole = quantize_stack(weight if weight.dim() == 3 else weight[None])
    is_scalar = name.endswith("w13_weight")
    denominator = torch.tensor(2688.0 if is_scalar else 1536.0)
    amax = whole.global_scale * denominator
    yield name, packed(whole.codes).view(*weight.shape[:-1], -1)
    scales = whole.scales.view(torch.float8_e4m3fn)
    yield f"{name}_scale", scales.view(*weight.shape[:-1], -1)
    yield f"{name}_amax", amax
    yield (
        f"{name}_outer_scale_denominator",
        denominator if is_scalar else denominator.expand(amax.shape).clone(),
    )


def _mxfp8(name: str, matrices: Tensor) -> Iterator[tuple[str, Tensor]]:
    blocks = matrices.unflatten(-1, (-1, mxfp8.BLOCK))  # type: ignore[no-untyped-call]
    largest = blocks.abs().amax(dim=-1)
    exponents = torch.ceil(torch.log2(largest / _LARGEST_E4M3)).clamp(min=-mxfp8.BIAS).int()
    codes = torch.ldexp(blocks, -exponents[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    yield name, codes
    yield f"{name}_scale", (exponents + mxfp8.BIAS).to(torch.uint8)
