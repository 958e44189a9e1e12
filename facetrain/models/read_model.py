"""Weights and description of a network, read from a model file, a run, a checkpoint or a file of another program."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from facetrain import own_parts
from facetrain.backbone.low_rank import merge_adapters
from facetrain.checkpoint.commit import CHECKPOINTS, LATEST
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.manifest import MANIFEST
from facetrain.errors import CheckpointError, ModelError, NoCheckpointError
from facetrain.files import parse_json
from facetrain.models.identify_backbone import stored_embedding_size
from facetrain.models.model_file import CODE_KEY, MODEL_FILE, ORIGIN_KEY, STEP_KEY, newest_model_file
from facetrain.models.preprocessing import FRACTIONS, PREPROCESSING_KEY
from facetrain.models.weight_files import METADATA_KEY, read_weights
from facetrain.telemetry.log import warn

_GRAPH_SUFFIXES = (".onnx", ".params", ".json")
_MODEL_SUFFIXES = ("-symbol.json", ".ckpt", ".onnx", ".pt", ".pth", ".safetensors")


class StoredModel(NamedTuple):
    """A network, as a file or a checkpoint has it."""

    weights: dict[str, Tensor]
    """State dict of the backbone."""
    description: dict[str, Any]
    """See `model_file`. In a file of another program it is empty, or has `ORIGIN_KEY`, with `preprocessing` if it is
    another one than that of our backbones."""
    origin: str
    """Path, for messages."""


def is_graph(path: Path) -> bool:
    """Return whether a path is an ONNX or MXNet file, whose network is a graph and no backbone."""
    # A run folder may have any name.
    return path.suffix in _GRAPH_SUFFIXES and not path.is_dir()


def read_model(path: Path, own_names: Set[str] = frozenset()) -> StoredModel:
    """Read any input of `open_model` but a graph; see `read_weights` for `own_names`.

    Raises:
        ModelError: the file is missing or damaged.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.name == LATEST and path.is_file():
        path = Checkpoint.open(path).folder
    if path.is_dir() and (file := newest_model_file(path)):
        _warn_of_damaged_checkpoint(path)
        path = file
    if not path.is_dir():
        return _read_file(path, own_names)
    checkpoint = open_checkpoint(path)
    weights, description = checkpoint.replicated("backbone."), checkpoint.meta.get("model", {})
    origin = str(checkpoint.folder)
    _require_described(description, origin)
    return StoredModel(merge_adapters(weights, origin), description | {STEP_KEY: checkpoint.step}, origin)


def names_code(path: Path) -> bool:
    """Return whether the network of an input of `open_model` is code of one's own (MODULE:NAME).

    Raises:
        ModelError, CheckpointError: as `read_model`.
    """
    if is_graph(path):
        return False
    backbone = read_model(path).description.get("backbone", {})
    return own_parts.is_place(str(backbone.get("name")))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint, or the newest checkpoint of a run.

    Raises:
        ModelError: the folder has none, but it has model files; the message names them.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    try:
        return Checkpoint.open(folder)
    except CheckpointError as error:
        if not folder.is_dir():  # the file `latest` of a run
            raise
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(_MODEL_SUFFIXES))
        if not names or (folder / CHECKPOINTS).exists() or (folder / MANIFEST).exists():
            raise
        raise ModelError(
            f"{folder}: is not a run or a checkpoint, but contains {', '.join(names[:3])}; give the path of the file"
        ) from error


def warn_of_other_code(description: dict[str, Any], origin: str) -> None:
    """Warn if a network of one's own was trained with another source than this process has imported.

    Its weights may fit all the same, and give other embeddings.
    """
    name, trained = str(description.get("backbone", {}).get("name")), description.get(CODE_KEY)
    imported = own_parts.source_digest(name)
    if trained and imported and imported != trained:
        warn(
            f"{origin}: was trained with another version of the file that defines {name}; if the network has changed, "
            "restore that file"
        )


def _read_file(path: Path, own_names: Set[str]) -> StoredModel:
    file = read_weights(path, own_names)
    try:
        description = parse_json(file.metadata.get(METADATA_KEY, "{}"))
        if not isinstance(description, dict):
            raise ValueError("is no object")
    except ValueError as error:
        raise ModelError(f"{path}: its metadata {METADATA_KEY} is not a JSON object") from error
    _require_described(description, str(path))
    if description:
        return StoredModel(file.weights, description, str(path))
    program = {ORIGIN_KEY: file.program} if file.program else {}
    preprocessing = {PREPROCESSING_KEY: FRACTIONS} if file.takes_fractions else {}
    return StoredModel(_without_centers(file.weights), program | preprocessing, str(path))


def _without_centers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the class centers that TopoFR saves among the weights of its network: `weight`, (classes, D)."""
    centers, size = weights.get("weight"), stored_embedding_size(weights)
    if centers is None or size is None or centers.shape[1:] != (size,):
        return weights
    return {name: tensor for name, tensor in weights.items() if tensor is not centers}


def _require_described(description: Any, origin: str) -> None:
    if not isinstance(description, dict) or not isinstance(description.get("backbone", {}), dict):
        raise ModelError(f"{origin}: has no valid description of its network")


def _warn_of_damaged_checkpoint(run: Path) -> None:
    """Warn if the newest checkpoint of a run is damaged, as far as its manifest and the sizes of its files show it.

    The model file beside it has its own checksum and is read, but the run could not be continued.
    """
    try:
        Checkpoint.open(run).verify_sizes()
    except NoCheckpointError:
        return
    except CheckpointError as error:
        warn(f"{error}; {MODEL_FILE} of the run is used")
