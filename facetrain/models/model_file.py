"""Model files: a network with its weights and a description of itself, and the opening of all formats.

The description is JSON under the metadata key `facetrain` of a .safetensors file:

    {"backbone": {"name": "r50", "embedding_size": 512, "image_size": 112},
     "preprocessing": {"channels": "RGB", "mean": 127.5, "scale": 127.5, "layout": "NCHW"},
     "config": {…}, "step": 2000,                         the settings and the last step of the run, in files of a run
     "code": "9f86…"}                                     SHA-256 of the source file of a network of one's own
"""

# B images   H, W height and width   D embedding size

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from facetrain import own_parts
from facetrain.backbone.base import DEFAULT_IMAGE_SIZE
from facetrain.backbone.low_rank import merge_adapters
from facetrain.backbone.registry import BACKBONES, IRESNET_LAYERS, TIMM_PREFIX
from facetrain.backbone.timm_network import PREFIX
from facetrain.backbone.zoo import build_backbone, build_on_meta
from facetrain.checkpoint.commit import CHECKPOINTS, LATEST, complete_steps
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.manifest import MANIFEST
from facetrain.checkpoint.tensor_file import write_tensors
from facetrain.errors import CheckpointError, ConfigError, ModelError, NoCheckpointError, RunError
from facetrain.files import error_reason, new_file, parse_json
from facetrain.models.checksum import CHECKSUM_KEY, checksum_of
from facetrain.models.mxnet_network import open_mxnet
from facetrain.models.onnx_network import open_onnx
from facetrain.models.preprocessing import (
    FRACTIONS,
    NAMES_OF_SCALES,
    PREPROCESSING,
    PREPROCESSING_KEY,
    RAW_PIXELS,
    float_pixels,
    prepare_of,
    uint8_pixels,
)
from facetrain.models.published_weights import TIMM_FACES, is_image_encoder
from facetrain.models.weight_files import (
    COUNTER,
    FRACTIONS_KEY,
    METADATA_KEY,
    ORIGIN_KEY,
    load_weights_into,
    read_weights,
    require_same_shapes,
)
from facetrain.telemetry.log import warn
from facetrain.text import listed

MODEL_FILE = "model.safetensors"
"""Name of the model file that a run writes at its end."""
_CVLFACE_FILE = Path("pretrained_model", "model.pt")
"""Weights in a folder that CVLface publishes."""
SOURCES_KEY = "average_of"
"""Key of the description: the averaged models and their weights."""
CONFIG_KEY = "config"
"""Key of the description: the config of the run."""
STEP_KEY = "step"
"""Key of the description: number of training steps of the weights in a file of a run."""
CODE_KEY = "code"
"""Key of the description: SHA-256 of the source file of a network of one's own (MODULE:NAME), as it was trained."""
THRESHOLDS_KEY = "thresholds"
"""Key of the description: what `facetrain calibrate` measured on the embeddings of this file."""
_MODEL_SUFFIXES = ("-symbol.json", ".ckpt", ".onnx", ".pt", ".pth", ".safetensors")
_OPTIONS = frozenset(
    {"layers", "widths", "own", "embedding_size", "image_size", "dropout", "checkpoint_activations"}
)
"""Options of a network that a description may have."""
_WEIGHTS_PER_BLOCK = 4
"""A block of every network has more; to build one takes time, also without memory."""
DEFAULT_EMBEDDING_SIZE = 512
_LAST_WEIGHTS = ("features.weight", "features.layers.3.weight", "feature.3.weight", "head.weight")
"""Names of the weight in a published network's last layer; its length is D."""
_MXNET_SUFFIXES = (".params", ".json")
GRAPH_SUFFIXES = (".onnx", *_MXNET_SUFFIXES)
"""Suffixes of ONNX and MXNet files, whose networks are graphs and no backbones."""


