"""Where every parameter of a DSpark drafter stands in a checkpoint, whichever layout it has.

Layouts differ in what they put in front of names, not in the names behind it, which are DeepSpec's
and here called plain.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkrt.engines.dspark.config import DSparkConfig
from inkrt.engines.interface import Part, WeightSource, vocabulary_share
from inkrt.errors import CheckpointError

Shape = tuple[int, ...]

PARAMETER_ROOT = "drafter."
EMBEDDING, UNEMBED = "embed_tokens.weight", "lm_head.weight"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
FIRST_TABLE, SECOND_TABLE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
# Tensors that may be there without being a parameter, and need no word about it.
KNOWN_UNUSED = frozenset(
    {EMBEDDING, UNEMBED, DRAFT_TO_TARGET, TARGET_TO_DRAFT, CONFIDENCE, CONFIDENCE_BIAS}
)
GATE, JOINT = "markov_head.gate_proj", "markov_head.joint_proj"

# Trees of a target's checkpoint that hold a drafter; of several, the first that is there.
_TREES = ("dspark", "mtp_dspark", "mtp")
_BUNDLED = re.compile(rf"(?:model\.(?:llm\.|language_model\.)?)?({'|'.join(_TREES)})\.(.+)")
_NOISE = ("model.", "draft_model.", "logit_head.", "dspark.")
_SINKS = ("self_attn.sinks", "self_attn.attention_sink_bias")
# Parameters that ranks share, and along which dimension; rows of tokens are shared unevenly.
_SHARED = {
    **dict.fromkeys(("ctx_proj", "wq", "wk", "wv", "gate", "up", "sinks"), 0),
    **dict.fromkeys(("wo", "down"), 1),
}
_OF_TOKENS = ("markov_w2", "unembed")
# Elements of two tensors that are compared at once.
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """Tensors of a drafter by their plain names.

    Attributes:
        stored: their names in the checkpoint.
        shapes: what its headers say.
    """

    stored: Mapping[str, str]
    shapes: Mapping[str, Shape]

    def sinks_name(self, layer: int) -> str | None:
        """The plain name of a layer's sinks, if it has any."""
        names = (f"layers.{layer}.{sinks}" for sinks in _SINKS)
        return next((name for name in names if name in self.shapes), None)

    @property
    def num_layers(self) -> int:
        """How many layers are named."""
        found = (re.match(r"layers\.(\d+)\.", name) for name in self.shapes)
        return len({match[1] for match in found if match})


def is_bundled(name: str) -> bool:
    """Whether a tensor of a target's checkpoint stands where drafters do."""
    return _BUNDLED.fullmatch(name) is not None


def draft_tensors(shapes: Mapping[str, Shape], where: str, *, bundled: bool) -> DraftTensors:
    """Give the tensors of a drafter their plain names.

    Args:
        shapes: of all tensors of the checkpoint, by their names in it.
        where: the checkpoint, for messages.
        bundled: whether it is the target's, of which only the drafter's tree counts.

    Raises:
        CheckpointError: two tensors are the same but for what stands in front of their names.
    """
    names = {name: name for name in shapes}
    if bundled:
        matches = {name: match for name in shapes if (match := _BUNDLED.fullmatch(name))}
        trees = {match[1] for match in matches.values()}
        tree = next((tree for tree in _TREES if tree in trees), None)
        names = {name: match[2] for name, match in matches.items() if match[1] == tree}
    stored: dict[str, str] = {}
    for name, rest in names.items():
        plain = rest
        while noise := next((x for x in _NOISE if plain.startswith(x)), None):
            plain = plain.removeprefix(noise)
        if plain in stored:
            raise CheckpointError(
                f"{where}: tensors {stored[plain]} and {name} are both the drafter's {plain}; "
                f"remove one of them"
            )
        stored[plain] = name
    return DraftTensors(stored, {plain: shapes[name] for plain, name in stored.items()})


