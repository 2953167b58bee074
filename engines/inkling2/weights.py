"""Where every parameter of one rank stands in an Inkling-2 checkpoint.

Two spellings are read: the publisher's (`model.llm.*`) and the one that transformers gives the same
tensors in memory (`model.language_model.*`, or `model.*` for the text-only class). They differ in
names, in the order of the experts' gate and up rows (interleaved there, stacked here) and in the
rows of the vocabulary projection (padded there, cropped here).
"""

from dataclasses import dataclass

from inkrt.engines.inkling2.config import Inkling2Config
from inkrt.engines.interface import Part, Sharding, WeightSource
from inkrt.errors import CheckpointError

_PUBLISHER_ROOT = "model.llm."
_VISION_ROOTS = ("model.visual.", "model.vision_tower.")

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
    return name.startswith(_VISION_ROOTS)


def weight_sources(
    config: Inkling2Config, names: frozenset[str], rank: int, sharding: Sharding
) -> dict[str, WeightSource]:
    """Map every parameter of `Inkling2` on `rank` to its place in a checkpoint with these tensors.

    Raises:
        CheckpointError: the names follow neither spelling.
    """
    if any(name.startswith(_PUBLISHER_ROOT) for name in names):
        spelling = _Spelling(_PUBLISHER_ROOT, is_publisher=True)
    elif any(name.startswith("model.language_model.layers.") for name in names):
        spelling = _Spelling("model.language_model.", is_publisher=False)
    elif any(name.startswith("model.layers.") for name in names):
        spelling = _Spelling("model.", is_publisher=False)
    else:
        raise CheckpointError(
            "the checkpoint has no Inkling-2 text model: neither model.llm.* nor "
            "model.language_model.* nor model.layers.* tensors"
        )
    return _Map(config, spelling, rank, sharding).sources()


@dataclass(frozen=True, slots=True)
class _Spelling:
    """Names of one of the two spellings."""

    root: str
    is_publisher: bool

    def pick(self, publisher: str, transformers: str) -> str:
        return self.root + (publisher if self.is_publisher else transformers)

    def in_layer(self, layer: int, pair: tuple[str, str]) -> str:
        return self.pick(*(f"layers.{layer}.{name}" for name in pair))

    @property
    def lm_head(self) -> str:
        return f"{self.root}unembed.weight" if self.is_publisher else "lm_head.weight"

    def query(self, layer: int, kind: str) -> str:
        """Mix queries; the publisher numbers attention queries from the second layer on."""
        if kind == "attn":
            return self.pick(
                f"attn_res.attn_queries.{layer - 1}", f"layers.{layer}.attention_input.query"
            )
        return self.pick(f"attn_res.mlp_queries.{layer}", f"layers.{layer}.mlp_input.query")


