"""Model files: the weights of a network and a description of it, written and found.

The description is JSON under the metadata key `facetrain` of a .safetensors file:

    {"backbone": {"name": "r50", "embedding_size": 512, "image_size": 112},
     "preprocessing": {"channels": "RGB", "mean": 127.5, "scale": 127.5, "layout": "NCHW"},
     "config": {…}, "step": 2000,                         the settings and the last step of the run, in files of a run
     "trained_on": ["/data/ms1mv3"],                      paths of all data that it was trained on, also before the run
     "code": "9f86…"}                                     SHA-256 of the source file of a network of one's own
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from facetrain.checkpoint.commit import CHECKPOINTS, complete_steps
from facetrain.checkpoint.tensor_file import write_tensors
from facetrain.errors import RunError
from facetrain.files import new_file, parse_json
from facetrain.models.checksum import CHECKSUM_KEY, checksum_of
from facetrain.models.preprocessing import PREPROCESSING, PREPROCESSING_KEY
from facetrain.models.weight_files import METADATA_KEY

MODEL_FILE = "model.safetensors"
"""Name of the model file that a run writes at its end."""
_CVLFACE_FILE = Path("pretrained_model", "model.pt")
"""Weights in a folder that CVLface publishes."""
SOURCES_KEY = "average_of"
"""Key of the description: the averaged models and their weights."""
CONFIG_KEY = "config"
"""Key of the description: the config of the run."""
TRAINED_ON_KEY = "trained_on"
"""Key of the description: the paths of the training data, also of the models from which this one comes."""
CARDS_KEY = "datasets"
"""Key of the description: the cards of the same data."""
STEP_KEY = "step"
"""Key of the description: number of training steps of the weights in a file of a run."""
ORIGIN_KEY = "origin"
"""Key of the description: `ConvertedWeights.program` of weights of another program."""
CODE_KEY = "code"
"""Key of the description: SHA-256 of the source file of a network of one's own (MODULE:NAME), as it was trained."""
THRESHOLDS_KEY = "thresholds"
"""Key of the description: what `facetrain calibrate` measured on the embeddings of this file."""


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


def training_data(*descriptions: Mapping[str, Any]) -> list[str]:
    """Return the known paths of the data on which models were trained, each once."""
    lists = [description.get(TRAINED_ON_KEY) for description in descriptions]
    paths = [path for one in lists if isinstance(one, list) for path in one]
    return list(dict.fromkeys(path for path in paths if isinstance(path, str)))


def public_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an exported file has of a description: nothing that names folders of the user's machine."""
    private = CONFIG_KEY, SOURCES_KEY, TRAINED_ON_KEY
    return {name: value for name, value in description.items() if name not in private}


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