def tensor_table(config: DSparkConfig, tensors: DraftTensors) -> dict[str, tuple[str, Shape]]:
    """Plain name and shape of every parameter, by parameter name without its root."""
    hidden, rank, size = config.hidden_size, config.markov_rank, config.head_dim
    q_width = config.num_attention_heads * size
    kv_width = config.num_key_value_heads * size
    table: dict[str, tuple[str, Shape]] = {
        "ctx_proj": ("fc.weight", (hidden, config.num_features)),
        "ctx_norm": ("hidden_norm.weight", (hidden,)),
        "norm": ("norm.weight", (hidden,)),
        "markov_w1": (FIRST_TABLE, (config.vocab_size, rank)),
        "markov_w2": (SECOND_TABLE, (config.draft_vocab_size, rank)),
    }
    in_layer: dict[str, tuple[str, Shape]] = {
        "wq": ("self_attn.q_proj.weight", (q_width, hidden)),
        "wk": ("self_attn.k_proj.weight", (kv_width, hidden)),
        "wv": ("self_attn.v_proj.weight", (kv_width, hidden)),
        "wo": ("self_attn.o_proj.weight", (hidden, q_width)),
        "q_norm": ("self_attn.q_norm.weight", (size,)),
        "k_norm": ("self_attn.k_norm.weight", (size,)),
        "gate": ("mlp.gate_proj.weight", (config.intermediate_size, hidden)),
        "up": ("mlp.up_proj.weight", (config.intermediate_size, hidden)),
        "down": ("mlp.down_proj.weight", (hidden, config.intermediate_size)),
        "attn_norm": ("input_layernorm.weight", (hidden,)),
        "mlp_norm": ("post_attention_layernorm.weight", (hidden,)),
    }
    for layer in range(len(config.layers)):
        for ours, (theirs, shape) in in_layer.items():
            table[f"layers.{layer}.{ours}"] = (f"layers.{layer}.{theirs}", shape)
        if config.has_sinks:
            name = tensors.sinks_name(layer) or f"layers.{layer}.{_SINKS[0]}"
            table[f"layers.{layer}.sinks"] = (name, (config.num_attention_heads,))
    if config.head == "gated":
        table["gate_proj"] = (f"{GATE}.weight", (rank, hidden + rank))
        table["gate_bias"] = (f"{GATE}.bias", (rank,))
    if config.head == "rnn":
        table["joint_proj"] = (f"{JOINT}.weight", (3 * rank, 2 * rank + hidden))
        table["joint_bias"] = (f"{JOINT}.bias", (3 * rank,))
    if config.has_confidence:
        read = hidden + (rank if config.confidence_reads_markov else 0)
        table["confidence_proj"] = (CONFIDENCE, (1, read))
        if config.confidence_has_bias:
            table["confidence_bias"] = (CONFIDENCE_BIAS, (1,))
    if config.is_trimmed:
        table["d2t"] = (DRAFT_TO_TARGET, (config.draft_vocab_size,))
    if config.has_own_embedding:
        table["embed"] = (EMBEDDING, (config.vocab_size, hidden))
    if config.has_own_unembed:
        table["unembed"] = (UNEMBED, (config.draft_vocab_size, hidden))
    return table


