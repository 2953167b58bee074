"""flint_layers: a run of Flint's expert layers, one after the other.

    for each layer:
        x, q, k, v           = norm_qkv_rope(x, delta, input_norm, qkv, q_norm, k_norm)
        delta                = linear_nvfp4(sink_attention(q, k, v, sinks), o)
        x, z, logits, shared = norm_router_shared(x, delta, mlp_norm, router, shared_gate_up)
        delta                = flint_moe(z, logits, shared, gate_up, down, shared_down)

It has the bits of those operators one after the other. What differs from layer to layer comes in
lists with an entry per layer; layers have the same shapes, but for the first two dimensions of
their caches. Weights are NVFP4 (`plugins.nvfp4`). Keys and values are written before they are read,
so a ring must hold the step besides the window.
Source: flint.md sections 4 and 5. Letters: T tokens, D hidden size, H query heads, KV key/value
heads, d head size, E experts, F an expert's width, Fs the shared expert's.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, shuffled_pages, step_arguments, weight_arguments
from inkrt.plugins.flint_moe.op import flint_moe
from inkrt.plugins.linear_nvfp4.op import project
from inkrt.plugins.norm_qkv_rope.op import norm_qkv_rope
from inkrt.plugins.norm_router_shared.op import norm_router_shared
from inkrt.plugins.nvfp4 import fit_weight
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.sink_attention.op import sink_attention


def fake(
    x: Tensor,
    delta: Tensor,
    input_norm: list[Tensor],
    qkv: list[Tensor],
    qkv_scales: list[Tensor],
    qkv_global_scale: list[Tensor],
    q_norm: list[Tensor],
    k_norm: list[Tensor],
    sinks: list[Tensor],
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    o: list[Tensor],
    o_scales: list[Tensor],
    o_global_scale: list[Tensor],
    mlp_norm: list[Tensor],
    router: list[Tensor],
    shared_gate_up: list[Tensor],
    shared_gate_up_scales: list[Tensor],
    shared_gate_up_global_scale: list[Tensor],
    gate_up: list[Tensor],
    gate_up_scales: list[Tensor],
    gate_up_global_scale: list[Tensor],
    down: list[Tensor],
    down_scales: list[Tensor],
    down_global_scale: list[Tensor],
    shared_down: list[Tensor],
    shared_down_scales: list[Tensor],
    shared_down_global_scale: list[Tensor],
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    windows: list[int],
    rope_thetas: list[float],
    eps: float,
    scale: float,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Residual and delta [T, D] in x's dtype."""
    axes = Axes("flint_layers")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("delta", delta, "T", "D", dtype=x.dtype)
    if page_table is not None:
        axes.fit("page_table", page_table, "max_pages", dtype=torch.int32)
    axes.step(position, num_tokens, slot)
    axes.require(eps >= 0, f"eps is {eps}, expected >= 0")
    axes.require(scale > 0, f"scale is {scale}, expected > 0")
    lists = {
        "input_norm": input_norm,
        "qkv": qkv,
        "qkv_scales": qkv_scales,
        "qkv_global_scale": qkv_global_scale,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "sinks": sinks,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "o": o,
        "o_scales": o_scales,
        "o_global_scale": o_global_scale,
        "mlp_norm": mlp_norm,
        "router": router,
        "shared_gate_up": shared_gate_up,
        "shared_gate_up_scales": shared_gate_up_scales,
        "shared_gate_up_global_scale": shared_gate_up_global_scale,
        "gate_up": gate_up,
        "gate_up_scales": gate_up_scales,
        "gate_up_global_scale": gate_up_global_scale,
        "down": down,
        "down_scales": down_scales,
        "down_global_scale": down_global_scale,
        "shared_down": shared_down,
        "shared_down_scales": shared_down_scales,
        "shared_down_global_scale": shared_down_global_scale,
    }
    num_layers, is_paged = len(windows), page_table is not None
    axes.require(num_layers > 0, "windows is empty, expected an entry per layer")
    lengths = {name: len(tensors) for name, tensors in lists.items()}
    for name, length in {**lengths, "rope_thetas": len(rope_thetas)}.items():
        axes.require(
            length == num_layers,
            f"{name} has {length} entries and windows has {num_layers}, expected as many",
        )
    for index, (window, rope_theta) in enumerate(zip(windows, rope_thetas, strict=True)):
        of_layer = Axes(f"flint_layers: layer {index}")
        of_layer.sizes = {k: size for k, size in axes.sizes.items() if k not in _CACHE_AXES}
        layer = {name: tensors[index] for name, tensors in lists.items()}
        _fit_attention(of_layer, layer, x.dtype, window, rope_theta, is_paged=is_paged)
        _fit_experts(of_layer, layer, x.dtype, top_k)
        axes = of_layer
    return x.new_empty(x.shape), x.new_empty(x.shape)