@dataclass(frozen=True)
class EmbeddingModel:
    """A network that is ready to embed images."""

    network: nn.Module
    image_size: int
    embedding_size: int
    prepare: Callable[[Tensor], Tensor]
    """Maps uint8 images (B, H, W, 3) RGB to the input of the network."""
    description: str
    """One line for people: the backbone and its size, or the format of the file."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Description in the model file: `backbone` (for facetrain's backbones), `preprocessing`, `config`."""

    @property
    def takes_landmarks(self) -> bool:
        """Whether the network takes the landmarks (B, 5, 2) of the faces after the images."""
        return bool(getattr(self.network, "takes_landmarks", False))

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The input of the network: channels, layout, and (x − mean) / scale for pixels x from 0 to 255."""
        return dict(self.metadata.get(PREPROCESSING_KEY, PREPROCESSING))


def describe_backbone(name: str, **options: Any) -> dict[str, Any]:
    """Return the description of a network for a model file: the arguments of `build_backbone`."""
    return {"backbone": {"name": name} | options, PREPROCESSING_KEY: PREPROCESSING}


def save_model(path: Path, state: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write weights and a description to a .safetensors file, atomically.

    Raises:
        RunError: the file cannot be written.
    """
    with new_file(path, RunError) as scratch:
        write_model(scratch, state, description)


