"""Inkling-2's vision tower, written to be traced: one image's patches to a row per image token.

Shape letters: N tokens (tiles of an image), P = 4 N patches (`patches_per_token` of them a tile), D
hidden size, H heads, d their size, F width of an MLP, V values of a patch, S points of the side of
the grid of position embeddings, M width of the text model.

The tower takes one image at a time, so nothing of it is masked but padding: a step is traced for
one count of tiles and runs images of as many or fewer. Every rank runs the whole tower.
Equations: the reference implementation in transformers (`Inkling2VisionModel`).
"""

import torch
from torch import Tensor, nn

from inkrt.engines.inkling2.vision_config import VisionConfig
from inkrt.engines.parts import ink, parameter


class LayerNorm(nn.Module):
    """Norm of rows to mean 0 and variance 1, with weight and bias."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(width, dtype=dtype)
        self.bias = parameter(width, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        out_TD: Tensor = ink.layer_norm(x_TD, self.weight, self.bias, self.eps)
        return out_TD


class BiasedLinear(nn.Module):
    """Projection with a bias."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype)
        self.bias = parameter(outputs, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] to [T, outputs]."""
        out: Tensor = ink.biased_linear(x, self.weight, self.bias)
        return out


class VisionLayer(nn.Module):
    """Attention and MLP on normed rows, each scaled channel by channel before it is added."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.config = config
        self.attn_norm = LayerNorm(hidden, eps, dtype)
        self.wq = BiasedLinear(hidden, hidden, dtype)
        self.wk = BiasedLinear(hidden, hidden, dtype)
        self.wv = BiasedLinear(hidden, hidden, dtype)
        self.wo = BiasedLinear(hidden, hidden, dtype)
        self.attn_scale = parameter(hidden, dtype=dtype)
        self.mlp_norm = LayerNorm(hidden, eps, dtype)
        self.up = BiasedLinear(width, hidden, dtype)
        self.down = BiasedLinear(hidden, width, dtype)
        self.mlp_scale = parameter(hidden, dtype=dtype)

    def forward(self, h_TD: Tensor, positions: Tensor, num_rows: Tensor) -> Tensor:
        """[T, D] to [T, D], T = 1 + P."""
        config = self.config
        x_TD = self.attn_norm(h_TD)
        heads = (h_TD.shape[0], config.num_attention_heads, config.head_dim)
        q_THd, k_THd, v_THd = (project(x_TD).view(heads) for project in (self.wq, self.wk, self.wv))
        q_THd = ink.axial_rope(q_THd, positions, config.rope_theta)
        k_THd = ink.axial_rope(k_THd, positions, config.rope_theta)
        o_THd = ink.bidirectional_attention(q_THd, k_THd, v_THd, num_rows, config.head_dim**-0.5)
        h_TD = ink.scaled_add(h_TD, self.wo(o_THd.view(h_TD.shape)), self.attn_scale)
        m_TD = self.down(ink.gelu(self.up(self.mlp_norm(h_TD))))
        out_TD: Tensor = ink.scaled_add(h_TD, m_TD, self.mlp_scale)
        return out_TD


class VisionTower(nn.Module):
    """Patches of one image to features that take the place of its tokens' embeddings."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, side = config.hidden_size, config.posemb_grid_size
        self.config = config
        self.patch_embedding = parameter(hidden, config.patch_values, dtype=dtype)
        self.position_embedding = parameter(side, side, hidden, dtype=dtype)
        self.class_token = parameter(hidden, dtype=dtype)
        self.class_position = parameter(hidden, dtype=dtype)
        self.norm = LayerNorm(hidden, config.layer_norm_eps, dtype)
        self.layers = nn.ModuleList(
            VisionLayer(config, dtype) for _ in range(config.num_hidden_layers)
        )
        merged = config.patches_per_token * hidden
        self.proj_in = parameter(config.projection_hidden_dim, merged, dtype=dtype)
        self.proj_out = parameter(
            config.text_hidden_size, config.projection_hidden_dim, dtype=dtype
        )

    def forward(
        self, patches: Tensor, positions: Tensor, grid: Tensor, num_rows: Tensor
    ) -> tuple[Tensor]:
        """Features of an image, in the dtype of the tower.

        All four come from `runtime.images.tower_inputs`; rows behind the image are zero.

        Args:
            patches: float32 or bfloat16 [P, V], as the weights; tile by tile, four a tile.
            positions: int32 [1 + P, 2], row and column of the class token (0, 0) and of every
                patch, counted from 1.
            grid: int32 [2], the image's rows and columns of patches.
            num_rows: int32 [1], the class token and the image's patches.

        Returns:
            [N, M]; those of tiles behind the image mean nothing.
        """
        config = self.config
        e_PD = ink.linear(patches, self.patch_embedding, False)
        h_TD = ink.grid_embedding(
            e_PD,
            positions,
            grid,
            self.position_embedding,
            self.class_token,
            self.class_position,
        )
        h_TD = self.norm(h_TD)
        for layer in self.layers:
            h_TD = layer(h_TD, positions, num_rows)
        num_tokens = patches.shape[0] // config.patches_per_token
        merged = h_TD[1:].view(num_tokens, config.patches_per_token * config.hidden_size)
        inner = ink.gelu(ink.linear(merged, self.proj_in, False))
        return (ink.linear(inner, self.proj_out, False),)


def tower_input_shapes(
    config: VisionConfig, num_tokens: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every input of a tower traced for images of up to `num_tokens` tiles."""
    num_patches = num_tokens * config.patches_per_token
    return {
        "patches": ((num_patches, config.patch_values), dtype),
        "positions": ((num_patches + 1, 2), torch.int32),
        "grid": ((2,), torch.int32),
        "num_rows": ((1,), torch.int32),
    }
