"""Initial weights of a new run from another run or program: the backbone, and the class centers.

`model.init_from` names the file or folder, `head.init_from` says what happens to the class centers.
"""

# B images   D embedding size

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.low_rank import merge_adapters
from facetrain.backbone.zoo import build_backbone, build_on_meta
from facetrain.errors import ModelError
from facetrain.head.head_group import Head, HeadPart, head_parts
from facetrain.models.layer_graph import LayerGraph
from facetrain.models.match_weights import calibrate_norms, match_weights
from facetrain.models.model_file import GRAPH_SUFFIXES, newest_model_file, open_checkpoint
from facetrain.models.mxnet_network import open_mxnet
from facetrain.models.mxnet_symbol import read_symbol
from facetrain.models.onnx_layers import read_onnx_layers
from facetrain.models.weight_files import (
    load_weights_into,
    load_without_code,
    read_weights,
    require_same_shapes,
)

_ROWS_PER_COPY = 1 << 16
_MXNET_CENTERS = "fc7_weight"
"""Name that InsightFace's MXNet code gives to the class centers."""
_ADAFACE_CENTERS = "head.kernel"
"""Name of the class centers (D, K) in the `state_dict` of AdaFace's checkpoints."""
_RANK_FILE = re.compile(r"checkpoint_gpu_(\d+)\.pt")
"""Checkpoint of one rank, as arcface_torch names it."""


@dataclass(frozen=True)
class SavedCenters:
    """The class centers of a finished run, read on demand."""

    num_classes: int
    rows: Callable[[int, int], Tensor]
    """Returns the centers of classes [start, stop): (stop - start, D), float32."""


def initialize_backbone(backbone: Backbone, path: Path, images: Callable[[], Tensor]) -> list[str]:
    """Load the weights of a run, a checkpoint, or a file that `facetrain eval` accepts.

    Args:
        backbone: The network to load into, on the CPU.
        path: Folder or file.
        images: Returns normalized training images (B, 3, H, W). It is called only for a file whose batch
            norms were merged into other layers: the statistics are then measured on these images.

    Returns:
        Names of the batch norms whose statistics were measured.

    Raises:
        ModelError: the file is missing or damaged, or its network is not the backbone.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.is_dir() or path.suffix not in GRAPH_SUFFIXES:
        load_weights_into(backbone, read_backbone_weights(path), str(path))
        return []
    matched = match_weights(_read_layers(path), backbone)
    load_weights_into(backbone, matched.weights, str(path))
    if matched.merged_norms:
        calibrate_norms(backbone, matched.merged_norms, images())
    return matched.merged_norms


def initialize_first_blocks(
    backbone: Backbone, path: Path, images: Callable[[], Tensor], options: dict[str, Any]
) -> list[str]:
    """Load the first blocks of each stage of a network with more blocks, and all layers outside of the blocks.

    Args:
        backbone: The network to load into, `build_backbone(**options)`, on the CPU.
        path: Folder or file, as for `initialize_backbone`. The network of an MXNet or ONNX file must be a MobileFaceNet
            with the published number of blocks: the names of such files do not say where a stage begins.
        images: As for `initialize_backbone`.
        options: Arguments of `build_backbone`.

    Returns:
        Names of the batch norms whose statistics were measured.

    Raises:
        ModelError: the file is missing or damaged, or its network differs in more than the number of blocks.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.is_dir() or path.suffix not in GRAPH_SUFFIXES:
        merged, weights = [], read_backbone_weights(path)
    else:
        deeper = _build_published(path, options)
        merged, weights = initialize_backbone(deeper, path, images), deeper.state_dict()
    load_weights_into(backbone, _select_first_blocks(backbone, weights), str(path))
    return merged


def _read_layers(path: Path) -> LayerGraph:
    """Return the layers of an ONNX file or of either file of an MXNet network."""
    return read_onnx_layers(path) if path.suffix == ".onnx" else open_mxnet(path).layers()


def _build_published(path: Path, options: dict[str, Any]) -> Backbone:
    """Build a network with the published number of blocks, for the weights of an MXNet or ONNX file."""
    if options["name"] == "iresnet":
        raise ModelError(
            f"{path}: model.init_blocks: first takes the first blocks of an iresnet from a run, a .safetensors file or "
            "arcface_torch's .pt; MXNet and ONNX files only fit mbf…"
        )
    return build_backbone(**{name: value for name, value in options.items() if name != "layers"})