def weight_sources(
    config: DSparkConfig, tensors: DraftTensors, where: str, num_tokens: int
) -> dict[str, WeightSource]:
    """Map every parameter of the whole drafter to its place in the checkpoint.

    Args:
        config: of the drafter.
        tensors: of its checkpoint.
        where: the checkpoint, for messages.
        num_tokens: of the target's that can be sampled; an own vocabulary projection may have no
            more rows than that.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    sources = {}
    for parameter, (plain, expected) in tensor_table(config, tensors).items():
        shape = tensors.shapes.get(plain)
        if shape is None:
            raise CheckpointError(
                f"{where}: the drafter has no tensor {plain}; a shard is missing or its "
                f"configuration belongs to another drafter"
            )
        pad = 0
        if parameter == "unembed" and not config.is_trimmed and shape == (num_tokens, expected[1]):
            pad = expected[0] - num_tokens  # as transformers stores it: rows of padding are cut off
        elif shape != expected:
            raise CheckpointError(
                f"{where}: the drafter's tensor {tensors.stored[plain]} has shape {list(shape)}, "
                f"{list(expected)} expected from its configuration; one of the two belongs to "
                f"another drafter"
            )
        name, is_ids = tensors.stored[plain], plain == DRAFT_TO_TARGET
        part = Part(name, shape, (slice(None),) * len(shape), is_ids)
        sources[PARAMETER_ROOT + parameter] = WeightSource((part,), pad=pad)
    return sources


def sources_of_rank(
    config: DSparkConfig,
    sources: Mapping[str, WeightSource],
    num_tokens: int,
    rank: int,
    tp_size: int,
) -> dict[str, WeightSource]:
    """A rank's shares of the parameters of the whole drafter.

    Args:
        config: of the drafter.
        sources: of `weight_sources`.
        num_tokens: of the target's that can be sampled.
        rank: of `tp_size`, which divides all that `DSparkConfig.check_sharding` names.
        tp_size: number of ranks.
    """
    tokens = config.num_drafted(num_tokens)
    share = vocabulary_share(tokens, tp_size)
    first, last = min(rank * share, tokens), min((rank + 1) * share, tokens)
    own = {}
    for parameter, source in sources.items():
        name = parameter.rpartition(".")[2]
        (part,) = source.parts
        index, pad = list(part.index), source.pad
        if parameter.removeprefix(PARAMETER_ROOT) in _OF_TOKENS:
            index[0], pad = slice(first, last), share - (last - first)
        elif (dim := _SHARED.get(name)) is not None:
            width = part.shape[dim] // tp_size
            index[dim] = slice(rank * width, (rank + 1) * width)
        mine = replace(part, index=tuple(index))
        if name == "ctx_proj" and config.is_cut:
            width = config.target_hidden_size
            for tap in range(len(config.taps)):
                columns = (index[0], slice(tap * width, (tap + 1) * width))
                own[f"{parameter}.{tap}"] = WeightSource((replace(part, index=columns),))
            continue
        own[parameter] = replace(source, parts=(mine,), pad=pad)
    return own


def unused_tensors(config: DSparkConfig, tensors: DraftTensors, known: frozenset[str]) -> list[str]:
    """Plain names of tensors that are no parameter and not among the `known`."""
    used = {plain for plain, _ in tensor_table(config, tensors).values()}
    return sorted(tensors.shapes.keys() - used - known)


def is_copy_of_target(own: Tensor, target: Tensor) -> bool:
    """Whether a drafter's table holds the rows of the target's, bit for bit.

    Tables are compared piece by piece, so that mapped files need not fit into memory, and up to the
    first difference. Rows that one of them lacks are padding and do not count.

    Args:
        own: [N, D].
        target: [M, D], which may have another dtype: then it is no copy.
    """
    if own.dtype != target.dtype or own.shape[1] != target.shape[1]:
        return False
    num_rows = min(len(own), len(target))
    step = max(1, _PIECE // own.shape[1])
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        bits = (x[rows].contiguous().view(torch.uint8) for x in (own, target))
        if not torch.equal(*bits):
            return False
    return True


def check_trimming(
    config: DSparkConfig, d2t: Tensor, t2d: Tensor | None, where: str, num_tokens: int
) -> None:
    """Check the tokens that a trimmed vocabulary names.

    Args:
        config: of the drafter.
        d2t: offsets [Vd] of a drafted token's id to the target's.
        t2d: bool [V], whether a token of the target can be drafted; None if it is not stored.
        where: the checkpoint, for messages.
        num_tokens: of the target's that can be sampled.

    Raises:
        CheckpointError: offsets are no integers, lead to a token twice or to none, or the two
            tensors differ.
    """
    if d2t.dtype == torch.bool:
        raise CheckpointError(f"{where}: d2t must hold offsets, it holds truth values")
    tokens = torch.arange(len(d2t)) + d2t
    if not ((tokens >= 0) & (tokens < num_tokens)).all():
        row = int(((tokens < 0) | (tokens >= num_tokens)).nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t leads from draft token {row} to token {int(tokens[row])}, the target "
            f"has {num_tokens}; the drafter belongs to another model"
        )
    if len(set(tokens.tolist())) < len(tokens):
        raise CheckpointError(
            f"{where}: d2t leads to the same token from several draft tokens; it must hold offsets "
            f"from a draft token's id to the target's"
        )
    if t2d is None:
        return
    drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
    drafted[tokens] = True
    if t2d.shape != drafted.shape:
        raise CheckpointError(
            f"{where}: t2d has shape {list(t2d.shape)}, {list(drafted.shape)} expected: a value "
            f"for every row of the target's embedding"
        )
    if not torch.equal(t2d.bool(), drafted):
        raise CheckpointError(
            f"{where}: t2d must be true exactly at the {len(d2t)} tokens that d2t leads to; "
            f"{int((t2d.bool() != drafted).sum())} of its values differ"
        )
