"""Vision transformers with the architectures and parameter names of arcface_torch and CVLface, without timm."""

# B batch   N tokens   H heads   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.recompute import run_block
from facetrain.backbone.sample_draws import drop_path_scales, random_keys


def scaled(branch: Tensor, scale_2B: Tensor | None, number: int) -> Tensor:
    """Multiply a branch (B, N, width) by its factor of each sample; None: by 1."""
    return branch if scale_2B is None else branch * scale_2B[number].to(branch.dtype)[:, None, None]


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias_BHNN: Tensor | None = None) -> Tensor:
        """Map tokens (B, N, width) to the same shape; the bias is added to the scores of each head."""
        batch, tokens, width = x.shape
        # One product for queries, keys and values: (3, B, heads, N, width / heads).
        qkv = self.qkv(x).view(batch, tokens, 3, self._heads, width // self._heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        bias_BHNN = None if bias_BHNN is None else bias_BHNN.to(query.dtype)
        if bias_BHNN is not None and torch.compiler.is_exporting():
            # ONNX's form of the fused attention with a bias returns another memory layout, which breaks the reshape.
            score = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + bias_BHNN
            y = score.softmax(3) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=bias_BHNN)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Two linear layers with ReLU6 between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, width) to the same shape."""
        return self.fc2(F.relu6(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each with layer norm before it and a shortcut around it."""

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        # Declared in arcface_torch's order, which is the order of parameters in its checkpoints.
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attn = self.attention(width, heads)
        self.mlp = Mlp(width, mlp_ratio * width)

    def forward(self, x: Tensor, scale_2B: Tensor | None = None, *of_bias: Tensor) -> Tensor:
        """Map tokens (B, N, width) to the same shape.

        Args:
            x: tokens.
            scale_2B: factors on the branches, see `drop_path_scales`.
            of_bias: further arguments of the attention, of which it computes a bias.
        """
        x = x + scaled(self.attn(self.norm1(x), *of_bias), scale_2B, 0)
        return x + scaled(self.mlp(self.norm2(x)), scale_2B, 1)


class PatchEmbed(nn.Module):
    """Split of an image into square patches, each mapped to a token."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map images to tokens (B, N, width)."""
        return self.proj(image_BCHW).flatten(2).transpose(1, 2)


class VisionTransformer(Backbone):
    """Patch embedding, transformer blocks, and an embedding layer over all tokens together.

    The defaults of `patch` (its side in pixels), `heads` and `mlp_ratio` are arcface_torch's.
    """

    block: ClassVar[type[Block]] = Block
    """Class of the blocks."""

    def __init__(
        self,
        width: int,
        depth: int,
        *,
        drop_path: float,
        patch: int = 9,
        heads: int = 8,
        mlp_ratio: int = 4,
        mask_token: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._side = self.image_size // patch
        tokens = self._side**2
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        # There is no masking of patches in training, but arcface_torch's weights contain this parameter.
        if mask_token:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, width), requires_grad=False)
        self.patch_embed = PatchEmbed(width, patch)
        self.blocks = nn.ModuleList(self.block(width, heads, mlp_ratio) for _ in range(depth))
        self._drop_path = drop_path
        self.norm = nn.LayerNorm(width)
        self.feature = nn.Sequential(
            nn.Linear(width * tokens, width, bias=False),
            nn.BatchNorm1d(width, eps=2e-5),
            nn.Linear(width, self.embedding_size, bias=False),
            nn.BatchNorm1d(self.embedding_size, eps=2e-5),
        )
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if mask_token:
            nn.init.trunc_normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def draws_by_sample(self) -> bool:
        """Whether the network has dropout or drops branches."""
        return self._drop_path > 0 or super().draws_by_sample

    def trunk(self, image_BCHW: Tensor, *, key_B: Tensor | None = None) -> Tensor:
        """Map normalized images (B, 3, H, W) to their tokens, flat (B, N·width)."""
        x = self.embed_patches(image_BCHW, key_B)
        for block, scale_2B in zip(self.blocks, self.scales(image_BCHW, key_B), strict=True):
            x = run_block(block, x, scale_2B, recompute=self._recompute)
        return self.flatten_tokens(x)

    def scales(self, image_BCHW: Tensor, key_B: Tensor | None) -> Sequence[Tensor | None]:
        """Return the factors on the branches of each block, for images with these keys; None outside of training."""
        if not self.training or self._drop_path == 0:
            return [None] * len(self.blocks)
        if key_B is None:
            key_B = random_keys(image_BCHW)
        return drop_path_scales(self._drop_path, len(self.blocks), key_B).unbind(0)

    def embed_patches(self, image_BCHW: Tensor, key_B: Tensor | None) -> Tensor:
        """Map normalized images (B, 3, H, W) to tokens with positions, (B, H/patch · W/patch, width)."""
        return self.drop(self.patch_embed(image_BCHW) + self.pos_embed, key_B)

    def flatten_tokens(self, x: Tensor) -> Tensor:
        """Map the last block's tokens (B, N, width) to normalized ones, flat (B, N·width)."""
        return self.norm(x.float()).flatten(1)

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield each block."""
        yield from ((block, "forward") for block in self.blocks)

    def last_layers(self) -> tuple[str, ...]:
        """Return the name of the neck; a subclass registers further layers behind it."""
        return ("feature.",)

    def neck(self, feature: Tensor) -> Tensor:
        """Map flat tokens to embeddings (B, D)."""
        return self.feature(feature)
