"""Where every parameter of one rank stands in an Inkling checkpoint of either spelling.

MTP heads have the publisher's names only: transformers does not save them with the model. So have
quantized experts: X stands for codes, `X.scale` for scales, `X.scale2` for a global scale for each
expert. Their `X.input_amax` belongs to activations, which stay in 16 bits, and `X.original_shape`
says what the configuration does.
"""

from inkrt.engines.inkling.config import InklingConfig
from inkrt.engines.interface import MtpConfig, Part, Sharding, WeightSource
from inkrt.engines.quantization import WeightForm
from inkrt.engines.quantized_weights import check_form, expert_sources
from inkrt.engines.weight_map import RankMap, Spelling, find_spelling

_TOWER_ROOTS = ("model.visual.", "model.vision_tower.", "model.audio.", "model.audio_tower.")
_MTP_ROOT = "model.mtp."
_NEVER_READ = ("_weight.input_amax", "_weight.original_shape")

# Module parameter -> (publisher, transformers), relative to a layer.
_NORMS = {
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "mlp_norm": ("mlp_norm.weight", "post_attention_layernorm.weight"),
}
_ATTENTION = {
    "wq": ("attn.wq_du.weight", "self_attn.q_proj.weight"),
    "wk": ("attn.wk_dv.weight", "self_attn.k_proj.weight"),
    "wv": ("attn.wv_dv.weight", "self_attn.v_proj.weight"),
    "wr": ("attn.wr_du.weight", "self_attn.r_proj.weight"),
    "wo": ("attn.wo_ud.weight", "self_attn.o_proj.weight"),
    "q_norm": ("attn.q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn.k_norm.weight", "self_attn.k_norm.weight"),
    "rel_bank": ("attn.rel_logits_proj.proj", "self_attn.rel_logits_proj.proj"),
}
_KV_CONVS = {
    "attn.k_conv": ("attn.k_sconv.weight", "self_attn.k_sconv.conv1d.weight"),
    "attn.v_conv": ("attn.v_sconv.weight", "self_attn.v_sconv.conv1d.weight"),
}
_CONVS = {
    "attn_conv": ("attn_sconv.weight", "attn_sconv.conv1d.weight"),
    "mlp_conv": ("mlp_sconv.weight", "mlp_sconv.conv1d.weight"),
}


def is_mtp(name: str) -> bool:
    """Whether a tensor belongs to the MTP heads."""
    return name.startswith(_MTP_ROOT)


def is_ignored(name: str) -> bool:
    """Whether a tensor is of a tower, of MTP heads that are not built in, or of activations."""
    return name.startswith(_TOWER_ROOTS) or is_mtp(name) or name.endswith(_NEVER_READ)


def weight_sources(
    config: InklingConfig, names: frozenset[str], rank: int, sharding: Sharding
) -> dict[str, WeightSource]:
    """Map every parameter of `Inkling` on `rank` to its place in a checkpoint with these tensors.

    Raises:
        CheckpointError: the names follow neither spelling, or experts are quantized in another way
            than the configuration says.
    """
    spell = find_spelling(frozenset(x for x in names if not is_mtp(x)), "Inkling")
    make = _Map(config, spell, rank, sharding)
    hidden, vocab_size = config.hidden_size, config.vocab_size
    norm = spell.pick("embed_norm.weight", "embed_tokens.embed_norm.weight")
    sources = {
        "embed": make.whole(
            spell.pick("embed.weight", "embed_tokens.weight"), (vocab_size, hidden)
        ),
        "embed_norm": make.whole(norm, (hidden,)),
        "norm": make.whole(spell.root + "norm.weight", (hidden,)),
        # Both spellings keep the rows of padding.
        "unembed": make.vocabulary(spell.lm_head, vocab_size, config.unpadded_vocab_size, hidden),
    }
    for layer in range(config.num_hidden_layers):
        root = spell.in_layer(layer, ("", ""))
        forms = config.stored_experts[layer], config.experts[layer]
        if not config.is_dense[layer]:
            what = f"experts in layer {layer}"
            for name in ("experts.w13_weight", "experts.w2_weight"):
                check_form(names, f"{root}mlp.{name}.scale2", forms[0], what, spell)
        found = make.layer(
            root,
            is_sliding=config.is_sliding[layer],
            is_dense=config.is_dense[layer],
            forms=forms,
        )
        sources |= {f"layers.{layer}.{name}": source for name, source in found.items()}
    return sources


def mtp_sources(config: InklingConfig, mtp: MtpConfig) -> dict[str, WeightSource]:
    """Map every parameter of `Chain`, as `drafter`, to its place; the same on all ranks."""
    hidden = config.hidden_size
    make = _Map(config, Spelling(_MTP_ROOT, is_publisher=True), 0, Sharding(1, "experts"))
    sources = {}
    for depth in range(mtp.num_depths):
        where, ours = f"{_MTP_ROOT}layers.{depth}.", f"drafter.depths.{depth}."
        for name, shape in (
            ("hidden_norm", (hidden,)),
            ("embed_norm", (hidden,)),
            ("input_proj", (hidden, 2 * hidden)),
        ):
            sources[ours + name] = make.whole(f"{where}{name}.weight", shape)
        found = make.layer(
            f"{where}transformer_block.", is_sliding=mtp.is_sliding[depth], is_dense=True
        )
        sources |= {f"{ours}layer.{name}": source for name, source in found.items()}
    if mtp.has_chain_norm:
        sources["drafter.chain_norm"] = make.whole(f"{_MTP_ROOT}chain_norm.weight", (hidden,))
    return sources


