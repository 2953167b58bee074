"""The tactic of a mixture-of-experts block: router, gate_up and down, see their CUDA files."""

from inkrt.plugins.tactic import (
    Float32,
    Int32,
    KernelLaunch,
    Output,
    Param,
    Scratch,
    Tactic,
)
from inkrt.plugins.w4a16.launches import (
    Defines,
    Names,
    launch,
    packings_of,
    params_of,
    trigger,
)
from inkrt.plugins.w4a16.shapes import (
    LARGE_BLOCK,
    MAX_NORM_WIDTH,
    MULTIPROCESSORS,
    Dims,
    check_smem,
    check_tokens,
    check_width,
    down_bytes,
    gate_up_bytes,
    require,
    router_bytes,
    router_rows,
)


def moe(
    dims: Dims,
    num_tokens: int,
    *,
    eps: float,
    has_delta: bool = True,
    warps: int = 16,
    depth: int | None = None,
    names: Names | None = None,
) -> Tactic:
    """Residual add, norm, router, shared and routed experts, weighted sum: three kernels.

    Args:
        dims: sizes.
        num_tokens: T.
        eps: of the norm.
        has_delta: whether `delta` is added.
        warps: of a block of gate_up, 8 or 16; the same for all T, or rows differ in their last bit.
        depth: tiles of a block of gate_up that are on their way at once; None for a good number.
        names: parameters x, delta, norm_weight; router_weight bf16 [E, H]; shared_gate_up_codes and
            _scales (gate rows, then up rows), shared_gate_up_scale float32 [1]; gate_up_codes,
            _scales [E, ...] and gate_up_scale float32 [E]; down_codes, _scales, down_scale [E];
            shared_down_codes, _scales, shared_down_scale [1]; out and residual bf16 [T, H] are
            outputs 0 and 1 by default. With bf16 weights the `_scales` do not exist.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    check_tokens("moe", num_tokens)
    check_width("moe", "hidden", dims.hidden, MAX_NORM_WIDTH)
    check_width("moe", "width", dims.width, 512)
    check_width("moe", "shared_width", dims.shared_width, 8192)
    require(
        dims.shared_width % dims.width == 0,
        "moe",
        f"shared_width={dims.shared_width}, expected a multiple of width={dims.width}",
    )
    require(
        dims.experts <= 256 and dims.experts % 8 == 0,
        "moe",
        f"experts={dims.experts}, expected a multiple of 8 up to 256",
    )
    most = min(8, dims.experts)
    require(1 <= dims.top_k <= most, "moe", f"top_k={dims.top_k}, expected 1 to {most}")
    require(
        router_rows(dims) <= 8,
        "moe",
        f"experts={dims.experts} over shared_width={dims.shared_width}, expected at most one "
        f"expert for each shared row",
    )
    tokens, top_k = num_tokens, dims.top_k
    own: dict[str, Param] = {
        "out": Output(0),
        "residual": Output(1),
        "T": Int32(tokens),
        "eps": Float32(eps),
        "z": Scratch("z", tokens * dims.hidden * 2),
        "logits": Scratch("logits", tokens * dims.experts * 2),
        "hidden": Scratch("hidden", tokens * top_k * dims.width * 2),
        "shared_hidden": Scratch("shared_hidden", tokens * dims.shared_width * 2),
    }
    sizes = [
        ("HIDDEN", dims.hidden), ("EXPERTS", dims.experts), ("TOP_K", top_k),
        ("WIDTH", dims.width), ("SHARED_WIDTH", dims.shared_width), ("WEIGHTS", int(dims.bf16)),
        ("ONE_TOKEN", int(tokens == 1)),
    ]  # fmt: skip
    when = ("TRIGGER", trigger(tokens))
    down_depth = 1 if tokens == 1 or dims.bf16 else 2
    kernels = (
        launch(
            "router",
            [*sizes, when, ("HAS_DELTA", int(has_delta))],
            blocks=dims.shared_width // 8,
            threads=640,
            smem=check_smem("moe", router_bytes(dims)),
            params=params_of(
                "x delta norm_weight router_weight shared_gate_up_codes shared_gate_up_scale "
                "residual z logits shared_hidden error T eps",
                names,
                own,
            ),
        ),
        _gate_up(
            dims,
            tokens,
            warps,
            depth,
            sizes,
            params_of("z logits gate_up_codes gate_up_scale hidden T", names, own),
        ),
        launch(
            "down",
            [*sizes, when, ("DEPTH", down_depth)],
            blocks=dims.hidden // 16,
            threads=256,
            smem=down_bytes(dims),
            params=params_of(
                "logits hidden shared_hidden down_codes down_scale shared_down_codes "
                "shared_down_scale out T",
                names,
                own,
            ),
        ),
    )
    # Independent routing: the expected number of distinct experts.
    distinct = dims.experts * (1 - (1 - top_k / dims.experts) ** tokens)
    expert = 3 * dims.hidden * dims.width
    shared = 3 * dims.hidden * dims.shared_width
    per_value = dims.chunk_bytes / 4096
    router_size = dims.experts * dims.hidden
    return Tactic(
        name="w4a16_moe",
        kernels=kernels,
        bytes=round((distinct * expert + shared) * per_value)
        + 2 * router_size
        + 8 * tokens * dims.hidden,
        flops=2 * tokens * (top_k * expert + shared + router_size),
        packings=packings_of(
            dims,
            names,
            ("shared_gate_up_codes", "shared_gate_up_scales", "gated"),
            ("gate_up_codes", "gate_up_scales", "gated"),
            ("down_codes", "down_scales", "plain"),
            ("shared_down_codes", "shared_down_scales", "plain"),
        ),
    )


def _gate_up(
    dims: Dims, num_tokens: int, warps: int, depth: int | None, sizes: Defines,
    params: tuple[Param, ...],
) -> KernelLaunch:  # fmt: skip
    require(warps in (8, 16), "moe", f"warps={warps}, expected 8 or 16")
    one_token = num_tokens == 1
    if depth is None:
        for_one, for_more = (1, 2) if warps == 8 else (3, 4)
        depth = 1 if dims.bf16 else for_one if one_token else for_more
    # What the other blocks of an SM leave: three blocks of 8 warps, or one of 16 beside the router.
    if dims.bf16 or not (one_token or warps == 16):
        registers = 128
    elif warps == 8:
        registers = 80
    else:
        registers = 56 if one_token and depth <= 3 else 96
    tiles = min(dims.experts, num_tokens * dims.top_k) * dims.width // 8
    blocks = -(-tiles // depth) if one_token else min(tiles, MULTIPROCESSORS * 16 // warps)
    return launch(
        "gate_up",
        [*sizes, ("WARPS", warps), ("DEPTH", depth), ("REGISTERS", registers)],
        blocks=blocks,
        threads=warps * 32,
        # One token, large blocks: one on each SM.
        smem=max(
            gate_up_bytes(dims, warps, depth, one_token=one_token),
            LARGE_BLOCK if one_token and warps == 16 else 0,
        ),
        params=params,
    )
