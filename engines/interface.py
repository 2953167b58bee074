"""What every model definition gives to the builder.

A definition is a per-rank `torch.nn.Module` written to be traced, its state layout and its weight
map. The builder knows no model by name; it goes through these types.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from inkrt.engines.tower import Tower

# Positions a session can always go back from the furthest one it has written: the widest verify
# step (8) and a margin. Rings are at least this much longer than what one step looks back.
ROLLBACK_TOKENS = 13


def ring_tokens(look_back: int, multiple: int = 16, ahead: int = ROLLBACK_TOKENS) -> int:
    """Length of a ring whose readers look back `look_back` positions.

    Args:
        look_back: positions before a step that its first row reads.
        multiple: of which the length is one.
        ahead: positions from there on that may be written without harm to that row.
    """
    return -(-(look_back + ahead) // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Sharding:
    """How ranks share a model.

    Attributes:
        tp_size: number of ranks.
        moe_split: "experts": each rank holds whole experts, and roundings are those of one rank;
            "width": each holds a slice of every expert, and ranks always have equal work.
    """

    tp_size: int
    moe_split: Literal["experts", "width"]


def vocabulary_share(size: int, tp_size: int) -> int:
    """Rows that each rank has of a projection to `size` tokens; the last ones may be padding.

    Ranks that exchange logits do so in vectors of four.
    """
    share = -(-size // tp_size)
    return share if tp_size == 1 else -(-share // 4) * 4


@dataclass(frozen=True, slots=True)
class StateOptions:
    """How much state an engine holds.

    Attributes:
        num_slots: sessions.
        max_seq_len: positions of one session.
        page_tokens: positions per page of a paged buffer.
        kv_ring_multiple: rings of keys and values have a multiple of this many positions; kernels
            that read them page by page want page_tokens.
        kv_ring_ahead: such rings have room for this many positions behind a window; kernels that
            write a step's keys before they read want its widest step's.
    """

    num_slots: int
    max_seq_len: int
    page_tokens: int
    kv_ring_multiple: int = 16
    kv_ring_ahead: int = ROLLBACK_TOKENS

    @property
    def pages_per_session(self) -> int:
        """Length of a page table."""
        return -(-self.max_seq_len // self.page_tokens)

    @property
    def num_pages(self) -> int:
        """Pages that let every session grow to max_seq_len."""
        return self.num_slots * self.pages_per_session


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device-resident inputs of a step.

    Attributes:
        tokens: int32 [T].
        position: int32 [1], absolute position of row 0.
        num_tokens: int32 [1], rows that are real; the others write no state. A module may leave it
            out (None) for its own calls that write none, with all rows real.
        slot: int32 [1], the session's slot.
        rank: int32 [1], which of the ranks this is.
        page_table: int32 [pages_per_session].
        temperature: float32 [1]; 0 is greedy.
        top_k: int32 [1]; 0 is off.
        top_p: float32 [1].
        min_p: float32 [1].
        seed: int64 [1].
    """

    tokens: Tensor
    position: Tensor
    num_tokens: Tensor | None
    slot: Tensor
    rank: Tensor
    page_table: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


# Bits of quantized weights, read as uint8: two E2M1 codes to a byte, E4M3 codes, scales.
Encoding = Literal["e2m1", "e4m3", "e4m3_scale", "e8m0_scale"]


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangular piece of one checkpoint tensor.

    Attributes:
        name: tensor name in the checkpoint.
        shape: the whole tensor's shape, checked before reading.
        index: one slice per dimension; steps are allowed.
        is_ids: whether it holds integers or truth values, as no weight does.
        encoding: of bits; None for numbers.
        sign: what numbers that scale others must be; all but "any" must be finite.
        or_scalar: whether a tensor of one value may stand there instead of one of this shape.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    is_ids: bool = False
    encoding: Encoding | None = None
    sign: Literal["any", "not negative", "positive"] = "any"
    or_scalar: bool = False


