"""Where every parameter of one rank stands in a Flint checkpoint.

Three spellings are read. Safetensors have a tensor per expert, as published, or a stack of all
experts with gate and up rows one after the other, as transformers holds them; only names of experts
and sinks differ. A GGUF file has names of its own and may hold NVFP4, which the checkpoint reader
gives as three tensors: `X.weight` (codes), `X.weight_scale` and `X.scale`.

Matrices that are one operator argument here share one global scale, so the scales of their parts
must be equal: queries, keys and values; gate and up.
"""

from dataclasses import dataclass, replace

from inkrt.engines.flint.config import FlintConfig
from inkrt.engines.interface import Dequantize, Part, Sharding, WeightSource, vocabulary_share
from inkrt.errors import CheckpointError
from inkrt.plugins.nvfp4 import BLOCK

# Part of a layer -> (safetensors, GGUF), relative to a layer and without ".weight".
_LAYER_NAMES = {
    "input_norm": ("input_layernorm", "attn_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
    "router": ("mlp.gate", "ffn_gate_inp"),
    "shared_gate": ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    "shared_up": ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    "shared_down": ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
}
_MODEL_NAMES = {
    "embed": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "lm_head": ("lm_head", "output"),
}


def is_ignored(name: str) -> bool:  # noqa: ARG001 (the interface's)
    """Whether a tensor belongs to a part that is not built: there is none."""
    return False


def weight_sources(
    config: FlintConfig, names: frozenset[str], rank: int, sharding: Sharding
) -> dict[str, WeightSource]:
    """Map every parameter of `Flint` on `rank` to its place in a checkpoint with these tensors.

    Raises:
        CheckpointError: the names follow no spelling, or a GGUF file holds a tensor with no place.
    """
    if "token_embd.weight" in names:
        sources = _Map(config, names, rank, sharding, is_gguf=True).sources()
        used = {part.name for source in sources.values() for part in source.all_parts}
        if unknown := sorted(names - used):
            raise CheckpointError(
                f"the GGUF file holds {unknown[0]}, which has no place in a Flint model of this "
                f"config.json ({len(unknown)} such tensors); take the config.json that belongs to "
                f"the file"
            )
        return sources
    if "model.embed_tokens.weight" in names:
        if config.has_nvfp4:
            raise CheckpointError(
                "config.json names an NVFP4 model and the checkpoint holds safetensors; this "
                "version reads NVFP4 from GGUF files only"
            )
        return _Map(config, names, rank, sharding, is_gguf=False).sources()
    raise CheckpointError(
        "the checkpoint has no Flint model: neither model.embed_tokens.weight (safetensors) nor "
        "token_embd.weight (GGUF)"
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A matrix of the checkpoint, or a stack of them, and the part of it that a rank takes.

    Attributes:
        name: without ".weight" if the checkpoint's name ends in it.
        shape: [N, K] or [L, N, K], in values.
        index: one slice per dimension, in values.
        suffix: of the tensor's name.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    suffix: str = ".weight"

    def part(self, suffix: str, values_per_element: int) -> Part:
        """The piece of a tensor that holds several values of K in an element."""
        *shape, width = self.shape
        *index, columns = self.index
        start, stop, _ = columns.indices(width)
        per = values_per_element
        return Part(
            self.name + suffix,
            (*shape, width // per),
            (*index, slice(start // per, stop // per)),
        )


class _Map:
    """Builds the sources of one rank."""

    def __init__(
        self,
        config: FlintConfig,
        names: frozenset[str],
        rank: int,
        sharding: Sharding,
        *,
        is_gguf: bool,
    ) -> None:
        self.config = config
        self.names = names
        self.rank = rank
        self.tp_size = sharding.tp_size
        self.is_split_by_expert = sharding.moe_split == "experts"
        self.is_gguf = is_gguf

    def sources(self) -> dict[str, WeightSource]:
        config = self.config
        names = {ours: pair[self.is_gguf] for ours, pair in _MODEL_NAMES.items()}
        shape = (config.vocab_size, config.hidden_size)
        share = vocabulary_share(config.vocab_size, self.tp_size)
        first = min(self.rank * share, config.vocab_size)
        last = min(first + share, config.vocab_size)
        head = _Piece(names["lm_head"], shape, (slice(first, last), slice(None)))
        sources = {
            "embed": self.whole(names["embed"] + ".weight", shape),
            "norm": self.whole(names["norm"] + ".weight", (config.hidden_size,)),
            **self.matrix(
                "lm_head", [head], is_nvfp4=config.has_nvfp4_head, pad=share - (last - first)
            ),
        }
        for layer in range(config.num_hidden_layers):
            for name, source in self.layer(layer).items():
                sources[f"layers.{layer}.{name}"] = source
        return sources

    def layer(self, layer: int) -> dict[str, WeightSource]:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        q_width = config.num_attention_heads * head_dim
        kv_width = config.num_key_value_heads * head_dim
        q, k, v = (
            self.rows(layer, ours, (width, hidden))
            for ours, width in (("q", q_width), ("k", kv_width), ("v", kv_width))
        )
        sources = {
            f"{place}{ours}": self.whole(self.name(layer, ours) + ".weight", (size,))
            for place, ours, size in (
                ("", "input_norm", hidden),
                ("", "mlp_norm", hidden),
                ("attn.", "q_norm", head_dim),
                ("attn.", "k_norm", head_dim),
            )
        }
        heads = config.num_attention_heads
        sources["attn.sinks"] = WeightSource(
            (Part(self.sinks_name(layer), (heads,), (self.share(heads),)),)
        )
        sources |= self.matrix("attn.qkv", [q, k, v])
        sources |= self.matrix("attn.o_proj", [self.columns(layer, "o", (hidden, q_width))])
        if config.is_dense[layer]:
            return sources | self.mlp(layer, "mlp", "", config.intermediate_size)
        router = self.name(layer, "router") + ".weight"
        sources["mlp.router"] = self.whole(router, (config.num_experts, hidden))
        sources |= self.mlp(layer, "mlp.shared", "shared_", config.shared_expert_intermediate_size)
        return sources | self.experts(layer)

    def mlp(self, layer: int, ours: str, prefix: str, width: int) -> dict[str, WeightSource]:
        hidden = self.config.hidden_size
        gate, up = (self.rows(layer, f"{prefix}{x}", (width, hidden)) for x in ("gate", "up"))
        down = self.columns(layer, f"{prefix}down", (hidden, width))
        return self.matrix(f"{ours}.gate_up", [gate, up]) | self.matrix(f"{ours}.down", [down])

    def experts(self, layer: int) -> dict[str, WeightSource]:
        config = self.config
        num_experts, hidden = config.num_experts, config.hidden_size
        width = config.moe_intermediate_size
        every, units = slice(None), slice(0, width)
        own = self.share(num_experts) if self.is_split_by_expert else slice(0, num_experts)
        if not self.is_split_by_expert:
            units = self.share(width)
        stack = (num_experts, width, hidden)
        if self.is_gguf:
            gates, ups = (
                [_Piece(f"blk.{layer}.ffn_{x}_exps", stack, (own, units, every))]
                for x in ("gate", "up")
            )
            downs = [
                _Piece(
                    f"blk.{layer}.ffn_down_exps", (num_experts, hidden, width), (own, every, units)
                )
            ]
            is_decoded = config.decodes_experts
            return self.matrix(
                "mlp.gate_up", gates + ups, dim=1, is_decoded=is_decoded
            ) | self.matrix("mlp.down", downs, is_decoded=is_decoded)

        root = f"model.layers.{layer}.mlp.experts."
        if f"{root}gate_up_proj" in self.names:
            up_units = slice(width + units.start, width + units.stop)
            both = [
                _Piece(root + "gate_up_proj", (num_experts, 2 * width, hidden), index, "")
                for index in ((own, units, every), (own, up_units, every))
            ]
            shape = (num_experts, hidden, width)
            downs = [_Piece(root + "down_proj", shape, (own, every, units), "")]
            return self.matrix("mlp.gate_up", both, dim=1) | self.matrix("mlp.down", downs)

        # Matrices one below the other are a stack of matrices: g0, u0, g1, u1, ...
        both, downs = [], []
        for expert in range(own.start, own.stop):
            for x in ("gate", "up"):
                name = f"{root}{expert}.{x}_proj"
                both.append(_Piece(name, (width, hidden), (units, every)))
            name = f"{root}{expert}.down_proj"
            downs.append(_Piece(name, (hidden, width), (every, units)))
        return self.matrix("mlp.gate_up", both) | self.matrix("mlp.down", downs)

    def matrix(
        self,
        ours: str,
        pieces: list[_Piece],
        *,
        dim: int = 0,
        is_nvfp4: bool | None = None,
        pad: int = 0,
        is_decoded: bool = False,
    ) -> dict[str, WeightSource]:
        """Sources of a `Matrix` that is made of pieces along `dim`."""
        if is_nvfp4 is None:
            is_nvfp4 = self.config.has_nvfp4
        if not is_nvfp4:
            parts = tuple(piece.part(piece.suffix, 1) for piece in pieces)
            return {f"{ours}.weight": WeightSource(parts, dim, pad)}
        # One scale per matrix of a stack; the others' index is that of the stack.
        scales = tuple(
            Part(
                f"{piece.name}.scale",
                (piece.shape[0],) if len(piece.shape) == 3 else (1,),
                (piece.index[0],) if len(piece.shape) == 3 else (slice(None),),
                sign="not negative",
            )
            for piece in pieces
        )
        codes = WeightSource(tuple(p.part(".weight", 2) for p in pieces), dim, pad)
        blocks = WeightSource(tuple(p.part(".weight_scale", BLOCK) for p in pieces), dim, pad)
        sources = {f"{ours}.global_scale": WeightSource(scales, is_one_of_equals=True)}
        if is_decoded:
            decoded = replace(codes, dequantize=Dequantize("nvfp4", blocks.parts))
            return sources | {f"{ours}.weight": decoded}
        return sources | {f"{ours}.weight": codes, f"{ours}.scales": blocks}

    def name(self, layer: int, ours: str) -> str:
        root = f"blk.{layer}." if self.is_gguf else f"model.layers.{layer}."
        return root + _LAYER_NAMES[ours][self.is_gguf]

    def sinks_name(self, layer: int) -> str:
        if self.is_gguf:
            return f"blk.{layer}.attn_sinks.weight"
        in_transformers = f"model.layers.{layer}.self_attn.sinks"
        if in_transformers in self.names:
            return in_transformers
        return f"model.layers.{layer}.self_attn.softmax_offset"

    def share(self, size: int) -> slice:
        """This rank's part of a dimension."""
        share = size // self.tp_size
        return slice(self.rank * share, (self.rank + 1) * share)

    def rows(self, layer: int, ours: str, shape: tuple[int, int]) -> _Piece:
        return _Piece(self.name(layer, ours), shape, (self.share(shape[0]), slice(None)))

    def columns(self, layer: int, ours: str, shape: tuple[int, int]) -> _Piece:
        return _Piece(self.name(layer, ours), shape, (slice(None), self.share(shape[1])))

    def whole(self, name: str, shape: tuple[int, ...]) -> WeightSource:
        return WeightSource((Part(name, shape, (slice(None),) * len(shape)),))
