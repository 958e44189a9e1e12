"""Vision transformers with the architecture and parameter names of timm, without timm.

They differ from arcface_torch's in the embedding layer: it sees one vector per image, which is a class token or the
average of the tokens. The attention has biases, and the activation is GELU. DINOv2 and the image encoder of CLIP are
such networks with a few more layers; their published weights have no embedding layer for faces.
"""

# B batch   N tokens   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.backbone.base import Backbone, run_block
from facetrain.backbone.registry import ChannelStatistics
from facetrain.backbone.vit import Attention, Mlp, PatchEmbed

_HEAD_WIDTH = 64
"""Width of an attention head in timm's ViTs of every size."""


def quick_gelu(x: Tensor) -> Tensor:
    """Return x · sigmoid(1.702 x), the approximation of GELU with which OpenAI trained CLIP."""
    return x * torch.sigmoid(1.702 * x)


class LayerScale(nn.Module):
    """Trained factor on each channel (Touvron et al., arXiv 2103.17239, section 2.2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, width) to the same shape."""
        return x * self.gamma


class TimmBlock(nn.Module):
    """Attention and MLP, each with layer norm before it and a shortcut around it."""

    def __init__(
        self, width: int, eps: float, activation: Callable[[Tensor], Tensor], *, layer_scale: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attn = Attention(width, width // _HEAD_WIDTH, bias=True)
        self.ls1 = LayerScale(width) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = Mlp(width, 4 * width, activation)
        self.ls2 = LayerScale(width) if layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, width) to the same shape."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "quick_gelu": quick_gelu}


class TimmVisionTransformer(Backbone):
    """Patch embedding, transformer blocks, and a linear layer over the class token or the average of the tokens.

    Corresponds to timm's `vit_*_patch16_224` with another image and patch size, and with `num_classes` as the length
    of the embedding. `class_token=False` corresponds to `class_token=False, global_pool="avg"`.

    Args:
        width: numbers of a token.
        depth: number of blocks.
        patch: side of a patch in pixels.
        class_token: whether a class token is added, whose output is the vector of the image.
        layer_scale: whether each branch has a trained factor per channel, as in DINOv2.
        norm_before: whether a layer norm precedes the first block, as in CLIP.
        activation: activation of the MLPs, "gelu" or "quick_gelu".
        eps: epsilon of the layer norms.
        pretrained_on: mean and standard deviation of the channels, for pixels from 0 to 1, with which the published
            weights were trained on other images than faces; None for weights that were trained on faces.
        options: options of every backbone.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        *,
        patch: int = 8,
        class_token: bool = True,
        layer_scale: bool = False,
        norm_before: bool = False,
        activation: str = "gelu",
        eps: float = 1e-6,
        pretrained_on: ChannelStatistics | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pretrained_on = pretrained_on
        # Weights of image encoders come without it: `model.lora` trains it whole.
        self.new_layers = () if pretrained_on is None else ("head.",)
        tokens = (self.image_size // patch) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if class_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens + class_token, width))
        self.patch_embed = PatchEmbed(width, patch)
        self.norm_pre = nn.LayerNorm(width, eps) if norm_before else nn.Identity()
        self.blocks = nn.ModuleList(
            TimmBlock(width, eps, _ACTIVATIONS[activation], layer_scale=layer_scale) for _ in range(depth)
        )
        # timm names the last norm after its place: before the average of the tokens, or behind it.
        self.norm = nn.LayerNorm(width, eps) if class_token else nn.Identity()
        self.fc_norm = nn.Identity() if class_token else nn.LayerNorm(width, eps)
        self.head = nn.Linear(width, self.embedding_size)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def trunk(self, image_BCHW: Tensor, *, key_B: Tensor | None = None) -> Tensor:
        """Map normalized images (B, 3, H, W) to one vector each (B, width)."""
        x = self.patch_embed(image_BCHW)
        if self.cls_token is not None:
            # Not len(x): torch.export would take the number of images for a constant.
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        x = self.norm_pre(self.drop(x + self.pos_embed, key_B))
        for block in self.blocks:
            x = run_block(block, x, recompute=self._recompute)
        if self.cls_token is not None:
            return self.norm(x[:, 0].float())
        return self.fc_norm(x.float().mean(dim=1))

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield each block."""
        yield from ((block, "forward") for block in self.blocks)

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return the names of the embedding of patches and positions with the class token, and of each block."""
        stem = ("patch_embed.", "pos_embed", "cls_token", "norm_pre.")
        return [stem, *((f"blocks.{n}.",) for n in range(len(self.blocks)))]

    def neck(self, feature: Tensor) -> Tensor:
        """Map the vectors to embeddings (B, D)."""
        return self.head(feature)
