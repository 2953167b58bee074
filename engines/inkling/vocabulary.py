"""The two ends of an Inkling model, which its MTP heads share: tokens to rows, rows to logits."""

from torch import Tensor

from inkrt.engines.inkling.config import InklingConfig
from inkrt.engines.parts import ink


def embed(tokens: Tensor, table: Tensor, norm: Tensor, config: InklingConfig) -> Tensor:
    """Normed embeddings [T, D] of tokens int32 [T]."""
    rows_TD = ink.embedding(tokens, table)
    normed_TD: Tensor = ink.rms_norm(rows_TD, norm, config.rms_norm_eps, rows_TD.dtype)
    return normed_TD


def project(f_TD: Tensor, unembed: Tensor, config: InklingConfig, tp_size: int) -> Tensor:
    """Logits float32 [T, V] of final rows [T, D], from this rank's and the others' shards."""
    shard_TV = ink.linear(ink.scale(f_TD, None, config.logits_mup_width_multiplier), unembed, True)
    if tp_size > 1:
        shard_TV = ink.all_gather(shard_TV, tp_size)
    logits_TV: Tensor = shard_TV[:, : config.unpadded_vocab_size]
    return logits_TV
