"""Reader of .safetensors, .pt and .pth files, which runs nothing that they contain."""

from __future__ import annotations

import re
import threading
import warnings
import zipfile
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from facetrain.errors import ModelError
from facetrain.files import error_reason, require_utf_8
from facetrain.models.checksum import CHECKSUM_KEY, checksum_of, require_checksum
from facetrain.models.published_weights import below, convert_published
from facetrain.text import listed

METADATA_KEY = "facetrain"
"""Key of the metadata of a .safetensors file that facetrain wrote: the description of the model."""
COUNTER = ".num_batches_tracked"
"""End of the name of a batch norm's counter, which no embedding depends on: files from before torch 0.4.1 and of
converters lack it."""
_MAX_TENSORS = 1 << 16
"""Tensors of one file; each needs a kilobyte of memory, even without numbers."""
_REFUSED = re.compile(r"GLOBAL ([\w.]{1,200})")
"""Name of the refused class or function in torch's message."""
_WRAPPERS = "state_dict_backbone", "state_dict", "model_state_dict", "model", "net", "backbone"
"""Keys under which checkpoints have the weights: of arcface_torch, of PyTorch Lightning, and of usual loops."""
_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes of parameter names: of DistributedDataParallel and of torch.compile."""
_BACKBONE = "backbone."
"""Prefix of the backbone's parameter names in a network with a head, whose other weights are left out."""


class WeightFile(NamedTuple):
    """Tensors of a file by name, and what is known about them."""

    weights: dict[str, Tensor]
    metadata: dict[str, str]
    """Of a .safetensors file. Only the description that facetrain wrote (`METADATA_KEY`) is to be trusted."""
    program: str = ""
    takes_fractions: bool = False
    """These two: see `ConvertedWeights`."""


def read_weights(path: Path, own_names: Set[str] = frozenset()) -> WeightFile:
    """Read a file of weights.

    Of arcface_torch both kinds of files are read: `model.pt`, which has the backbone alone, and
    `checkpoint_gpu_0.pt`, of which the backbone is returned. The backbones of AdaFace's Lightning checkpoints, of
    CVLface's files and of MagFace's are returned with our names and for RGB images. A file that has most of
    `own_names`, those of a network of one's own, is not converted: its parts may have the names that other programs
    use.

    Raises:
        ModelError: the file is missing, contains something else than tensors, or has an unknown color order.
        UsageError: the path of a .safetensors file is not UTF-8.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        weights, metadata = _read_safetensors(path)
    else:
        weights, metadata = _read_state_dict(path), {}
    if METADATA_KEY in metadata:  # facetrain wrote it: its names and its color order are known
        return WeightFile(weights, metadata)
    stored, weights = weights, {_without_prefixes(name): tensor for name, tensor in weights.items()}
    # Parts of a network of one's own may also be called as a prefix is, and be in a wrapper.
    wrapped = {_without_prefix(name): tensor for name, tensor in stored.items()}
    forms = (stored, wrapped, weights, _backbone_of(weights))
    own = max(forms, key=lambda named: len(named.keys() & own_names))
    if 2 * len(own.keys() & own_names) > len(own_names):
        return WeightFile(own, metadata)
    # After the checksum: it is of the tensors as they are stored.
    converted = convert_published(_backbone_of(weights), path)
    return WeightFile(converted.weights, metadata, converted.program, converted.takes_fractions)


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    value = load_without_code(path)
    for key in _WRAPPERS:
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    if not isinstance(value, dict) or not all(isinstance(v, Tensor) for v in value.values()) or not value:
        if isinstance(value, Tensor):
            raise ModelError(
                f"{path}: one tensor {list(value.shape)} and no network; if these are class centers, as "
                "rank_0_softmax_weight.pt of arcface_torch, give the backbone.pth beside them"
            )
        found = f" (has {listed(map(str, value))})" if value and isinstance(value, dict) else ""
        raise ModelError(f"{path}: not a state dict{found}; save `model.state_dict()` to the file")
    for name, tensor in value.items():
        require_stored(tensor, f"{path}: the weight {name}")
    return {str(name): tensor for name, tensor in value.items()}


def _backbone_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the backbone, if there is one with this name, without the prefixes of their names."""
    inner = below(weights, _BACKBONE)
    return {_without_prefixes(name): tensor for name, tensor in inner.items()} or weights


def require_stored(tensor: Tensor, what: str) -> None:
    """Check that a tensor of a file has its numbers there: a small file can state any shape.

    Raises:
        ModelError: it has not; the message begins with `what`.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ModelError(f"{what} is not stored as a dense tensor; save it as one")
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise ModelError(
            f"{what} has fewer numbers than its shape {list(tensor.shape)}; save the tensors after `.contiguous()`"
        )


class _Ignored:
    """Replacement of an object that a checkpoint has besides the weights: it takes any state and keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