def write_model(path: Path, state: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write a new .safetensors file, with a checksum of the weights: the same bytes for the same weights.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    metadata = {METADATA_KEY: json.dumps(description), CHECKSUM_KEY: checksum_of(tensors)}
    # Not by `safetensors.torch.save_file`: it writes the entries of the metadata in a random order.
    write_tensors(path, tensors, metadata)


def open_model(path: Path, device: torch.device, *, allow_code: bool = False) -> EmbeddingModel:
    """Open a network in evaluation mode on a device (ONNX: on the CPU).

    `path` is a run folder, a checkpoint, the file `latest` that names one, a .safetensors file, a .pt, .pth or .ckpt
    file of arcface_torch, AdaFace, CVLface or timm, a .onnx file, or either file of an MXNet network. With
    `allow_code`, the network may be code that the file names (MODULE:NAME).

    Raises:
        ConfigError: the file names code that may not run.
        ModelError: the file is missing or damaged, or its network is unknown.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    path = Path(path)
    # A run folder may have any name.
    if path.suffix in GRAPH_SUFFIXES and not path.is_dir():
        return _open_onnx(path) if path.suffix == ".onnx" else _open_mxnet(path, device)
    weights, description, origin = read_model(path)
    if not description.keys() - {ORIGIN_KEY, PREPROCESSING_KEY}:
        description = identify_backbone(weights, origin) | description
        if description["backbone"]["name"].startswith(TIMM_PREFIX):
            weights = {f"{PREFIX}{name}": weight for name, weight in weights.items()}
    if allow_code:
        own_parts.allow([str((description.get("backbone") or {}).get("name"))])
    return _build_model(weights, description, origin, device)


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return the state dict of the backbone in any input of `open_model` but a graph, its description, and its origin.

    The description of a file of another program is empty, or has `ORIGIN_KEY`, with `preprocessing` if it is another
    one than that of our backbones. The origin is a path, for messages.

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
        weights, metadata = read_weights(path)
        try:
            description = parse_json(metadata.get(METADATA_KEY, "{}"))
            if not isinstance(description, dict):
                raise ValueError("is no object")
        except ValueError as error:
            raise ModelError(f"{path}: its metadata {METADATA_KEY} is not a JSON object") from error
        _require_described(description, str(path))
        if description:
            return weights, description, str(path)
        return _without_centers(weights), _describe_converted(metadata), str(path)
    checkpoint = open_checkpoint(path)
    weights, description = checkpoint.replicated("backbone."), checkpoint.meta.get("model", {})
    origin = str(checkpoint.folder)
    _require_described(description, origin)
    return merge_adapters(weights, origin), description | {STEP_KEY: checkpoint.step}, origin


def _without_centers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the class centers that TopoFR saves among the weights of its network: `weight`, (classes, D)."""
    centers, size = weights.get("weight"), _embedding_size(weights)
    if centers is None or size is None or centers.shape[1:] != (size,):
        return weights
    return {name: tensor for name, tensor in weights.items() if tensor is not centers}


def _embedding_size(weights: dict[str, Tensor]) -> int | None:
    """Return D of a published network, from its last layer; None if it has no such layer."""
    last = (weights[name] for name in _LAST_WEIGHTS if name in weights and weights[name].dim())
    return next(map(len, last), None)


def _describe_converted(metadata: dict[str, str]) -> dict[str, Any]:
    """Return the description of weights of another program; see `read_weights` for the metadata."""
    origin = {key: metadata[key] for key in metadata.keys() & {ORIGIN_KEY}}
    return origin | ({PREPROCESSING_KEY: FRACTIONS} if FRACTIONS_KEY in metadata else {})


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


def newest_model_file(folder: Path) -> Path | None:
    """Return the model file in a folder; None if there is none, or if its run has newer weights in a checkpoint.

    In a folder of CVLface, which is no run, it is the file with the weights.
    """
    path, checkpoints = folder / MODEL_FILE, folder / CHECKPOINTS
    if not path.exists():
        published = folder / _CVLFACE_FILE
        return published if published.is_file() and not checkpoints.exists() else None
    step = read_step(path)
    # A file without a step was not written by a run, which could have continued.
    is_old = step is not None and max(complete_steps(checkpoints), default=0) > step
    return None if is_old else path


def read_step(path: Path) -> int | None:
    """Return the number of training steps in the description of a model file; None if it has no such number."""
    try:
        with safe_open(str(path), framework="pt") as file:
            step = parse_json((file.metadata() or {})[METADATA_KEY])[STEP_KEY]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    return step if isinstance(step, int) else None


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


def identify_backbone(weights: dict[str, Tensor], origin: str) -> dict[str, Any]:
    """Return the description of the network that has weights of these names and shapes.

    Raises:
        ModelError: no known network at 112 pixels has such weights.
    """
    if is_image_encoder(weights):
        raise ModelError(
            f"{origin}: is an image encoder (DINOv2, CLIP), not a face network; train one from it with model.init_from"
        )
    names = [name for name, architecture in BACKBONES.items() if architecture.is_published]
    embedding_size = _embedding_size(weights) or DEFAULT_EMBEDDING_SIZE
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items() if not name.endswith(COUNTER)}
    for name in names:
        # Building the 1,030 blocks of r2060 takes seconds, even without memory for the weights.
        if name in IRESNET_LAYERS and f"layer3.{IRESNET_LAYERS[name][2] - 1}.bn1.weight" not in weights:
            continue
        if shapes == _published_shapes(name, embedding_size):
            return describe_backbone(name, embedding_size=embedding_size, image_size=DEFAULT_IMAGE_SIZE)
    if "blocks.0.attn.qkv.bias" in weights:
        for name, own in TIMM_FACES:
            if {f"{PREFIX}{key}": shape for key, shape in shapes.items()} == _published_shapes(
                name, embedding_size, tuple(own.items())
            ):
                return describe_backbone(
                    name, own=own, embedding_size=embedding_size, image_size=DEFAULT_IMAGE_SIZE
                )
    raise ModelError(
        f"{origin}: its {len(weights)} weights are not those of {', '.join(names)} at {DEFAULT_IMAGE_SIZE} pixels; "
        + _advice_on_names(weights, origin)
    )


def _advice_on_names(weights: dict[str, Tensor], origin: str) -> str:
    """Return what to do with weights that are not those of a known network."""
    parts = zip(*(name.split(".")[:-1] for name in weights), strict=False)
    prefix = "".join(f"{same[0]}." for same in takewhile(lambda each: len(set(each)) == 1, parts))
    if prefix:
        renamed = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        with suppress(ModelError):
            name = identify_backbone(renamed, origin)["backbone"]["name"]
            return (
                f"without {listed([prefix])} at the beginning of each name they are those of {name}: save them so, "
                "if its input is (pixels − 127.5) / 127.5 of RGB images"
            )
    return "for another network give a .safetensors file of facetrain, which describes it, or an ONNX file"


