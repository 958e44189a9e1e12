"""A network in one file that says what it is: which backbone, which image, which preprocessing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from facetrain.backbone.iresnet import LAYERS
from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.data.augment import normalize
from facetrain.errors import ModelError, RunError
from facetrain.models.mxnet_symbol import open_mxnet
from facetrain.models.onnx_network import open_onnx
from facetrain.models.weight_files import check_fit, load_weights_into, read_weights

NOTE = "facetrain"
PREPROCESSING = {"channels": "RGB", "mean": 127.5, "scale": 127.5, "layout": "NCHW"}
PIXELS = PREPROCESSING | {"mean": 0, "scale": 1}
"""What a network takes that normalizes inside."""


@dataclass(frozen=True)
class EmbeddingModel:
    """A network ready to embed faces, wherever it came from."""

    network: nn.Module
    image_size: int
    embedding_size: int
    prepare: Callable[[Tensor], Tensor]
    """Brings uint8 (B, H, W, 3) RGB to what the network takes."""
    description: str
    notes: dict[str, Any] = field(default_factory=dict)
    """What a model file says of it: its `backbone`, if it is one of ours, its `preprocessing`, its run's `config`."""

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What its input is: channels, and `(x - mean) / scale` of pixels 0 to 255."""
        return dict(self.notes.get("preprocessing", PREPROCESSING))


def describe_backbone(name: str, **options: Any) -> dict[str, Any]:
    """Return what a model file says of its network: the arguments of `build_backbone`."""
    return {"backbone": {"name": name} | options, "preprocessing": PREPROCESSING}


def save_model(path: Path, state: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write weights and description to a .safetensors file; it appears whole or not at all.

    Raises:
        RunError: it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.writing")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    try:
        save_file(tensors, scratch, metadata={NOTE: json.dumps(description)})
        os.replace(scratch, path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: the model cannot be written: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def open_model(path: Path, device: torch.device) -> EmbeddingModel:
    """Open a run's folder, a checkpoint, .safetensors, arcface_torch's .pt or .pth, .onnx, or MXNet's pair of files.

    Raises:
        ModelError: there is none, or no network that we know has such weights.
    """
    path = Path(path)
    if path.is_dir() and (path / "model.safetensors").exists():
        path = path / "model.safetensors"
    if path.is_dir():
        checkpoint = Checkpoint.open(path)
        return _built(
            checkpoint.replicated("backbone."),
            checkpoint.meta.get("model", {}),
            str(checkpoint.folder),
            device,
        )
    if path.suffix == ".onnx":
        return _open_onnx(path)
    if path.suffix in (".params", ".json"):
        return _open_mxnet(path, device)
    weights, notes = read_weights(path)
    try:
        description = json.loads(notes[NOTE]) if NOTE in notes else {}
    except ValueError as error:
        raise ModelError(f"{path}: what it says of itself is not JSON") from error
    return _built(weights, description or guess_backbone(weights, str(path)), str(path), device)


def guess_backbone(weights: dict[str, Tensor], where: str) -> dict[str, Any]:
    """Tell the network of bare weights by their names and shapes.

    Raises:
        ModelError: it is none that we know.
    """
    names = ["vit_t", "vit_s", "vit_b", "vit_l", "vit_h", "mbf_small", "mbf", "mbf_large", *LAYERS]
    size = next(
        (
            len(weights[n])
            for n in ("features.weight", "features.layers.3.weight", "feature.3.weight")
            if n in weights
        ),
        512,
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in names:
        if name == "r2060" and "layer3.895.bn1.weight" not in weights:
            continue
        with torch.device("meta"):
            own = build_backbone(name, embedding_size=size).state_dict()
        if shapes == {key: tuple(tensor.shape) for key, tensor in own.items()}:
            return describe_backbone(name, embedding_size=size, image_size=112)
    raise ModelError(
        f"{where}: its {len(weights)} weights are those of no network among {', '.join(names)} at 112 pixels"
    )


def _built(
    weights: dict[str, Tensor], description: dict[str, Any], where: str, device: torch.device
) -> EmbeddingModel:
    try:
        options = dict(description["backbone"])
        name = options.pop("name")
        if sum(options.get("layers") or ()) > len(weights):
            raise ValueError(f"{len(weights)} weights for {sum(options['layers'])} blocks")
        # First where weights have no memory: a file may announce a network of any size.
        with torch.device("meta"):
            check_fit(build_backbone(name, **options), weights, where)
        network = build_backbone(name, **options)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{where}: does not say which network it is ({error})") from error
    load_weights_into(network, weights, where)
    said = f"{description['backbone']['name']}, {sum(p.numel() for p in network.parameters()):,} parameters"
    return EmbeddingModel(
        network.eval().to(device),
        options.get("image_size", 112),
        network.embedding_size,
        normalize,
        said,
        description,
    )


def _open_onnx(path: Path) -> EmbeddingModel:
    network = open_onnx(path)
    floats = _pixels if network.normalizes else normalize
    notes = ({"preprocessing": PIXELS} if network.normalizes else {}) | network.notes
    return EmbeddingModel(
        network.eval(),
        network.image_size,
        network.embedding_size,
        _bytes if network.from_pixels else floats,
        f"ONNX, {path.name}",
        notes,
    )


def _open_mxnet(path: Path, device: torch.device) -> EmbeddingModel:
    network, size = open_mxnet(path).to(device), 112
    try:
        with torch.no_grad():
            width = network(torch.zeros(1, 3, size, size, device=device)).shape[-1]
    except (RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: the graph does not run on images of {size} pixels: {said}") from error
    return EmbeddingModel(network, size, width, _pixels, f"MXNet, {path.name}", {"preprocessing": PIXELS})


def _bytes(image_BHWC: Tensor) -> Tensor:
    return image_BHWC.permute(0, 3, 1, 2)


def _pixels(image_BHWC: Tensor) -> Tensor:
    """Bring uint8 (B, H, W, 3) to float32 (B, 3, H, W) from 0 to 255: MXNet's graphs normalize themselves."""
    return image_BHWC.permute(0, 3, 1, 2).float()
