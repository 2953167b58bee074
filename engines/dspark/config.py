"""What a DSpark drafter is, in one spelling, whichever layout its checkpoint follows.

Source: dspark.md sections 2 to 4.
"""

from dataclasses import dataclass
from typing import Literal

from inkrt.errors import ConfigError

# Widest features that one product takes on a GPU; wider ones are projected tap by tap.
MAX_FEATURES = 8192

Head = Literal["vanilla", "gated", "rnn"]
TapPoint = Literal["layer_output", "pre_mlp_conv"]
SoftcapPlace = Literal["none", "before_bias", "after_bias"]


@dataclass(frozen=True, slots=True)
class DraftLayerConfig:
    """How the rows of one draft layer attend.

    Attributes:
        is_causal: whether a row sees only the rows of its block up to itself; else all of them.
        window: positions a row sees, its own included; None sees the whole context.
    """

    is_causal: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """A DSpark drafter of the Qwen3 flavour.

    Attributes:
        hidden_size: of the drafter's rows, which is that of the target's embedding.
        target_hidden_size: of one tapped feature.
        layers: one for each draft layer.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: of all of them, even.
        intermediate_size: width of the SwiGLU.
        rms_norm_eps: of every norm.
        rope_theta: base of the rotation.
        max_position_embeddings: positions the drafter was made for.
        block_size: tokens it drafts at once.
        anchor_first: whether row k predicts the token behind it and the block has `block_size`
            rows; else row 0 predicts nothing, row k its own token, and there is one row more.
        mask_token_id: of rows that have no token yet; below vocab_size, may be padding.
        taps: layers of the target, from 0, whose outputs make a token's feature; ascending. For a
            looped target, visits of layers.
        tap_point: where in such a layer.
        head: kind of the sequential head.
        markov_rank: of its tables.
        vocab_size: rows of the target's embedding and of the first table.
        draft_vocab_size: tokens that can be drafted; rows of the second table and of an own head.
        is_trimmed: whether those are some of the target's tokens, named by `d2t`.
        has_confidence: whether there is a confidence head.
        confidence_reads_markov: whether it reads the previous token's row of the first table too.
        confidence_has_bias: whether it has a bias.
        has_own_embedding: whether the checkpoint has an embedding other than the target's.
        has_own_unembed: whether it has a vocabulary projection other than the target's.
        applies_embed_norm: whether rows enter through the target's embedding norm.
        softcap_place: where the target's final soft-cap meets the base logits, if it does.
        logits_divisor: by which final rows are divided before the projection (muP), 1 for none.
        has_sinks: whether every query head has a learned logit that takes part in each softmax.
    """

    hidden_size: int
    target_hidden_size: int
    layers: tuple[DraftLayerConfig, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    anchor_first: bool
    mask_token_id: int
    taps: tuple[int, ...]
    tap_point: TapPoint
    head: Head
    markov_rank: int
    vocab_size: int
    draft_vocab_size: int
    is_trimmed: bool
    has_confidence: bool
    confidence_reads_markov: bool
    confidence_has_bias: bool
    has_own_embedding: bool
    has_own_unembed: bool
    applies_embed_norm: bool
    softcap_place: SoftcapPlace
    logits_divisor: float
    has_sinks: bool

    @property
    def num_rows(self) -> int:
        """Rows of a block."""
        return self.block_size + (0 if self.anchor_first else 1)

    @property
    def num_features(self) -> int:
        """Width of a token's feature."""
        return len(self.taps) * self.target_hidden_size

    @property
    def is_cut(self) -> bool:
        """Whether features are projected tap by tap, by a matrix each."""
        return self.num_features > MAX_FEATURES

    def num_drafted(self, num_tokens: int) -> int:
        """Tokens that can be drafted, of the target's `num_tokens` that can be sampled."""
        return self.draft_vocab_size if self.is_trimmed else num_tokens

    def check_sharding(self, tp_size: int) -> None:
        """Raise ConfigError unless every dimension that ranks share divides by their number."""
        for name, size in (
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("intermediate_size", self.intermediate_size),
            ("hidden_size", self.hidden_size),
        ):
            if size % tp_size:
                raise ConfigError(
                    f"tp size {tp_size} does not divide {name} = {size} of the drafter; choose a "
                    f"tp size that does, or leave the drafter out with --spec none"
                )
