"""Where every parameter of one rank stands in an Inkling-2 checkpoint of either spelling."""

from dataclasses import replace
from typing import TYPE_CHECKING

from inkrt.engines.inkling2.config import Inkling2Config
from inkrt.engines.inkling2.vision_weights import VISION_ROOTS
from inkrt.engines.interface import Part, Quantize, Sharding, WeightSource
from inkrt.engines.quantized_weights import PIECES, check_form, encoded, expert_sources, quotient
from inkrt.engines.weight_map import RankMap, find_spelling

if TYPE_CHECKING:
    from inkrt.engines.quantization import WeightForm

# Module parameter -> (publisher, transformers), relative to a layer.
_ATTENTION_NAMES = {
    "attn.wq": ("attn.wq_du.weight", "self_attn.q_proj.linear.weight"),
    "attn.wk": ("attn.wk_dv.weight", "self_attn.k_proj.linear.weight"),
    "attn.wv": ("attn.wv_dv.weight", "self_attn.v_proj.linear.weight"),
    "attn.wr": ("attn.wr_du.weight", "self_attn.relative_position_bias.linear.weight"),
    "attn.wsink": ("attn.attn_sink_proj.weight", "self_attn.sink_proj.weight"),
    "attn.wgate": ("attn.gate_attn.weight", "self_attn.o_proj.gate_proj.weight"),
    "attn.wo": ("attn.wo_ud.weight", "self_attn.o_proj.linear.weight"),
    "attn.q_scale": ("attn.q_l2_clip.scale", "self_attn.q_proj.norm.scale"),
    "attn.rel_scale": ("attn.rel_l2_clip.scale", "self_attn.relative_position_bias.norm.scale"),
    "attn.rel_bank": ("attn.rel_logits_proj.proj", "self_attn.relative_position_bias.proj"),
}
_INPUT_NORMS = {
    1: (("attn_norm.weight", "input_layernorm.weight"),),
    3: tuple((f"{x}_input_norm.weight", f"{x}_input_layernorm.weight") for x in "qkv"),
}


def is_ignored(name: str) -> bool:
    """Whether a tensor belongs to the vision tower, which text engines leave out."""
    return name.startswith(VISION_ROOTS)


def weight_sources(
    config: Inkling2Config, names: frozenset[str], rank: int, sharding: Sharding
) -> dict[str, WeightSource]:
    """Map every parameter of `Inkling2` on `rank` to its place in a checkpoint with these tensors.

    Raises:
        CheckpointError: the names follow neither spelling, or experts are quantized in another way
            than the configuration says.
    """
    return TextMap(config, names, rank, sharding).sources()