class _Map:
    """Builds the sources of one rank."""

    def __init__(
        self, config: Inkling2Config, spelling: _Spelling, rank: int, sharding: Sharding
    ) -> None:
        self.config = config
        self.spell = spelling
        self.rank = rank
        self.tp_size = sharding.tp_size
        self.is_split_by_expert = sharding.moe_split == "experts"

    def sources(self) -> dict[str, WeightSource]:
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
                sources[f"layers.{layer}.{name}"] = source
        return sources

    def layer(self, layer: int) -> dict[str, WeightSource]:
        config, spell = self.config, self.spell
        hidden = config.hidden_size
        num_queries = 1 if config.is_sliding[layer] else 3
        sources = self.attention(layer) | self.experts(layer)
        for index, pair in enumerate(_INPUT_NORMS[num_queries]):
            sources[f"attn_input.norms.{index}"] = self.whole(
                spell.in_layer(layer, pair), (hidden,)
            )
        if layer > 0:
            sources["attn_input.queries"] = self.queries(spell.query(layer, "attn"), num_queries)
        sources["mlp_input.queries"] = self.queries(spell.query(layer, "mlp"), 1)
        sources["mlp_input.norms.0"] = self.whole(
            spell.in_layer(layer, ("mlp_norm.weight", "post_attention_layernorm.weight")), (hidden,)
        )
        for ours, pair in (
            ("attn_conv", ("attn_sconv.weight", "post_attention_convolution.conv1d.weight")),
            ("mlp_conv", ("mlp_sconv.weight", "post_mlp_convolution.conv1d.weight")),
        ):
            sources[f"{ours}.weight"] = self.conv(spell.in_layer(layer, pair), hidden, shards=1)
        return sources

    def attention(self, layer: int) -> dict[str, WeightSource]:
        config, shape = self.config, self.config.attention(layer)
        hidden, taps = config.hidden_size, config.conv_kernel_size
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        shapes = {
            "attn.wq": (q_width, hidden),
            "attn.wk": (kv_width, hidden),
            "attn.wv": (kv_width, hidden),
            "attn.wr": (shape.num_heads * config.d_rel, hidden),
            "attn.wsink": (shape.num_heads, hidden),
            "attn.wgate": (q_width, hidden),
            "attn.q_scale": (shape.num_heads, shape.head_dim),
            "attn.rel_scale": (shape.num_heads, config.d_rel),
        }
        names = {ours: self.spell.in_layer(layer, pair) for ours, pair in _ATTENTION_NAMES.items()}
        sources = {ours: self.shard(names[ours], size, 0) for ours, size in shapes.items()}
        sources["attn.wo"] = self.shard(names["attn.wo"], (hidden, q_width), 1)
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
                sources[f"{ours}.weight"] = self.conv(name, kv_width, shards=self.tp_size)
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

    def experts(self, layer: int) -> dict[str, WeightSource]:
        config, spell = self.config, self.spell
        num_experts, hidden = config.n_routed_experts, config.hidden_size
        width = config.moe_intermediate_size
        router = spell.in_layer(layer, ("mlp.gate.weight",) * 2)
        bias = spell.in_layer(layer, ("mlp.gate.bias", "mlp.gate.e_score_correction_bias"))
        gate_up = spell.in_layer(layer, ("mlp.experts.w13_weight", "mlp.experts.gate_up_proj"))
        down = spell.in_layer(layer, ("mlp.experts.w2_weight", "mlp.experts.down_proj"))
        every, own = slice(None), slice(None)
        first, last = 0, width
        if self.is_split_by_expert:
            share = num_experts // self.tp_size
            own = slice(self.rank * share, (self.rank + 1) * share)
        else:
            share = width // self.tp_size
            first, last = self.rank * share, (self.rank + 1) * share
        if spell.is_publisher:  # rows g0, u0, g1, u1, ...
            rows = (slice(2 * first, 2 * last, 2), slice(2 * first + 1, 2 * last, 2))
        else:
            rows = (slice(first, last), slice(width + first, width + last))
        shape = (num_experts, 2 * width, hidden)
        return {
            "mlp.router": self.whole(router, (num_experts, hidden)),
            "mlp.router_bias": self.whole(bias, (num_experts,)),
            "mlp.gate_up": WeightSource(
                tuple(Part(gate_up, shape, (own, part, every)) for part in rows), dim=1
            ),
            "mlp.down": self.shard(
                down, (num_experts, hidden, width), 0 if self.is_split_by_expert else 2
            ),
        }

    def unembed(self) -> WeightSource:
        config = self.config
        size = config.vocab_size if self.spell.is_publisher else config.unpadded_vocab_size
        share = -(-config.unpadded_vocab_size // self.tp_size)
        first = min(self.rank * share, config.unpadded_vocab_size)
        last = min(first + share, config.unpadded_vocab_size)
        index = (slice(first, last), slice(None))
        part = Part(self.spell.lm_head, (size, config.hidden_size), index)
        return WeightSource((part,), pad=share - (last - first))

    def whole(self, name: str, shape: tuple[int, ...]) -> WeightSource:
        return WeightSource((Part(name, shape, (slice(None),) * len(shape)),))

    def queries(self, name: str, count: int) -> WeightSource:
        """A single query is stored as a vector, several as a matrix; ours is always a matrix."""
        hidden = self.config.hidden_size
        return self.whole(name, (hidden,) if count == 1 else (count, hidden))

    def conv(self, name: str, channels: int, *, shards: int) -> WeightSource:
        """[channels, 1, W] in the checkpoint, [channels, W] here."""
        share = channels // shards
        rank = self.rank if shards > 1 else 0
        index = (slice(rank * share, (rank + 1) * share), slice(None), slice(None))
        return WeightSource((Part(name, (channels, 1, self.config.conv_kernel_size), index),))

    def shard(self, name: str, shape: tuple[int, ...], dim: int) -> WeightSource:
        share = shape[dim] // self.tp_size
        index = [slice(None)] * len(shape)
        index[dim] = slice(self.rank * share, (self.rank + 1) * share)
        return WeightSource((Part(name, shape, tuple(index)),))