# Rings and pages stand side by side.
_CACHE_AXES = ("entries", "rows")


def _fit_matrix(
    axes: Axes, layer: dict[str, Tensor], name: str, *letters: str, dtype: torch.dtype
) -> None:
    parts = (layer[f"{name}{suffix}"] for suffix in ("", "_scales", "_global_scale"))
    fit_weight(axes, name, *parts, *letters, dtype=dtype)  # type: ignore[arg-type]


def _fit_attention(
    axes: Axes,
    layer: dict[str, Tensor],
    dtype: torch.dtype,
    window: int,
    rope_theta: float,
    *,
    is_paged: bool,
) -> None:
    """Check a layer up to its output projection; x [T, D] is bound in `axes`."""
    axes.fit("input_norm", layer["input_norm"], "D", dtype=MODEL_DTYPES)
    _fit_matrix(axes, layer, "qkv", "N", "D", dtype=dtype)
    axes.fit("q_norm", layer["q_norm"], "d", dtype=MODEL_DTYPES)
    axes.fit("k_norm", layer["k_norm"], "d", dtype=MODEL_DTYPES)
    axes.fit("sinks", layer["sinks"], "H", dtype=torch.float32)
    axes.fit("k_cache", layer["k_cache"], "entries", "rows", "KV", "d", dtype=dtype)
    axes.fit("v_cache", layer["v_cache"], "entries", "rows", "KV", "d", dtype=dtype)
    num_heads, num_kv, head_dim = axes["H"], axes["KV"], axes["d"]
    axes.require(
        axes["N"] == (num_heads + 2 * num_kv) * head_dim and num_heads % num_kv == 0,
        f"qkv has {axes['N']} rows, expected (H+2*KV)*d with H={num_heads}, KV={num_kv}, "
        f"d={head_dim} and H a multiple of KV",
    )
    axes.sizes["H*d"] = num_heads * head_dim
    _fit_matrix(axes, layer, "o", "D", "H*d", dtype=dtype)
    axes.require(rope_theta >= 0, f"rope_theta is {rope_theta}, expected >= 0, 0 being no rope")
    axes.require(
        rope_theta == 0 or head_dim % 2 == 0, f"heads have {head_dim} channels, expected even"
    )
    axes.require(window >= 0, f"window is {window}, expected >= 0, 0 being all keys")
    if window == 0:
        axes.require(is_paged, "window is 0 (all keys) without pages, expected a page table")
    else:
        least = window - 1 + axes["T"]
        axes.require(
            axes["rows"] >= least,
            f"k_cache keeps {axes['rows']} positions, expected at least window-1+T={least}",
        )


def _fit_experts(axes: Axes, layer: dict[str, Tensor], dtype: torch.dtype, top_k: int) -> None:
    """Check the rest of a layer."""
    axes.fit("mlp_norm", layer["mlp_norm"], "D", dtype=MODEL_DTYPES)
    axes.fit("router", layer["router"], "E", "D", dtype=dtype)
    axes.require(1 <= top_k <= axes["E"], f"top_k is {top_k}, expected 1 to E={axes['E']}")
    _fit_matrix(axes, layer, "down", "E", "D", "F", dtype=dtype)
    _fit_matrix(axes, layer, "gate_up", "E", "2F", "D", dtype=dtype)
    _fit_matrix(axes, layer, "shared_down", "D", "Fs", dtype=dtype)
    _fit_matrix(axes, layer, "shared_gate_up", "2Fs", "D", dtype=dtype)
    for name, width in (("gate_up", "F"), ("shared_gate_up", "Fs")):
        rows, wanted = axes[f"2{width}"], 2 * axes[width]
        axes.require(rows == wanted, f"{name} has {rows} rows, expected 2{width}={wanted}")