_IGNORED = (
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    "pytorch_lightning.callbacks.early_stopping.EarlyStopping",
    "pytorch_lightning.callbacks.lr_monitor.LearningRateMonitor",
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "argparse.Namespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "pathlib.WindowsPath",
)
"""Classes in PyTorch Lightning's checkpoints beside the weights. Their objects are not built.

A file with any other class is refused.
"""
_LOADING = threading.Lock()
"""Held while torch knows `_IGNORED`: its allowed names, and the filters of warnings, are those of all threads."""


def load_without_code(path: Path) -> Any:
    """Return the content of a .pt file made of tensors and plain values. Tensors are read when they are used.

    Raises:
        ModelError: the file contains other objects, is a program of torch.export, or is not a .pt file.
    """
    try:
        # Files from before torch 1.6 are not zip archives, and cannot be memory-mapped.
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _require_saved_by_torch(path)
        with (
            _LOADING,
            torch.serialization.safe_globals([(_Ignored, name) for name in _IGNORED]),
            warnings.catch_warnings(),
        ):
            # Instructions of the other protocols that torch does not know raise an error.
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except ModelError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any kind
        # torch's own messages name its instructions, and advise to run code.
        refused = _REFUSED.search(str(error))
        if refused:
            reason = f"contains objects of {refused[1]}; save `model.state_dict()` to the file"
        elif isinstance(error, OSError):
            reason = f"cannot be read: {error_reason(error)}"
        else:
            reason = (
                "is not a file that torch.save writes, or is damaged or incomplete; copy it again, or give the ONNX "
                "file of a network of another program"
            )
        raise ModelError(f"{path}: {reason}; no code in it was run") from error


def _require_saved_by_torch(path: Path) -> None:
    """Refuse archives that torch.save does not write.

    It stores records without compression, with which a few megabytes could become gigabytes.

    Raises:
        ModelError: a record is compressed, or it is a program of torch.export.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    # The code is beside the weights, which torch.load would take.
    if any("/code/" in record.filename for record in records):
        raise ModelError(
            f"{path}: is a TorchScript program, which facetrain does not run; give the state dict of the network, "
            "`torch.save(model.state_dict(), FILE)`"
        )
    packed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ModelError(
            f"{path}: has compressed records ({packed[0]}), which torch.save does not write; unpack it, and save the "
            "weights by `torch.save(model.state_dict(), FILE)`"
        )
    if any(record.filename.endswith("/archive_format") for record in records):
        raise ModelError(
            f"{path}: is a program that torch.export wrote, which facetrain does not run; give the model that it was "
            "exported from"
        )


def load_weights_into(module: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
    """Load weights into a module; `origin` is their file, for messages.

    Raises:
        ModelError: as `require_same_shapes`, or weights are not real numbers, as in a quantized network.
    """
    require_same_shapes(module, weights, origin)
    state = module.state_dict()
    for name, tensor in state.items():
        given = weights.get(name, tensor)
        if given.is_complex() or (tensor.is_floating_point() and not given.is_floating_point()):
            kind = str(given.dtype).removeprefix("torch.")
            raise ModelError(f"{origin}: weights {name} are {kind}, and not floating-point numbers")
    counters = {name: tensor for name, tensor in state.items() if name.endswith(COUNTER)}
    module.load_state_dict(counters | weights)


def require_same_shapes(module: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
    """Compare the names and shapes of weights with the state dict of a module.

    Raises:
        ModelError: weights are missing, unexpected, or of another shape; the message counts and names them.
    """
    expected = module.state_dict()
    missing = [name for name in expected if name not in weights and not name.endswith(COUNTER)]
    unexpected = [name for name in weights if name not in expected]
    other_shape = [
        name for name in expected if name in weights and expected[name].shape != weights[name].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": other_shape}
    differences = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    ]
    if differences:
        raise ModelError(f"{origin}: does not fit the network: weights {'; '.join(differences)}")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    require_utf_8(path)  # safetensors opens no other
    try:
        with safe_open(str(path), framework="pt") as file:
            names = list(file.keys())
            if len(names) > _MAX_TENSORS:
                raise ModelError(f"{path}: has {len(names):,} tensors; the limit is {_MAX_TENSORS:,}")
            weights, metadata = {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except SafetensorError as error:
        raise ModelError(
            f"{path}: is not a .safetensors file, or is damaged or incomplete; copy it again"
        ) from error
    except OSError as error:
        raise ModelError(f"{path}: {error}") from error
    if CHECKSUM_KEY in metadata:
        require_checksum(metadata, checksum_of(weights), path)
    return weights, metadata


def _without_prefixes(name: str) -> str:
    while (shorter := _without_prefix(name)) != name:
        name = shorter
    return name


def _without_prefix(name: str) -> str:
    return name.removeprefix(next(filter(name.startswith, _PREFIXES), ""))
