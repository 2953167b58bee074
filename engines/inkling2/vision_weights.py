"""Where every parameter of Inkling-2's vision tower stands in a checkpoint of either spelling."""

from inkrt.engines.inkling2.vision_config import VisionConfig
from inkrt.engines.interface import Part, WeightSource
from inkrt.errors import CheckpointError

VISION_ROOTS = ("model.visual.", "model.vision_tower.")

# Module parameter -> (publisher, transformers), behind the root.
_NAMES = {
    "patch_embedding": ("backbone.embeddings.patch_embedding.weight",
                        "embeddings.patch_embedding.weight"),
    "position_embedding": ("backbone.embeddings.position_embedding",
                           "embeddings.position_embedding.weight"),
    "class_token": ("backbone.embeddings.class_embedding", "embeddings.class_embedding"),
    "class_position": ("backbone.embeddings.cls_position_embedding",
                       "embeddings.cls_position_embedding"),
    "norm": ("backbone.ln_pre", "pre_layernorm"),
    "proj_in": ("proj_in.weight", "merger.linear_1.weight"),
    "proj_out": ("proj_out.weight", "merger.linear_2.weight"),
}  # fmt: skip
# Likewise behind a layer, without "weight" and "bias" where a module has both.
_LAYER_NAMES = {
    "attn_norm": ("ln_1", "layernorm_before"),
    "wq": ("self_attn.q_proj", "self_attn.q_proj"),
    "wk": ("self_attn.k_proj", "self_attn.k_proj"),
    "wv": ("self_attn.v_proj", "self_attn.v_proj"),
    "wo": ("self_attn.out_proj", "self_attn.out_proj"),
    "attn_scale": ("ls_1.gamma", "lambda_1"),
    "mlp_norm": ("ln_2", "layernorm_after"),
    "up": ("mlp.c_fc", "mlp.fc1"),
    "down": ("mlp.c_proj", "mlp.fc2"),
    "mlp_scale": ("ls_2.gamma", "lambda_2"),
}


def vision_sources(config: VisionConfig, names: frozenset[str]) -> dict[str, WeightSource]:
    """Map every parameter of `VisionTower` to its place in a checkpoint with these tensors.

    Every rank has all of them.

    Raises:
        CheckpointError: the checkpoint has no vision tower.
    """
    roots = [root for root in VISION_ROOTS if any(name.startswith(root) for name in names)]
    if not roots:
        raise CheckpointError(
            f"the checkpoint has no vision tower: no {' or '.join(f'{r}*' for r in VISION_ROOTS)} "
            f"tensors; take a complete checkpoint or build without images"
        )
    root = roots[0]
    column = VISION_ROOTS.index(root)
    hidden, width = config.hidden_size, config.intermediate_size
    merged = config.patches_per_token * hidden
    sources = {
        "patch_embedding": (hidden, config.patch_values),
        "position_embedding": (config.posemb_grid_size**2, hidden),
        "class_token": (hidden,),
        "class_position": (hidden,),
        "proj_in": (config.projection_hidden_dim, merged),
        "proj_out": (config.text_hidden_size, config.projection_hidden_dim),
    }
    found = {ours: _whole(root + _NAMES[ours][column], shape) for ours, shape in sources.items()}
    found |= _pair("norm", root + _NAMES["norm"][column], (hidden,))
    matrices = dict.fromkeys(("wq", "wk", "wv", "wo"), (hidden, hidden))
    matrices |= {"up": (width, hidden), "down": (hidden, width)}
    layers = root + ("backbone.layers." if column == 0 else "layers.")
    for layer in range(config.num_hidden_layers):
        for ours, pair in _LAYER_NAMES.items():
            name, theirs = f"layers.{layer}.{ours}", f"{layers}{layer}.{pair[column]}"
            if ours.endswith("_scale"):
                found[name] = _whole(theirs, (hidden,))
            else:
                found |= _pair(name, theirs, matrices.get(ours, (hidden,)))
    return found


def _whole(name: str, shape: tuple[int, ...]) -> WeightSource:
    return WeightSource((Part(name, shape, (slice(None),) * len(shape)),))


def _pair(ours: str, theirs: str, shape: tuple[int, ...]) -> dict[str, WeightSource]:
    """A weight and the bias of its rows."""
    return {
        f"{ours}.weight": _whole(f"{theirs}.weight", shape),
        f"{ours}.bias": _whole(f"{theirs}.bias", shape[:1]),
    }