@dataclass(frozen=True, slots=True)
class Quantize:
    """What becomes of a plain weight at build: a piece of it in another form.

    Attributes:
        form: "nvfp4" or "mxfp8".
        piece: codes, scales (or exponents), or the global scale of NVFP4.
    """

    form: Literal["nvfp4", "mxfp8"]
    piece: Literal["codes", "scales", "global_scale"]


@dataclass(frozen=True, slots=True)
class Dequantize:
    """Codes become values at build, without a global scale; `scales` are pieces like theirs."""

    form: Literal["nvfp4", "mxfp8"]
    scales: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where one parameter of one rank comes from.

    Attributes:
        parts: pieces that are concatenated along dimension `dim`.
        dim: see parts.
        pad: zero rows appended along dimension 0 (uneven vocabulary shards).
        is_one_of_equals: the parts hold the same values, which is checked, and one is taken.
        is_quotient: the first part divided by the second, in float32.
        quantize: the one part is a plain matrix, of which a quantized piece is wanted.
        dequantize: the parts are codes, whose values are wanted.
    """

    parts: tuple[Part, ...]
    dim: int = 0
    pad: int = 0
    is_one_of_equals: bool = False
    is_quotient: bool = False
    quantize: Quantize | None = None
    dequantize: Dequantize | None = None

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Every piece that is read."""
        return self.parts + (self.dequantize.scales if self.dequantize else ())


@dataclass(frozen=True, slots=True)
class StateBuffer:
    """Kind of one state buffer; its shape is the module buffer's."""

    name: str
    kind: Literal["paged", "ring"]


class TextModel(Protocol):
    """A traced module; its `forward` takes `StepInputs`.

    Of a family with towers, `forward` also takes `features` [T, D] in the compute dtype and
    `is_feature` int32 [T]: rows that replace those of their tokens' embeddings.
    """

    def state_buffers(self) -> list[StateBuffer]:
        """Every state buffer, in module order."""
        ...

    def row_parallel_weights(self) -> frozenset[str]:
        """Parameters that ranks share along the dimension that their operator sums over."""
        ...


class ModelConfig(Protocol):
    """What the builder reads of any model's configuration."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def unpadded_vocab_size(self) -> int:
        """Tokens that can be sampled."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the model was made for."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        ...

    @property
    def dtype(self) -> str | None:
        """Dtype that the configuration names, if any."""
        ...

    def check_sharding(self, sharding: Sharding) -> None:
        """Raise ConfigError if ranks cannot share the model like this."""
        ...


@dataclass(frozen=True, slots=True)
class ParityBound:
    """How near an engine must be to transformers to count as the same model.

    Attributes:
        relative_error: largest of any row of logits, ||ours - theirs|| / ||theirs||.
        top1_agreement: least share of rows of a prompt whose most likely token is the same.
    """

    relative_error: float
    top1_agreement: float = 1.0


