"""Weights from elsewhere, read without running what they might hold."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from facetrain.errors import ModelError

_WRAPPERS = ("module.", "_orig_mod.", "backbone.")


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a .safetensors, .pt or .pth file, and the notes that a .safetensors carries.

    Of arcface_torch's files both kinds are read: `model.pt`, which is the backbone alone, and
    `checkpoint_gpu_0.pt`, of which the backbone is taken.

    Raises:
        ModelError: there is no such file, or it holds something else than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    value = load_plain(path)
    if isinstance(value, dict) and isinstance(value.get("state_dict_backbone"), dict):
        value = value["state_dict_backbone"]
    if not isinstance(value, dict) or not all(isinstance(v, Tensor) for v in value.values()) or not value:
        raise ModelError(f"{path}: holds no table of named weights")
    return {_unwrapped(str(name)): tensor for name, tensor in value.items()}, {}


def load_plain(path: Path) -> Any:
    """Return what a .pt file holds, if that is tensors and plain values; large tensors are read when they are used.

    Raises:
        ModelError: it holds something else, or is no such file.
    """
    try:
        # Files from before torch 1.6 are no archives, and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        OSError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{path}: cannot be read as weights alone ({said}); nothing in it was run"
        ) from error


def load_weights_into(module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load weights whose names and shapes are those of the module.

    Raises:
        ModelError: as `check_fit`.
    """
    check_fit(module, weights, where)
    module.load_state_dict(weights)


def check_fit(module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Hold names and shapes of weights against those of a module.

    Raises:
        ModelError: some are missing, left over, or of another shape; the message counts and names them.
    """
    own = module.state_dict()
    missing = [name for name in own if name not in weights]
    surplus = [name for name in weights if name not in own]
    shapes = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    faults = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("left over", surplus), ("of another shape", shapes))
        if names
    ]
    if faults:
        raise ModelError(f"{where}: does not fit the network: weights {'; '.join(faults)}")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: {error}") from error


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name