@lru_cache(maxsize=64)
def _published_shapes(
    name: str, embedding_size: int, own: tuple[tuple[str, Any], ...] = ()
) -> dict[str, tuple[int, ...]]:
    state = build_on_meta(name, embedding_size=embedding_size, own=dict(own)).state_dict()
    return {key: tuple(tensor.shape) for key, tensor in state.items() if not key.endswith(COUNTER)}


def _build_model(
    weights: dict[str, Tensor], description: dict[str, Any], origin: str, device: torch.device
) -> EmbeddingModel:
    try:
        options = dict(description["backbone"])
        name = options.pop("name")
        if own_parts.is_place(name):
            own_parts.require_allowed(name, origin)
        _check_options(options, len(weights))
        stated = description.get(PREPROCESSING_KEY, PREPROCESSING)
        if stated not in (PREPROCESSING, FRACTIONS):
            raise ValueError(
                f"its preprocessing is {listed([str(stated)])}, not {PREPROCESSING} or {FRACTIONS}"
            )
        # On the meta device first, without memory: a crafted file may describe a network of any size.
        described = build_on_meta(name, **options)
    except ConfigError:  # code that may not run, or that the user's own code does not take
        raise
    except Exception as error:  # torch's layers raise many types for impossible sizes, without a common base
        raise ModelError(
            f"{origin}: has no valid description of its network ({error_reason(error)})"
        ) from error
    # Names and shapes are compared before the network gets memory.
    require_same_shapes(described, weights, origin)
    warn_of_other_code(description, origin)
    with torch.random.fork_rng([]):  # the initial weights are drawn, and replaced
        backbone = build_backbone(name, **options)
    load_weights_into(backbone, weights, origin)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    origin_program = description.get(ORIGIN_KEY)
    return EmbeddingModel(
        backbone.eval().to(device),
        options.get("image_size", DEFAULT_IMAGE_SIZE),
        backbone.embedding_size,
        prepare_of(stated),
        f"{name}, {parameters:,} parameters" + (f" ({origin_program})" if origin_program else ""),
        description,
    )


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


def _check_options(options: dict[str, Any], num_weights: int) -> None:
    """Refuse a network that would take long to build, also without memory.

    Raises:
        ValueError: the description of the network has other options, or more blocks than the weights are for.
        TypeError: a number of blocks is not a whole number.
    """
    for name in options.keys() - _OPTIONS:
        raise ValueError(f"unknown option {name}")
    # abs: negative numbers would hide large ones, as NaN would without `index`
    blocks = sum(abs(operator.index(number)) for number in options.get("layers") or ())
    if _WEIGHTS_PER_BLOCK * blocks > num_weights:
        raise ValueError(f"{num_weights} weights for {blocks:,} blocks")


def _open_onnx(path: Path) -> EmbeddingModel:
    network = open_onnx(path)
    given: dict[str, Any] = PREPROCESSING | dict(zip(("mean", "scale"), network.mean_and_scale, strict=True))
    takes = "pixels" if network.from_pixels else NAMES_OF_SCALES[given["scale"]]
    metadata = {PREPROCESSING_KEY: given} | network.metadata
    return EmbeddingModel(
        network.eval(),
        network.image_size,
        network.embedding_size,
        uint8_pixels if network.from_pixels else prepare_of(given),
        f"ONNX, {path.name}, takes {takes}",
        metadata,
    )


def _open_mxnet(path: Path, device: torch.device) -> EmbeddingModel:
    network, size = open_mxnet(path).to(device), DEFAULT_IMAGE_SIZE
    try:
        # The graph does not store the shape of its output.
        with torch.no_grad():
            embedding_size = network(torch.zeros(1, 3, size, size, device=device)).shape[-1]
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(
            f"{path}: the graph does not run on images of {size} pixels: {error_reason(error)}"
        ) from error
    metadata = {PREPROCESSING_KEY: RAW_PIXELS}
    return EmbeddingModel(network, size, embedding_size, float_pixels, f"MXNet, {path.name}", metadata)