# Of a definition whose operators round where transformers does, by compute dtype.
EXACT_PARITY = {"float32": ParityBound(2e-6), "bfloat16": ParityBound(1e-2)}


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """What a drafter has to fit.

    Attributes:
        hidden_size: of a tapped feature and of an embedding's row.
        num_hidden_layers: layers that can be tapped; of a looped model, visits of layers.
        vocab_size: rows of the embedding.
        unpadded_vocab_size: tokens that can be sampled.
        max_position_embeddings: positions that it was made for.
        softcap: of its final logits; None for none.
        has_embed_norm: whether it norms the rows of the embedding.
        has_mlp_conv: whether a layer's output passes a convolution, before which it can be tapped.
        unembed: its parameter that projects to the vocabulary.
        has_final_tap: whether what this projection reads can be tapped too, as if it were the
            output of one more layer.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    unpadded_vocab_size: int
    max_position_embeddings: int
    softcap: float | None
    has_embed_norm: bool
    has_mlp_conv: bool
    unembed: str = "unembed"
    has_final_tap: bool = False


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Chained MTP heads: each drafts one token from what the head before it made of the last.

    Attributes:
        is_sliding: of every depth, whether its layer has the model's window.
        has_chain_norm: whether a norm, one for all depths, follows every layer.
        hidden_first: whether a depth's input is [hidden; embedding]; else [embedding; hidden].
    """

    is_sliding: tuple[bool, ...]
    has_chain_norm: bool
    hidden_first: bool

    @property
    def num_depths(self) -> int:
        """Tokens that they draft at once."""
        return len(self.is_sliding)

    def first(self, most: int) -> "MtpConfig":
        """The first depths, `most` at most; they do not depend on those behind them."""
        return MtpConfig(self.is_sliding[:most], self.has_chain_norm, self.hidden_first)


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a model family has a drafter of one method in its engines.

    Attributes:
        build_module: as `Definition.build_module`, and from the drafter's settings, whose context
            the module's steps write; its parameters and state stand under `drafter.` behind the
            model's own.
        build_draft_step: makes the module of the draft step of one rank from (config, sharding,
            dtype, state options, drafter); parameters and state are some of that module's.
    """

    build_module: Callable[[Any, Sharding, torch.dtype, StateOptions, bool, Any], nn.Module]
    build_draft_step: Callable[[Any, Sharding, torch.dtype, StateOptions, Any], nn.Module]


@dataclass(frozen=True, slots=True)
class MtpHeads:
    """The chained MTP heads of a model family, which come with its checkpoints.

    Attributes:
        config: all that a checkpoint has, from the model's configuration; None for none.
        is_weight: whether a checkpoint tensor is one of theirs.
        weight_sources: maps every parameter of the first depths (`drafter.*`) to its place in the
            checkpoint, the same on all ranks, from (config, heads).
        drafting: how they get into engines.
    """

    config: Callable[[Any], MtpConfig | None]
    is_weight: Callable[[str], bool]
    weight_sources: Callable[[Any, MtpConfig], dict[str, WeightSource]]
    drafting: Drafting


@dataclass(frozen=True, slots=True)
class Definition:
    """One model family.

    Attributes:
        parse_config: reads a checkpoint's config.json; raises ConfigError.
        build_module: makes the module of one rank on the meta device from (config, sharding, dtype,
            state options, whether the step wants the last row only).
        weight_sources: maps every parameter name of the module to its place in the checkpoint,
            from (config, tensor names of the checkpoint, rank, sharding).
        ignored: whether a checkpoint tensor is known and belongs to a part that is not built.
        draft_target: what a drafter of the model has to fit.
        drafting: of a DSpark drafter; None for a family whose engines cannot have one.
        mtp: None for a family that has no chained MTP heads.
        parity: agreement with transformers that is expected, by compute dtype.
        towers: what the model reads besides text, from (config.json, configuration).
        quantize_projections: the configuration with plain attention projections in another form,
            from (config, form); None for a family whose builds cannot quantize them.
        dequantize_experts: the configuration with the values of quantized experts, and whether
            global scales stand beside; None for a family whose builds cannot decode them.
    """

    parse_config: Callable[[Mapping[str, Any]], Any]
    build_module: Callable[[Any, Sharding, torch.dtype, StateOptions, bool], nn.Module]
    weight_sources: Callable[[Any, frozenset[str], int, Sharding], dict[str, WeightSource]]
    ignored: Callable[[str], bool]
    draft_target: Callable[[Any], DraftTarget]
    drafting: Drafting | None = None
    mtp: MtpHeads | None = None
    parity: Mapping[str, ParityBound] = field(default_factory=lambda: EXACT_PARITY)
    quantize_projections: Callable[[Any, Any], Any] | None = None
    towers: "Callable[[Mapping[str, Any], Any], tuple[Tower, ...]]" = lambda _values, _config: ()
    dequantize_experts: Callable[[Any], tuple[Any, bool]] | None = None
