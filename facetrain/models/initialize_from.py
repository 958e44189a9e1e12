"""Initial weights of a backbone from another run or program, in the file or folder that `model.init_from` names.

Its class centers: `saved_centers`.
"""

# B images

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.own_network import OwnNetwork
from facetrain.backbone.registry import TIMM_PREFIX
from facetrain.backbone.timm_network import TimmNetwork
from facetrain.backbone.zoo import build_backbone, build_on_meta
from facetrain.errors import ModelError
from facetrain.models.identify_backbone import identify_backbone
from facetrain.models.layer_graph import LayerGraph
from facetrain.models.match_weights import calibrate_norms, match_weights
from facetrain.models.model_file import CARDS_KEY
from facetrain.models.mxnet_network import open_mxnet
from facetrain.models.onnx_layers import read_onnx_layers
from facetrain.models.preprocessing import require_trainable_input
from facetrain.models.published_weights import stated_statistics
from facetrain.models.read_model import is_graph, read_model, warn_of_other_code
from facetrain.models.weight_files import load_weights_into
from facetrain.own_parts import is_of_other_code


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
