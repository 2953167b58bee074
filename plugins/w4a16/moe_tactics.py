"""The tactic of a mixture-of-experts block: router, then gate_up and down or experts.cu."""

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
    MOE_WARPS,
    MULTIPROCESSORS,
    Dims,
    check_moe,
    check_smem,
    check_tokens,
    down_bytes,
    experts_bytes,
    gate_up_bytes,
    router_bytes,
)


def moe(
    dims: Dims,
    num_tokens: int,
    *,
    eps: float,
    has_delta: bool = True,
    names: Names | None = None,
) -> Tactic:
    """Residual add, norm, router, shared and routed experts, weighted sum.

    Three kernels for one token, two for more.

    Args:
        dims: sizes.
        num_tokens: T.
        eps: of the norm.
        has_delta: whether `delta` is added.
        names: parameters x, delta, norm_weight; router_weight bf16 [E, H]; shared_gate_up_codes and
            _scales (gate rows, then up rows), shared_gate_up_scale float32 [1]; gate_up_codes,
            _scales [E, ...] and gate_up_scale float32 [E]; down_codes, _scales, down_scale [E];
            shared_down_codes, _scales, shared_down_scale [1]; out and residual bf16 [T, H] are
            outputs 0 and 1 by default. With bf16 weights the `_scales` do not exist.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    check_tokens("moe", num_tokens)
    check_moe(dims)
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
    after = (
        _one_token(dims, [*sizes, when], names, own)
        if tokens == 1
        else (_more_tokens(dims, tokens, [*sizes, when], names, own),)
    )
    kernels = (
        launch(
            "router",
            [*sizes, when, ("HAS_DELTA", int(has_delta))],
            blocks=dims.shared_width // 8,
            threads=640,
            smem=check_smem("moe", router_bytes(dims, tokens)),
            params=params_of(
                "x delta norm_weight router_weight shared_gate_up_codes shared_gate_up_scale "
                "residual z logits shared_hidden error T eps",
                names,
                own,
            ),
        ),
        *after,
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


def _one_token(
    dims: Dims, macros: Defines, names: Names | None, own: Names
) -> tuple[KernelLaunch, ...]:
    """gate_up, then down."""
    depth = 2 if dims.bf16 else 3  # tiles of a warp that come into registers
    most = dims.top_k * dims.width // 8
    # A bf16 tile is large: one that the registers have no room for is staged in shared memory.
    blocks = min(most, MULTIPROCESSORS) if dims.bf16 else -(-most // depth)
    tiles = -(-most // blocks)
    depth = min(depth, tiles)
    # What the router's block on the SM leaves, or the one of `down`.
    registers = 96 if dims.bf16 else 56
    return (
        launch(
            "gate_up",
            [*macros, ("DEPTH", depth), ("TILES", tiles), ("REGISTERS", registers)],
            blocks=blocks,
            threads=MOE_WARPS * 32,
            # Large blocks: one on each SM.
            smem=max(
                check_smem("moe", gate_up_bytes(dims, tiles, depth)),
                0 if dims.bf16 else LARGE_BLOCK,
            ),
            params=params_of("z logits gate_up_codes gate_up_scale hidden error", names, own),
        ),
        launch(
            "down",
            [*macros, ("REGISTERS", 64 if dims.bf16 else 80)],
            blocks=dims.hidden // 16,
            threads=256,
            smem=down_bytes(dims),
            params=params_of(
                "logits hidden shared_hidden down_codes down_scale shared_down_codes "
                "shared_down_scale out error",
                names,
                own,
            ),
        ),
    )


def _more_tokens(
    dims: Dims, num_tokens: int, macros: Defines, names: Names | None, own: Names
) -> KernelLaunch:
    """Routed experts and the shared one's end in one launch."""
    most = min(dims.experts, num_tokens * dims.top_k) * dims.width // 8
    blocks = min(MULTIPROCESSORS, max(dims.hidden // 16, -(-most // MOE_WARPS)))
    stages = 4
    return launch(
        "experts",
        [*macros, ("STAGES", stages), ("BLOCKS", blocks)],
        blocks=blocks,
        threads=MOE_WARPS * 32,
        smem=check_smem("moe", experts_bytes(dims, stages)),
        params=params_of(
            "z logits shared_hidden gate_up_codes gate_up_scale down_codes down_scale "
            "shared_down_codes shared_down_scale hidden out arrivals error T",
            names,
            {**own, "arrivals": Scratch("arrivals", 8, fill=0)},
        ),
    )