# Sizes of the cases.
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 8, 2, 16
_EXPERTS, _TOP_K, _HIDDEN, _SHARED = 8, 3, 32, 48
_RING_ROWS, _PAGE_TOKENS, _NUM_PAGES = 12, 4, 9


def _layer(dtype: torch.dtype, generator: torch.Generator, *, is_sliding: bool) -> Arguments:
    """What a layer adds to the lists."""

    def norm(size: int) -> Tensor:
        return 1 + normal(generator, dtype, size, scale=0.2)

    def matrix(name: str, *shape: int) -> Arguments:
        scale = shape[-1] ** -0.5
        weight = weight_arguments(name, generator, dtype, *shape, scale=scale, quantized=True)
        # The largest scale there is would make one value of a layer drown the others, and the next
        # layer magnify their roundings.
        weight[f"{name}_scales"].clamp_(max=0x3F)
        return weight

    first = (3, _RING_ROWS) if is_sliding else (_NUM_PAGES, _PAGE_TOKENS)
    cache = (*first, _KV_HEADS, _HEAD_DIM)
    width = _HEADS * _HEAD_DIM
    return {
        "input_norm": norm(_WIDTH),
        **matrix("qkv", width + 2 * _KV_HEADS * _HEAD_DIM, _WIDTH),
        "q_norm": norm(_HEAD_DIM),
        "k_norm": norm(_HEAD_DIM),
        "sinks": normal(generator, torch.float32, _HEADS, scale=2.0),
        "k_cache": normal(generator, dtype, *cache),
        "v_cache": normal(generator, dtype, *cache),
        **matrix("o", _WIDTH, width),
        "mlp_norm": norm(_WIDTH),
        # Logits far apart: hardly any rounding chooses other experts than the oracle does.
        "router": normal(generator, dtype, _EXPERTS, _WIDTH, scale=4 * _WIDTH**-0.5),
        **matrix("shared_gate_up", 2 * _SHARED, _WIDTH),
        **matrix("gate_up", _EXPERTS, 2 * _HIDDEN, _WIDTH),
        **matrix("down", _EXPERTS, _WIDTH, _HIDDEN),
        **matrix("shared_down", _WIDTH, _SHARED),
    }


def cases() -> list[Case]:
    """Rings and their wrap, pages and their ends, with and without rope, decode and verify."""

    def make(
        name: str, num_rows: int, position: int, layers: list[tuple[int, float]],
        *, num_tokens: int | None = None,
    ) -> Case:  # fmt: skip
        """Layers are pairs of a window and the base of the rotation."""

        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            drawn = [_layer(dtype, generator, is_sliding=window > 0) for window, _ in layers]
            is_paged = any(window == 0 for window, _ in layers)
            return {
                "x": normal(generator, dtype, num_rows, _WIDTH),
                "delta": normal(generator, dtype, num_rows, _WIDTH),
                **{key: [layer[key] for layer in drawn] for key in drawn[0]},
                "page_table": shuffled_pages(generator, _NUM_PAGES, 7) if is_paged else None,
                **step_arguments(position, num_tokens or num_rows, slot=1),
                "windows": [window for window, _ in layers],
                "rope_thetas": [theta for _, theta in layers],
                "eps": 1e-6,
                "scale": _HEAD_DIM**-0.5,
                "top_k": _TOP_K,
            }

        # bfloat16 rounds a dozen times in a layer, and a layer's error goes through the next.
        return Case(name, arguments, {torch.float32: 2e-6, torch.bfloat16: 2e-2})

    mixed = [(6, 10000.0), (0, 0.0), (8, 500.0)]
    return [
        make("one sliding layer", 1, 7, [(6, 10000.0)]),
        make("mixed decode, rings wrap", 1, 13, mixed),
        make("mixed verify over the ends", 3, 11, mixed),
        make("full layer with rope, first tokens", 3, 0, [(0, 10000.0)]),
        make("padded verify", 3, 22, [(0, 0.0), (5, 0.0)], num_tokens=2),
    ]