class _Map(RankMap):
    """Builds the sources of one rank."""

    def __init__(
        self, config: InklingConfig, spelling: Spelling, rank: int, sharding: Sharding
    ) -> None:
        super().__init__(rank, sharding)
        self.config = config
        self.is_publisher = spelling.is_publisher

    def layer(
        self,
        root: str,
        *,
        is_sliding: bool,
        is_dense: bool,
        forms: tuple[WeightForm, WeightForm] = ("plain", "plain"),
    ) -> dict[str, WeightSource]:
        """Of a layer, whose tensors have names that begin with `root`.

        Routed experts have the first of `forms` in the checkpoint and the second in the engine.
        """
        config, shape = self.config, self.config.attention(is_sliding=is_sliding)
        hidden, size, taps = config.hidden_size, shape.head_dim, config.conv_kernel_size
        q_width, kv_width = shape.num_heads * size, shape.num_kv_heads * size
        names = {ours: root + self._pick(pair) for ours, pair in _ATTENTION.items()}
        sources = {
            name: self.whole(root + self._pick(pair), (hidden,)) for name, pair in _NORMS.items()
        }
        for name, shape_, dim in (
            ("wq", (q_width, hidden), 0),
            ("wk", (kv_width, hidden), 0),
            ("wv", (kv_width, hidden), 0),
            ("wr", (shape.num_heads * config.d_rel, hidden), 0),
            ("wo", (hidden, q_width), 1),
        ):
            sources[f"attn.{name}"] = self.shard(names[name], shape_, dim)
        for name in ("q_norm", "k_norm"):
            sources[f"attn.{name}"] = self.whole(names[name], (size,))
        sources["attn.rel_bank"] = self.whole(names["rel_bank"], (config.d_rel, shape.rel_extent))
        for convs, channels in ((_KV_CONVS, kv_width), (_CONVS, hidden)):
            for name, pair in convs.items():
                sources[f"{name}.weight"] = self.conv(
                    root + self._pick(pair), channels, taps, is_shared=convs is _KV_CONVS
                )
        mlp = self._dense(f"{root}mlp.") if is_dense else self._experts(f"{root}mlp.", forms)
        return sources | {f"mlp.{name}": source for name, source in mlp.items()}

    def _dense(self, root: str) -> dict[str, WeightSource]:
        hidden, width = self.config.hidden_size, self.config.intermediate_size
        down = root + self._pick(("w2_md.weight", "down_proj.weight"))
        return {
            "gate_up": self._gate_up(
                root, ("w13_dn.weight", "gate_proj.weight", "up_proj.weight"), (2 * width, hidden)
            ),
            "down": self.shard(down, (hidden, width), 1),
            "global_scale": self.whole(f"{root}global_scale", (1,)),
        }

    def _experts(self, root: str, forms: tuple[WeightForm, WeightForm]) -> dict[str, WeightSource]:
        config = self.config
        hidden, width = config.hidden_size, config.moe_intermediate_size
        num_routed, num_shared = config.n_routed_experts, config.n_shared_experts
        routed = root + self._pick(("experts.w13_weight", "experts.gate_up_proj"))
        down = root + self._pick(("experts.w2_weight", "experts.down_proj"))
        shared = (
            "shared_experts.shared_w13_weight",
            "shared_experts.gate_proj",
            "shared_experts.up_proj",
        )
        shared_down = root + self._pick(
            ("shared_experts.shared_w2_weight", "shared_experts.down_proj")
        )
        bias = root + self._pick(("gate.bias", "gate.e_score_correction_bias"))
        return {
            "router": self.whole(f"{root}gate.weight", (num_routed + num_shared, hidden)),
            "router_bias": self.whole(bias, (num_routed,)),
            "router_scale": self.whole(f"{root}gate.global_scale", (1,)),
            "shared_gate_up": self._gate_up(root, shared, (num_shared, 2 * width, hidden)),
            "shared_down": self.shard(shared_down, (num_shared, hidden, width), 2),
            **self._routed((routed, down), forms),
        }

    def _routed(
        self, names: tuple[str, str], forms: tuple[WeightForm, WeightForm]
    ) -> dict[str, WeightSource]:
        config, (gate_up, down), (stored, wanted) = self.config, names, forms
        sizes = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        num_routed, hidden, width = sizes
        if stored != "nvfp4":
            return {
                "gate_up": self.expert_gate_up(
                    gate_up, (num_routed, 2 * width, hidden), is_interleaved=self.is_publisher
                ),
                "down": self.expert_down(down, (num_routed, hidden, width)),
            }
        sources = expert_sources(self, names, sizes, (stored, wanted), ".scale")
        own = self.share(num_routed) if self.is_split_by_expert else slice(None)
        for ours, name in (("gate_up", gate_up), ("down", down)):
            scale = Part(f"{name}.scale2", (num_routed,), (own,), sign="not negative")
            sources[f"{ours}.global_scale"] = WeightSource((scale,))
        return sources

    def _gate_up(
        self, root: str, names: tuple[str, str, str], shape: tuple[int, ...]
    ) -> WeightSource:
        """This rank's rows: of the publisher's one tensor, or of transformers' two."""
        dim = len(shape) - 2
        both, *each = (root + name for name in names)
        half = (*shape[:dim], shape[dim] // 2, shape[-1])
        if self.is_publisher:
            return self.gate_up(both, shape, is_interleaved=True, rows=self.share(half[dim]))
        parts = (self.shard(name, half, dim).parts[0] for name in each)
        return WeightSource(tuple(parts), dim=dim)

    def _pick(self, pair: tuple[str, str]) -> str:
        return pair[0 if self.is_publisher else 1]
