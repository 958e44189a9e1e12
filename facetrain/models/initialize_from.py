"""Initial weights of a new run from another run or program: the backbone, and the class centers.

`model.init_from` names the file or folder, `head.init_from` says what happens to the class centers.
"""

# B images   D embedding size   K this rank's classes

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.own_network import OwnNetwork
from facetrain.backbone.registry import TIMM_PREFIX
from facetrain.backbone.timm_network import TimmNetwork
from facetrain.backbone.zoo import build_backbone, build_on_meta
from facetrain.checkpoint.commit import LATEST
from facetrain.errors import ModelError
from facetrain.head.class_shard import row_pieces
from facetrain.head.head_group import Head, HeadPart, head_parts
from facetrain.models.identify_backbone import identify_backbone
from facetrain.models.known_identities import IDENTITIES, CenterChoice, Names, choose_centers
from facetrain.models.layer_graph import LayerGraph
from facetrain.models.match_weights import calibrate_norms, match_weights
from facetrain.models.model_file import CARDS_KEY, CONFIG_KEY
from facetrain.models.mxnet_network import open_mxnet
from facetrain.models.onnx_layers import read_onnx_layers
from facetrain.models.preprocessing import require_trainable_input
from facetrain.models.published_weights import stated_statistics
from facetrain.models.read_model import is_graph, open_checkpoint, read_model, warn_of_other_code
from facetrain.models.weight_files import load_weights_into, load_without_code, require_stored
from facetrain.own_parts import is_of_other_code

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
    names: Callable[[], Names | None] = lambda: None
    """Reads the names of the classes; returns None if they are unknown."""
    min_images: Any = None
    """`data.min_images_per_identity` of the run; None if it is unknown."""


