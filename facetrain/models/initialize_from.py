"""What a new run starts from: the network of another, and where it has them, its class centers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from facetrain.backbone.base import Backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.errors import ModelError
from facetrain.head.margin_head import MarginHead
from facetrain.models.match_weights import adopt, settle_norms
from facetrain.models.mxnet_layers import read_mxnet_layers
from facetrain.models.mxnet_symbol import read_symbol
from facetrain.models.onnx_layers import read_onnx_layers
from facetrain.models.weight_files import load_plain, load_weights_into, read_weights

_AT_ONCE = 1 << 16
_MXNET_CENTERS = "fc7_weight"
_RANK_FILE = re.compile(r"checkpoint_gpu_(\d+)\.pt")


@dataclass(frozen=True)
class Centers:
    """The class centers of a finished run, read as they are asked for."""

    num_classes: int
    rows: Callable[[int, int], Tensor]
    """Returns the centers of classes [start, stop): (stop - start, D)."""


def initialize_backbone(backbone: Backbone, path: Path, faces: Callable[[], Tensor]) -> None:
    """Give a network the weights of a run, a checkpoint, or any file that `facetrain eval` takes.

    `faces` gives images (B, 3, H, W) like those that it will be trained on: some ONNX files have lost the
    statistics of their batch norms, which are then taken from these.

    Raises:
        ModelError: there is no such file, or the network in it is another one.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    graphs = {".onnx": read_onnx_layers, ".json": read_mxnet_layers, ".params": read_mxnet_layers}
    if path.is_dir() or path.suffix not in graphs:
        load_weights_into(backbone, read_backbone_weights(path), str(path))
        return
    found = adopt(graphs[path.suffix](path), backbone)
    load_weights_into(backbone, found.weights, str(path))
    if found.merged:
        settle_norms(backbone, found.merged, faces())


def initialize_centers(head: MarginHead, path: Path, *, may_grow: bool) -> None:
    """Give this rank's first classes the centers of another run; what lies behind them stays as it was drawn.

    Raises:
        ModelError: there are none, or of other classes or another length.
    """
    centers, weight = read_centers(path), head.row_state()["weight"]
    known = centers.num_classes
    if known > head.num_classes or (known < head.num_classes and not may_grow):
        hint = "extend adds identities behind the known ones" if known < head.num_classes else "take reinit"
        raise ModelError(
            f"{path}: has centers of {known:,} identities, the dataset {head.num_classes:,}; "
            f"head.init_from: {hint}"
        )
    for start in range(head.shard.start, min(head.shard.stop, known), _AT_ONCE):
        stop = min(start + _AT_ONCE, head.shard.stop, known)
        rows = centers.rows(start, stop)
        if rows.shape[1] != weight.shape[1]:
            raise ModelError(
                f"{path}: its centers have {rows.shape[1]:,} numbers, the head's {weight.shape[1]:,}"
            )
        weight[start - head.shard.start : stop - head.shard.start].copy_(rows)


def read_backbone_weights(path: Path) -> dict[str, Tensor]:
    """Return the backbone's weights of a run's folder, a checkpoint, or a file that `read_weights` reads.

    Raises:
        ModelError: it is none of these.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if not path.is_dir():
        return read_weights(path)[0]
    if (path / "model.safetensors").exists():
        return read_weights(path / "model.safetensors")[0]
    return Checkpoint.open(path).replicated("backbone.")


def read_centers(path: Path) -> Centers:
    """Return the class centers beside a network: of our checkpoints, of arcface_torch's, one file per rank, or MXNet's.

    Raises:
        ModelError: there are none, or not those of all ranks.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.is_dir():
        checkpoint = Checkpoint.open(path)
        return Centers(
            checkpoint.manifest.num_classes, lambda start, stop: checkpoint.rows("weight", start, stop)
        )
    if _RANK_FILE.fullmatch(path.name):
        return _arcface_torch(path)
    weight = read_symbol(path)[2].get(_MXNET_CENTERS) if path.suffix in (".json", ".params") else None
    if weight is None or weight.dim() != 2:
        raise ModelError(
            f"{path}: has no class centers; give a run's folder, a checkpoint, arcface_torch's checkpoint_gpu_0.pt, "
            f"or MXNet's files with {_MXNET_CENTERS}, or take head.init_from: reinit"
        )
    return Centers(len(weight), lambda start, stop: weight[start:stop].float())


def _arcface_torch(path: Path) -> Centers:
    """Put the shards of `PartialFC_V2` together: consecutive classes, rank by rank."""
    ranks = {
        int(found[1]): other for other in path.parent.iterdir() if (found := _RANK_FILE.fullmatch(other.name))
    }
    if sorted(ranks) != list(range(len(ranks))):
        raise ModelError(
            f"{path.parent}: has checkpoint_gpu_ files of ranks {', '.join(map(str, sorted(ranks)))}; "
            f"classes are split over all ranks from 0 on"
        )
    parts = [_shard(ranks[rank]) for rank in range(len(ranks))]
    sizes = [len(part) for part in parts]
    # Rank r has C // W classes, and one more if r < C % W: sizes that do not descend so are of several runs.
    if any(not 0 <= before - after <= 1 for before, after in pairwise(sizes)) or sizes[0] - sizes[-1] > 1:
        raise ModelError(f"{path.parent}: the ranks have {sizes} classes, which are not of one run")
    if len({part.shape[1] for part in parts}) > 1:
        raise ModelError(f"{path.parent}: the centers of the ranks have different lengths")
    whole = torch.cat(parts)
    return Centers(len(whole), lambda start, stop: whole[start:stop])


def _shard(path: Path) -> Tensor:
    value = load_plain(path)
    head = value.get("state_dict_softmax_fc") if isinstance(value, dict) else None
    weight = head.get("weight") if isinstance(head, dict) else None
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(f"{path}: holds no table state_dict_softmax_fc.weight")
    return weight