class TextMap(RankMap):
    """Builds the sources of one rank of an Inkling-2 text model."""

    def __init__(
        self, config: Inkling2Config, names: frozenset[str], rank: int, sharding: Sharding
    ) -> None:
        super().__init__(rank, sharding)
        self.config = config
        self.names = names
        self.spell = find_spelling(names, "Inkling-2")

    def query(self, layer: int, kind: str) -> str:
        """Mix queries; the publisher numbers attention queries from the second layer on."""
        if kind == "attn":
            return self.spell.pick(
                f"attn_res.attn_queries.{layer - 1}", f"layers.{layer}.attention_input.query"
            )
        return self.spell.pick(f"attn_res.mlp_queries.{layer}", f"layers.{layer}.mlp_input.query")

    def sources(self) -> dict[str, WeightSource]:
        """Of all parameters."""
        config, spell = self.config, self.spell
        hidden = config.hidden_size
        sources = {
            "embed": self.whole(
                spell.pick("embed.weight", "embed_tokens.weight"), (config.vocab_size, hidden)
            ),
            "embed_norm": self.whole(
                spell.pick("embed_norm.weight", "embed_tokens.embed_norm.weight"), (hidden,)
            ),
            "output_input.queries": self.queries(
                spell.pick("attn_res.output_query", "final_input.query"), 1
            ),
            "output_input.norms.0": self.whole(spell.root + "norm.weight", (hidden,)),
            "unembed": self.unembed(),
        }
        for layer in range(config.num_hidden_layers):
            for name, source in self.layer(layer).items():
                sources[f"layers.{self.place(layer)}.{name}"] = source
        return sources

    def place(self, layer: int) -> int:
        """Where a layer's parameters stand among the module's layers."""
        return layer

    def layer(self, layer: int) -> dict[str, WeightSource]:
        """Of a layer's parameters, by their names in it."""
        config, spell = self.config, self.spell
        hidden = config.hidden_size
        num_queries = 1 if config.is_sliding[layer] else 3
        sources = self.attention(layer) | self.experts(layer)
        for index, pair in enumerate(_INPUT_NORMS[num_queries]):
            sources[f"attn_input.norms.{index}"] = self.whole(
                spell.in_layer(layer, pair), (hidden,)
            )
        if layer > 0:
            sources["attn_input.queries"] = self.queries(self.query(layer, "attn"), num_queries)
        sources["mlp_input.queries"] = self.queries(self.query(layer, "mlp"), 1)
        sources["mlp_input.norms.0"] = self.whole(
            spell.in_layer(layer, ("mlp_norm.weight", "post_attention_layernorm.weight")), (hidden,)
        )
        for ours, pair in (
            ("attn_conv", ("attn_sconv.weight", "post_attention_convolution.conv1d.weight")),
            ("mlp_conv", ("mlp_sconv.weight", "post_mlp_convolution.conv1d.weight")),
        ):
            name, taps = spell.in_layer(layer, pair), config.conv_kernel_size
            sources[f"{ours}.weight"] = self.conv(name, hidden, taps, is_shared=False)
        return sources

    def attention(self, layer: int) -> dict[str, WeightSource]:
        """Of a layer's attention."""
        config, shape = self.config, self.config.attention(layer)
        hidden, taps = config.hidden_size, config.conv_kernel_size
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        projections = {
            "wq": (q_width, hidden),
            "wk": (kv_width, hidden),
            "wv": (kv_width, hidden),
            "wr": (shape.num_heads * config.d_rel, hidden),
            "wgate": (q_width, hidden),
            "wo": (hidden, q_width),
        }
        shapes = {
            "attn.wsink": (shape.num_heads, hidden),
            "attn.q_scale": (shape.num_heads, shape.head_dim),
            "attn.rel_scale": (shape.num_heads, config.d_rel),
        }
        names = {ours: self.spell.in_layer(layer, pair) for ours, pair in _ATTENTION_NAMES.items()}
        sources = {ours: self.shard(names[ours], size, 0) for ours, size in shapes.items()}
        for ours, size in projections.items():
            sources |= self.projection(layer, ours, names[f"attn.{ours}"], size)
        sources["attn.rel_bank"] = self.whole(
            names["attn.rel_bank"], (config.d_rel, shape.rel_extent)
        )
        for x in "kv":
            publisher, ours = f"attn.{x}_sconv", f"attn.{x}_conv"
            theirs = f"self_attn.{x}_proj.sconv"
            if config.is_sliding[layer]:
                name = self.spell.in_layer(
                    layer, (f"{publisher}.weight", f"{theirs}.conv1d.weight")
                )
                sources[f"{ours}.weight"] = self.conv(name, kv_width, taps, is_shared=True)
                continue
            static = self.spell.in_layer(
                layer, (f"{publisher}.static_w", f"{theirs}.static_weight")
            )
            dynamic = self.spell.in_layer(
                layer, (f"{publisher}.weight_proj", f"{theirs}.weight_proj.weight")
            )
            sources[f"{ours}.static_weight"] = self.shard(static, (taps, kv_width), 1)
            sources[f"{ours}.dynamic_proj"] = self.shard(
                dynamic, (shape.num_kv_heads * taps, hidden), 0
            )
        return sources

    def projection(
        self, layer: int, ours: str, name: str, shape: tuple[int, int]
    ) -> dict[str, WeightSource]:
        """An attention projection, whose rows (of `wo` columns) ranks share, in any form."""
        stored: WeightForm = getattr(self.config.stored_projections[layer], ours)
        form: WeightForm = getattr(self.config.projections[layer], ours)
        check_form(self.names, f"{name}_amax", stored, f"{ours} of layer {layer}", self.spell)
        dim = 1 if ours == "wo" else 0
        if form not in PIECES:
            return {f"attn.{ours}": self.shard(name, shape, dim)}
        sources = {}
        for piece in PIECES[form]:
            if stored == "plain":
                source = self.shard(name, shape, dim)
                source = replace(source, quantize=Quantize(form, piece.kind))
            else:
                suffix = "" if piece.kind == "codes" else "_scale"
                narrow = (shape[0], shape[1] // piece.columns)
                source = encoded(self.shard(name + suffix, narrow, dim), piece)
            sources[f"attn.{ours}.{piece.parameter}"] = source
        if form == "nvfp4" and stored == "plain":
            source = self.shard(name, shape, dim)
            sources[f"attn.{ours}.global_scale"] = replace(
                source, quantize=Quantize(form, "global_scale")
            )
        elif form == "nvfp4":
            sources[f"attn.{ours}.global_scale"] = quotient(
                *(
                    Part(name + suffix, (1,), (slice(None),), or_scalar=True)
                    for suffix in ("_amax", "_outer_scale_denominator")
                )
            )
        return sources

    def experts(self, layer: int) -> dict[str, WeightSource]:
        """Of a layer's router and experts, in any form."""
        config, spell = self.config, self.spell
        num_experts, hidden = config.n_routed_experts, config.hidden_size
        width = config.moe_intermediate_size
        router = spell.in_layer(layer, ("mlp.gate.weight",) * 2)
        bias = spell.in_layer(layer, ("mlp.gate.bias", "mlp.gate.e_score_correction_bias"))
        gate_up = spell.in_layer(layer, ("mlp.experts.w13_weight", "mlp.experts.gate_up_proj"))
        down = spell.in_layer(layer, ("mlp.experts.w2_weight", "mlp.experts.down_proj"))
        routing = {
            "mlp.router": self.whole(router, (num_experts, hidden)),
            "mlp.router_bias": self.whole(bias, (num_experts,)),
        }
        gate_up_shape, down_shape = (num_experts, 2 * width, hidden), (num_experts, hidden, width)
        stored, form = config.stored_experts[layer], config.experts[layer]
        check_form(self.names, f"{gate_up}_amax", stored, f"experts in layer {layer}", spell)
        if stored not in PIECES:
            return routing | {
                "mlp.gate_up": self.expert_gate_up(
                    gate_up, gate_up_shape, is_interleaved=spell.is_publisher
                ),
                "mlp.down": self.expert_down(down, down_shape),
            }
        sizes = (num_experts, hidden, width)
        sources = expert_sources(self, (gate_up, down), sizes, (stored, form), "_scale")
        if stored == "nvfp4":
            sources["gate_up.global_scale"] = self.global_scale(gate_up)
            sources["down.global_scale"] = self.global_scale(down)
        return routing | {f"mlp.{ours}": source for ours, source in sources.items()}

    def global_scale(self, name: str) -> WeightSource:
        """Amax / denominator of this rank's experts."""
        num_experts = self.config.n_routed_experts
        own = self.share(num_experts) if self.is_split_by_expert else slice(None)
        amax = Part(f"{name}_amax", (num_experts,), (own,))
        denominator = Part(
            f"{name}_outer_scale_denominator", (num_experts,), (own,), or_scalar=True
        )
        return quotient(amax, denominator)

    def unembed(self) -> WeightSource:
        """Of the projection to the vocabulary."""
        config, used = self.config, self.config.unpadded_vocab_size
        stored = config.vocab_size if self.spell.is_publisher else used
        return self.vocabulary(self.spell.lm_head, stored, used, config.hidden_size)

    def queries(self, name: str, count: int) -> WeightSource:
        """A single query is stored as a vector, several as a matrix; ours is always a matrix."""
        hidden = self.config.hidden_size
        return self.whole(name, (hidden,) if count == 1 else (count, hidden))