def _select_first_blocks(backbone: Backbone, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without those of blocks that follow the last block of a stage of the backbone."""
    stages = {
        name: len(module)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
    }

    def follows(weight: str) -> bool:
        parts = weight.split(".")
        return any(
            number.isdecimal() and int(number) >= stages.get(".".join(parts[:place]), sys.maxsize)
            for place, number in enumerate(parts)
        )

    return {name: weight for name, weight in weights.items() if not follows(name)}


def initialize_centers(head: Head, path: Path, *, may_grow: bool) -> None:
    """Load the class centers of another run into the head's first classes.

    With `may_grow`, the head may have more classes than the other run. These keep their random centers.

    Raises:
        ModelError: there are no centers, or their number or length does not fit the head.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    centers = read_centers(path)
    check_center_count(path, centers, head.num_classes, may_grow=may_grow)
    for part in head_parts(head):
        _initialize_part(part, centers, path)


def _initialize_part(part: HeadPart, centers: SavedCenters, path: Path) -> None:
    weight, (first, past) = part.head.row_state()["weight"], part.shard
    # In slices: the centers of all classes may not fit into memory twice.
    for start in range(first, min(past, centers.num_classes), _ROWS_PER_COPY):
        stop = min(start + _ROWS_PER_COPY, past, centers.num_classes)
        rows = centers.rows(start, stop)
        if rows.shape[1] != weight.shape[1]:
            raise ModelError(
                f"{path}: its centers have {rows.shape[1]:,} numbers, those of the head {weight.shape[1]:,}; "
                "set model.embedding_size and head.sub_centers to those of the other run"
            )
        weight[start - first : stop - first].copy_(rows)


def check_center_count(path: Path, centers: SavedCenters, num_classes: int, *, may_grow: bool) -> None:
    """Check that a head of `num_classes` can start from the centers of another run.

    Raises:
        ModelError: it has fewer classes, or more although `may_grow` is false.
    """
    known = centers.num_classes
    if known > num_classes or (known < num_classes and not may_grow):
        advice = (
            "head.init_from: extend keeps them and adds the new identities"
            if known < num_classes
            else "use head.init_from: reinit"
        )
        raise ModelError(
            f"{path}: has centers of {known:,} identities, the dataset has {num_classes:,}; {advice}"
        )


def check_backbone_weights(path: Path, options: dict[str, Any], *, first_blocks: bool = False) -> None:
    """Check that a file can be loaded into the network `build_backbone(**options)`.

    Args:
        path: Folder or file, as for `initialize_backbone`.
        options: Arguments of `build_backbone`.
        first_blocks: Whether the network may have fewer blocks than the file, see `initialize_first_blocks`.

    Raises:
        ModelError: it is not readable, or its weights do not fit.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.is_dir() or path.suffix not in GRAPH_SUFFIXES:
        weights = read_backbone_weights(path)
        network = build_on_meta(**options)
    else:
        published = _build_published(path, options) if first_blocks else build_backbone(**options)
        weights = match_weights(_read_layers(path), published).weights
        network = build_backbone(**options)
    if first_blocks:
        weights = _select_first_blocks(network, weights)
    require_same_shapes(network, weights, str(path))


def read_backbone_weights(path: Path) -> dict[str, Tensor]:
    """Return the state dict of the backbone in a run folder, a checkpoint, or a file that `read_weights` reads.

    Raises:
        ModelError: it is none of these.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if not path.is_dir():
        return read_weights(path)[0]
    model = newest_model_file(path)
    if model is not None:
        return read_weights(model)[0]
    return merge_adapters(open_checkpoint(path).replicated("backbone."), str(path))


def read_centers(path: Path) -> SavedCenters:
    """Return the class centers of a run, of arcface_torch's files (one per rank), of AdaFace, or of an MXNet network.

    Raises:
        ModelError: there are no centers, or not those of all ranks.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.is_dir():
        checkpoint = open_checkpoint(path)
        return SavedCenters(
            checkpoint.manifest.num_classes, lambda start, stop: checkpoint.rows("weight", start, stop)
        )
    if _RANK_FILE.fullmatch(path.name):
        return _read_arcface_torch_centers(path)
    weight = None
    if path.suffix in (".json", ".params"):
        weight = read_symbol(path)[2].get(_MXNET_CENTERS)
    elif path.suffix == ".ckpt":
        weight = _read_adaface_centers(path)
    if weight is None or weight.dim() != 2:
        raise ModelError(
            f"{path}: has no class centers; give a run folder, a checkpoint, arcface_torch's checkpoint_gpu_0.pt, "
            f"AdaFace's .ckpt with {_ADAFACE_CENTERS}, or MXNet's files with {_MXNET_CENTERS}, or use "
            "head.init_from: reinit"
        )
    return SavedCenters(len(weight), lambda start, stop: weight[start:stop].float())


def _read_adaface_centers(path: Path) -> Tensor | None:
    """Return the centers (K, D) of a Lightning checkpoint of AdaFace, which stores a column for each class."""
    value = load_without_code(path)
    state = value.get("state_dict") if isinstance(value, dict) else None
    kernel = state.get(_ADAFACE_CENTERS) if isinstance(state, dict) else None
    return kernel.T if isinstance(kernel, Tensor) and kernel.dim() == 2 else None


def _read_arcface_torch_centers(path: Path) -> SavedCenters:
    """Join the shards that `PartialFC_V2` writes: consecutive classes, in the order of the ranks."""
    ranks = {
        int(match[1]): file for file in path.parent.iterdir() if (match := _RANK_FILE.fullmatch(file.name))
    }
    if sorted(ranks) != list(range(len(ranks))):
        raise ModelError(
            f"{path.parent}: has checkpoint_gpu_ files of ranks {', '.join(map(str, sorted(ranks)))}; "
            "add the files of all ranks from 0 on, because each has the centers of other classes"
        )
    shards = [_read_arcface_torch_shard(ranks[rank]) for rank in range(len(ranks))]
    sizes = [len(shard) for shard in shards]
    # PartialFC_V2 gives rank r of W ranks C // W classes, and one more if r < C % W. Other sizes are of several runs.
    if any(not 0 <= size - following <= 1 for size, following in pairwise(sizes)) or sizes[0] - sizes[-1] > 1:
        raise ModelError(f"{path.parent}: the ranks have {sizes} classes, which are not of one run")
    if len({shard.shape[1] for shard in shards}) > 1:
        raise ModelError(f"{path.parent}: the centers of the ranks have different lengths")
    weight = torch.cat(shards)
    return SavedCenters(len(weight), lambda start, stop: weight[start:stop])


def _read_arcface_torch_shard(path: Path) -> Tensor:
    value = load_without_code(path)
    head = value.get("state_dict_softmax_fc") if isinstance(value, dict) else None
    weight = head.get("weight") if isinstance(head, dict) else None
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(f"{path}: has no matrix state_dict_softmax_fc.weight")
    return weight
