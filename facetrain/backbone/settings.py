"""Settings of the backbone and its initial weights (section `model` of the config)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from facetrain.backbone.registry import BACKBONES, TIMM_PREFIX, architecture, name_in_facetrain
from facetrain.settings import NotNegative, OneOf, PathText, Positive, Settings

PARAMETRIZED = ".parametrizations."
"""Part of a parameter's name that torch adds to the name of a layer with a parametrization, such as an adapter."""
_Channels = Annotated[int, Field(gt=0, le=1 << 16)]
"""Far more than any network has, and few enough that torch can compute the sizes of all weights."""


class LoraSettings(Settings):
    """Low-rank adapters (LoRA): all weights of `init_from` are frozen, and small updates of them are trained."""

    rank: Positive = 8
    """Number of inner channels of an update; more have more parameters."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the factor `alpha` / `rank` on the updates. null: the rank, so that the factor is 1."""
    targets: tuple[str, ...] = ()
    """Prefixes of the names of convolutions and linear layers that get an update. []: all of them."""
    projections: tuple[Literal["q", "k", "v"], ...] = ()
    """Projections of the attentions of a ViT that get an update, each its own, such as [q, v]; no other layer gets one.
    []: the layers of `targets`."""


class ModelSettings(Settings):
    """Backbone network, which maps an image to an embedding."""

    backbone: Annotated[str, OneOf(BACKBONES, own=True, prefix=TIMM_PREFIX, alias=name_in_facetrain)] = "r50"
    """Architecture of the backbone: an IResNet (r18 to r2060), MobileFaceNet (mbf…), ViT (vit_…), ViT with position
    encoding by landmarks (vit_…_kprpe), IR network of AdaFace and CVLface (ir18 to ir101), IR-SE network of TFace and
    CVLface (irse…), IR or IR-SE network of face.evoLVe (evolve_…), or ResNet of torchvision (resnet…); iresnet takes
    `layers`, `widths` and `stem_stride`. timm/NAME: a network of timm, with the extra `[timm]`. MODULE:NAME: a function
    or class of your own that builds a torch module from images (B, 3, H, W) to embeddings (B, D); it takes
    `embedding_size`, `image_size` and `options`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a backbone of your own; for timm/NAME, patch_size, class_token and global_pool."""
    embedding_size: _Channels = 512
    """Number of elements of an embedding."""
    layers: tuple[NotNegative, ...] | None = None
    """Number of blocks in each of the four stages: required for backbone iresnet, possible for mbf…, where all but the
    first may be 0. null: the published numbers."""
    widths: tuple[_Channels, ...] | None = None
    """Number of channels in each of the four stages; only for backbone iresnet, and required there. On a CPU, multiples
    of 16 are fastest."""
    stem_stride: Literal[1, 2] | None = None
    """Stride of the first convolution; only for backbone iresnet. With 2, the stages have a quarter of the pixels: a
    step takes about half the time, and the model is less accurate. null: 1."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping a feature before the last layer; in a ViT, a feature of a patch before the first block.
    MobileFaceNets have no dropout."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass instead of storing them: needs less memory, and takes about a third
    longer."""
    batch_norm: Literal["auto", "local", "sync"] = "auto"
    """Batch norm statistics. local: of each rank. sync: over all ranks. auto: sync if `train.global_batch_size` is
    given, so that the result does not depend on the number of ranks; otherwise local, as in the published recipes."""
    init_from: PathText | None = None
    """Weights to start from: a run folder, a checkpoint, a .safetensors file, arcface_torch's or CVLface's .pt,
    AdaFace's .ckpt, MXNet's -symbol.json, an .onnx file, or an address (hf://, https://, s3://, gs://). null: random
    weights."""
    init_blocks: Literal["all", "first"] = "all"
    """Blocks of `init_from`. all: it has the blocks of this network. first: it may have more blocks per stage, and each
    stage takes the first ones; the start of a smaller network that learns from `init_from`, see `distill`."""
    freeze: tuple[str, ...] = ()
    """Prefixes of parameter names; the parameters that match are not trained, and the running statistics of their
    batch norms stay as they are."""
    train_batch_norm: bool = True
    """Train the batch norms that are not frozen. false: all batch norms keep statistics, weights and biases, and
    normalize with the statistics of `init_from`; for fine-tuning on few images."""
    lora: LoraSettings | None = None
    """null: the weights themselves are trained."""
    lr_factors: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """Factors on the learning rate by prefix of the parameter name; the longest matching prefix counts. The parameters
    of an adapter (`lora`) have the factor of the weight that it updates."""

    @model_validator(mode="after")
    def _check_init_from(self) -> Self:
        need_it = {
            "lora needs init_from, the model whose weights are updated": self.lora is not None,
            "train_batch_norm: false needs init_from, the model whose statistics are kept": not self.train_batch_norm,
            "init_blocks: first needs init_from, the model with more blocks": self.init_blocks == "first",
        }
        for message, is_set in need_it.items():
            if is_set and self.init_from is None:
                raise ValueError(message)
        if self.lora is not None and self.freeze:
            raise ValueError(
                "freeze cannot be combined with lora, which freezes all weights; see lora.targets"
            )
        return self

    @model_validator(mode="after")
    def _check_layers_and_widths(self) -> Self:
        if problem := architecture(self.backbone).shape_problem(self.layers, self.widths, self.stem_stride):
            raise ValueError(f"backbone {self.backbone}: {problem}")
        if self.options and self.backbone in BACKBONES:
            raise ValueError(f"options are for timm/NAME or MODULE:NAME, not for {self.backbone}")
        return self

    @property
    def shape(self) -> dict[str, Any]:
        """Arguments of `build_backbone` that are given: `layers`, `widths`, `stem_stride` and `own`."""
        given = {
            "layers": self.layers,
            "widths": self.widths,
            "stem_stride": self.stem_stride,
            "own": self.options or None,
        }
        return {name: value for name, value in given.items() if value is not None}