@operator("flint_layers", fake=fake, cases=cases, mutates=("k_cache", "v_cache"))
def flint_layers(
    x: Tensor,
    delta: Tensor,
    input_norm: list[Tensor],
    qkv: list[Tensor],
    qkv_scales: list[Tensor],
    qkv_global_scale: list[Tensor],
    q_norm: list[Tensor],
    k_norm: list[Tensor],
    sinks: list[Tensor],
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    o: list[Tensor],
    o_scales: list[Tensor],
    o_global_scale: list[Tensor],
    mlp_norm: list[Tensor],
    router: list[Tensor],
    shared_gate_up: list[Tensor],
    shared_gate_up_scales: list[Tensor],
    shared_gate_up_global_scale: list[Tensor],
    gate_up: list[Tensor],
    gate_up_scales: list[Tensor],
    gate_up_global_scale: list[Tensor],
    down: list[Tensor],
    down_scales: list[Tensor],
    down_global_scale: list[Tensor],
    shared_down: list[Tensor],
    shared_down_scales: list[Tensor],
    shared_down_global_scale: list[Tensor],
    page_table: Tensor | None,
    position: Tensor,
    num_tokens: Tensor,
    slot: Tensor,
    windows: list[int],
    rope_thetas: list[float],
    eps: float,
    scale: float,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Run all layers on the residual stream.

    Lists have an entry per layer, here described by one. Matrices are NVFP4: codes, scales and a
    global scale, see `plugins.nvfp4`; the shapes given are those of their values.

    Args:
        x: [T, D] float32 or bfloat16, the residual stream; all activations have its dtype.
        delta: [T, D], the output of the layer before, still to be added.
        input_norm: [D], of the norm in front of attention.
        qkv: [(H + 2 * KV) * d, D]: rows of queries, keys, values.
        qkv_scales: of qkv.
        qkv_global_scale: float32 [1].
        q_norm: [d], of every query head.
        k_norm: [d], of every key head.
        sinks: float32 [H], logits.
        k_cache: [slots, R, KV, d] with R >= window - 1 + T, or [pages, page_tokens, KV, d] where
            the window is 0; written.
        v_cache: like k_cache.
        o: [D, H * d].
        o_scales: of o.
        o_global_scale: float32 [1].
        mlp_norm: [D], of the norm in front of the experts.
        router: x's dtype [E, D].
        shared_gate_up: [2 * Fs, D], the gate's rows first.
        shared_gate_up_scales: of shared_gate_up.
        shared_gate_up_global_scale: float32 [1].
        gate_up: [E, 2 * F, D], the gate's F rows first.
        gate_up_scales: of gate_up.
        gate_up_global_scale: float32 [E].
        down: [E, D, F].
        down_scales: of down.
        down_global_scale: float32 [E].
        shared_down: [D, Fs].
        shared_down_scales: of shared_down.
        shared_down_global_scale: float32 [1].
        page_table: int32 [max_pages], of the layers whose window is 0; None if there are none.
        position: int32 [1], of the first token.
        num_tokens: int32 [1]; rows at and above it are padding.
        slot: int32 [1].
        windows: keys that a row sees, itself included; 0 for all, which are then in pages.
        rope_thetas: base of the rotation; 0 for none.
        eps: of all norms.
        scale: of the attention's scores.
        top_k: experts per token.

    Returns:
        The residual stream [T, D] in front of the last layer's experts, and the output [T, D] of
        the last layer, still to be added; both in x's dtype.
    """
    for layer, (window, rope_theta) in enumerate(zip(windows, rope_thetas, strict=True)):
        caches = (k_cache[layer], v_cache[layer])
        where = (*caches, None if window else page_table, position, num_tokens, slot)
        x, q, k, v = norm_qkv_rope(
            x, delta, input_norm[layer], qkv[layer], qkv_scales[layer], qkv_global_scale[layer],
            q_norm[layer], k_norm[layer], *where, eps, rope_theta,
        )  # fmt: skip
        heads = sink_attention(q, k, v, sinks[layer], *where, window, scale)
        delta = project(
            heads.view(len(x), -1), o[layer], o_scales[layer], o_global_scale[layer], False
        )
        x, z, logits, shared = norm_router_shared(
            x, delta, mlp_norm[layer], router[layer], shared_gate_up[layer],
            shared_gate_up_scales[layer], shared_gate_up_global_scale[layer], eps,
        )  # fmt: skip
        delta = flint_moe(
            z, logits, shared, gate_up[layer], gate_up_scales[layer], gate_up_global_scale[layer],
            down[layer], down_scales[layer], down_global_scale[layer], shared_down[layer],
            shared_down_scales[layer], shared_down_global_scale[layer], None, top_k, False,
        )  # fmt: skip
    return x, delta