def initialize_backbone(
    backbone: Backbone,
    path: Path,
    images: Callable[[], Tensor] | None,
    *,
    first_blocks_of: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Load the weights of a run, a checkpoint, or a file that `facetrain eval` accepts; return its description.

    The description is as in `StoredModel`; of an ONNX file only the cards of the data, and empty for an MXNet file.

    Args:
        backbone: The network to load into, on the CPU.
        path: Folder or file.
        images: Returns normalized training images (B, 3, H, W). It is called only for a file whose batch
            norms were merged into other layers: the statistics are then measured on these images. None: not at all.
        first_blocks_of: Arguments of `build_backbone` for the backbone, if the file may have more blocks: the first
            blocks of each stage are loaded, and all layers outside of the blocks. The network of an MXNet or ONNX file
            must be a MobileFaceNet with the published number of blocks then: the names of such files do not say where
            a stage begins.

    Raises:
        ModelError: the file is missing or damaged, or its network is not the backbone.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    description: dict[str, Any] = {}
    if not is_graph(path):
        weights, description, origin = read_model(path, _own_names(backbone))
        require_trainable_input(description, origin)
        warn_of_other_code(description, origin)
        if isinstance(backbone, TimmNetwork):
            if not description:
                weights = _of_timm(backbone, weights, Path(origin))
            elif str(description.get("backbone", {}).get("name")).startswith(TIMM_PREFIX):
                _require_same_statistics(backbone, description["backbone"], path)
        elif isinstance(backbone, OwnNetwork) and not description:
            weights = backbone.adapted(weights)
    else:
        # A graph is compared with a network of as many blocks; the first ones are selected below.
        whole = backbone if first_blocks_of is None else _build_published(path, first_blocks_of)
        graph = _read_layers(path)
        description = {name: value for name, value in graph.metadata.items() if name == CARDS_KEY}
        matched = match_weights(graph, whole)
        # Before the blocks are selected: the statistics of merged norms are measured in the whole network.
        load_weights_into(whole, matched.weights, str(path))
        if matched.merged_norms and images:
            calibrate_norms(whole, matched.merged_norms, images())
        weights = whole.state_dict()
    if first_blocks_of is not None:
        weights = _select_first_blocks(backbone, weights)
    try:
        load_weights_into(backbone, weights, str(path))
    except ModelError as error:
        found = _network_of(weights, path)
        raise ModelError(f"{error}; the file has {found}" if found else str(error)) from error
    return description


def _own_names(backbone: Backbone) -> Set[str]:
    """Return the names of the weights of a network that is not facetrain's; none of another one."""
    network = backbone.network if isinstance(backbone, OwnNetwork) else backbone
    return network.state_dict().keys() if is_of_other_code(network) else frozenset()


def _require_same_statistics(backbone: TimmNetwork, described: dict[str, Any], path: Path) -> None:
    """Refuse weights of a network that normalizes pixels in another way: they fit, and mean other images."""
    try:
        stated = getattr(build_on_meta(**described), "statistics", None)
    except (ModelError, TypeError, ValueError):
        # Of a network that this version of timm lacks: the weights may fit.
        return
    if stated not in (None, backbone.statistics):
        raise ModelError(
            f"{path}: is {described['name']}, which normalizes pixels by mean {stated.mean} and std {stated.std}, and "
            f"model.backbone by {backbone.statistics.mean} and {backbone.statistics.std}; set model.backbone: "
            f"{described['name']}"
        )


def _of_timm(backbone: TimmNetwork, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return weights of a file of timm for a backbone; see `TimmNetwork.adapted`."""
    stated = stated_statistics(path)
    if stated not in (None, backbone.statistics):
        raise ModelError(
            f"{path}: config.json beside it states mean {stated.mean} and std {stated.std}, and model.backbone has "
            f"{backbone.statistics.mean} and {backbone.statistics.std}; add the tag of the weights to its name"
        )
    try:
        return backbone.adapted(weights)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _network_of(weights: dict[str, Tensor], path: Path) -> str:
    """Return the name of the published network that has such weights, and its embedding size; empty for others."""
    try:
        described = identify_backbone(weights, str(path))["backbone"]
    except ModelError:
        return ""
    return f"{described['name']} with embeddings of {described['embedding_size']} numbers"


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
    """Return the weights without the blocks that follow the last block of a stage of the backbone."""
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


def choose_centers_of(
    path: Path, names: Names | None, num_classes: int, *, may_grow: bool, min_images: int
) -> CenterChoice:
    """Choose the center of another run for each class of a new one; `names` are those of the classes.

    With `may_grow`, there may be new people. `min_images` is the new run's `data.min_images_per_identity`.

    Raises:
        ModelError: there are no centers, or they do not fit the people; see `choose_centers`. Or only numbers say who
            is who, and each run has left out other identities.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    centers = read_centers(path)
    known = centers.names()
    choice = choose_centers(path, known, centers.num_classes, names, num_classes, may_grow=may_grow)
    is_by_number = known is None or names is None
    # An identity that one run leaves out moves the numbers of all that follow.
    if is_by_number and num_classes != centers.num_classes and centers.min_images not in (None, min_images):
        raise ModelError(
            f"{path}: was trained with data.min_images_per_identity {centers.min_images}, and this run has "
            f"{min_images}: without names of identities, class n is not the same person in both; restore it, or use "
            "head.init_from: reinit"
        )
    return choice


def initialize_centers(head: Head, path: Path, number_C: np.ndarray) -> None:
    """Load centers of another run into the C classes of a head; `number_C` are their numbers there, -1 keeps a center.

    Raises:
        ModelError: there are no centers, or they do not fit the head.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    centers = read_centers(path)
    for part in head_parts(head):
        _initialize_part(part, centers, number_C[slice(*part.shard)], path)


def _initialize_part(part: HeadPart, centers: SavedCenters, number_K: np.ndarray, path: Path) -> None:
    """Load centers into this rank's K classes of a head; `number_K` are their numbers in the other run, or -1."""
    weight = part.head.row_state()["weight"]
    # In slices: the centers of all classes may not fit into memory twice.
    for start, stop in row_pieces(centers.num_classes):
        place = np.flatnonzero((number_K >= start) & (number_K < stop))
        if not len(place):
            continue
        number = number_K[place]
        # Only the rows between the first and the last one: mostly, people keep their order.
        first = int(number.min())
        rows = centers.rows(first, int(number.max()) + 1)
        if rows.shape[1] != weight.shape[1]:
            raise ModelError(
                f"{path}: its centers have {rows.shape[1]:,} numbers, the centers of the head {weight.shape[1]:,}; "
                "set model.embedding_size as in the other run"
            )
        chosen = rows[torch.from_numpy(number - first)]
        weight[torch.from_numpy(place).to(weight.device)] = chosen.to(weight)


def read_centers(path: Path) -> SavedCenters:
    """Return the class centers of a run, of arcface_torch's files (one per rank), or of AdaFace.

    Raises:
        ModelError: there are no centers, or centers of some ranks are missing.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.is_dir() or (path.name == LATEST and path.is_file()):
        checkpoint, min_images = open_checkpoint(path), None
        with suppress(KeyError, TypeError):  # not written by a run
            min_images = checkpoint.meta["model"][CONFIG_KEY]["data"]["min_images_per_identity"]
        return SavedCenters(
            checkpoint.manifest.num_classes,
            lambda start, stop: checkpoint.rows("weight", start, stop),
            lambda: Names.from_tensors(checkpoint.replicated(IDENTITIES)),
            min_images,
        )
    if _RANK_FILE.fullmatch(path.name):
        return _read_arcface_torch_centers(path)
    columns = _matrix_in(path, "state_dict", _ADAFACE_CENTERS) if path.suffix == ".ckpt" else None
    if columns is None:
        raise ModelError(
            f"{path}: has no class centers; give a run folder, a checkpoint, arcface_torch's checkpoint_gpu_0.pt, or "
            f"AdaFace's .ckpt with {_ADAFACE_CENTERS}, or use head.init_from: reinit"
        )
    return SavedCenters(columns.shape[1], lambda start, stop: columns.T[start:stop].float())


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
    shards = []
    for rank in range(len(ranks)):
        shard = _matrix_in(ranks[rank], "state_dict_softmax_fc", "weight")
        if shard is None:
            raise ModelError(f"{ranks[rank]}: has no matrix state_dict_softmax_fc.weight")
        shards.append(shard)
    sizes = [len(shard) for shard in shards]
    # PartialFC_V2 gives rank r of W ranks C // W classes, and one more if r < C % W.
    expected = [sum(sizes) // len(sizes) + (rank < sum(sizes) % len(sizes)) for rank in range(len(sizes))]
    if sizes != expected or len({shard.shape[1] for shard in shards}) > 1:
        raise ModelError(
            f"{path.parent}: the shards disagree on the number of classes or the length of the centers "
            f"({sizes} classes); files of several runs are mixed"
        )
    first_classes = np.cumsum([0, *sizes[:-1]]).tolist()

    def rows(start: int, stop: int) -> Tensor:
        # The shards are mapped into memory: joined as a whole, they would be copied on every rank.
        parts = zip(first_classes, shards, strict=True)
        return torch.cat([shard[max(start - first, 0) : max(stop - first, 0)] for first, shard in parts])

    return SavedCenters(sum(sizes), rows)


def _matrix_in(path: Path, section: str, name: str) -> Tensor | None:
    """Return a matrix of a section of a .pt file; None if the file has no such matrix."""
    value = load_without_code(path)
    state = value.get(section) if isinstance(value, dict) else None
    matrix = state.get(name) if isinstance(state, dict) else None
    if not isinstance(matrix, Tensor) or matrix.dim() != 2:
        return None
    require_stored(matrix, f"{path}: {name}")
    return matrix
