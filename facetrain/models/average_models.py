"""Weighted averages of models of one network."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from facetrain.backbone.base import DEFAULT_IMAGE_SIZE, Backbone
from facetrain.backbone.zoo import build_backbone
from facetrain.data.dataset_card import united_cards
from facetrain.errors import ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import (
    CARDS_KEY,
    SOURCES_KEY,
    STEP_KEY,
    THRESHOLDS_KEY,
    TRAINED_ON_KEY,
    save_model,
    training_data,
)
from facetrain.models.preprocessing import PREPROCESSING, PREPROCESSING_KEY, require_trainable_input

_MEASURED_KEYS = THRESHOLDS_KEY, STEP_KEY
"""Keys of what holds for one set of weights only."""


def average_models(models: Sequence[Path], weights: Sequence[float], output: Path) -> dict[str, Any]:
    """Write the weighted average of the parameters and batch norm statistics of models; return its description.

    The average of a model and of its fine-tuned version keeps much of both (WiSE-FT: Wortsman et al., CVPR 2022, arXiv
    2109.01903), and the average of several fine-tuned versions is often better than each (model soups: ICML 2022, arXiv
    2203.05482). Models that were trained from different random weights have no useful average.

    Args:
        models: the first is a run, a checkpoint or a file of a facetrain backbone, whose description is taken over; the
            others are files that `initialize_backbone` loads into that network. The cards of the data are those of all.
        weights: a number per model, at least 0; they are divided by their sum.
        output: .safetensors file.

    Raises:
        ModelError: a model cannot be read, has another network or input, or has weights that are not finite or 0
            throughout; or the shares are not one per model with a finite sum above 0.
        RunError: the file cannot be written.
    """
    if len(weights) != len(models) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise ModelError(
            f"{len(models)} models cannot be averaged with the weights {list(weights)}; give one finite number of "
            "at least 0 for each model, not all of them 0"
        )
    states, descriptions = _read_states(models)
    shares = [weight / sum(weights) for weight in weights]
    description = {key: value for key, value in descriptions[0].items() if key not in _MEASURED_KEYS}
    description[CARDS_KEY] = united_cards(*(each.get(CARDS_KEY) for each in descriptions))
    description[TRAINED_ON_KEY] = training_data(*descriptions)
    description[SOURCES_KEY] = [
        # Absolute, as in a config: a relative path names another model from another folder.
        {"model": os.path.abspath(path), "weight": share}
        for path, share in zip(models, shares, strict=True)
    ]
    # One tensor after the other: the sums in float64 are never all in memory.
    average = {name: _average([state[name] for state in states], shares) for name in states[0]}
    save_model(output, average, description)
    return description


def _read_states(models: Sequence[Path]) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """Return the weights of models of one network, and their descriptions.

    Raises:
        ModelError: a model cannot be read or has another network, or the first is not a backbone of facetrain.
    """
    # The first model describes the network; files of other programs cannot.
    first = open_model(models[0], torch.device("cpu"))
    if not isinstance(first.network, Backbone):
        raise ModelError(
            f"{models[0]}: is not a backbone of facetrain; begin with a run or a .safetensors file, and give this file "
            "after it"
        )
    require_trainable_input(first.metadata, str(models[0]))
    read = [(first.network.state_dict(), first.metadata)]
    read += [_read_other(path, first.metadata["backbone"]) for path in models[1:]]
    for path, (state, _) in zip(models, read, strict=True):
        _require_trained(state, path)
    return [state for state, _ in read], [description for _, description in read]


def _read_other(path: Path, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a model after the first one, as of its network, and its description.

    Raises:
        ModelError: it lacks weights; or it is for other images: its weights may fit, and their average is useless.
    """

    def refuse() -> Tensor:
        raise ModelError(
            f"{path}: has no batch norm statistics, because they are merged into other layers; give the file from "
            "which it was exported"
        )

    network = build_backbone(**options)
    drawn = {
        name: value.clone()
        for name, value in network.named_parameters()
        if name.startswith(network.new_layers)
    }
    description = initialize_backbone(network, path, refuse)
    size, expected = (
        each.get("image_size", DEFAULT_IMAGE_SIZE) for each in (description.get("backbone", options), options)
    )
    preprocessing = description.get(PREPROCESSING_KEY, PREPROCESSING)
    if size != expected or preprocessing != PREPROCESSING:
        raise ModelError(
            f"{path}: takes images of {size} pixels with {preprocessing}, and the first model images of {expected} "
            f"pixels with {PREPROCESSING}; only models with the same input have an average"
        )
    state = network.state_dict()
    for name, value in drawn.items():
        if value.any() and torch.equal(state[name], value):
            raise ModelError(
                f"{path}: has no layer {name} for embeddings of {network.embedding_size} numbers, as published weights "
                "of timm; average checkpoints or models of runs"
            )
    return state, description


def _require_trained(state: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights that would spoil the average in silence."""
    for name, weight in state.items():
        if not weight.isfinite().all():
            raise ModelError(f"{path}: {name} has numbers that are not finite; give an earlier checkpoint")
        if weight.dim() > 1 and not weight.any():
            raise ModelError(
                f"{path}: {name} is 0 throughout: the model is not trained, or the file is damaged"
            )


def _average(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the weighted average, computed in float64; counters are taken from the first model."""
    first = tensors[0]
    if not first.is_floating_point():
        return first
    total = torch.zeros(first.shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total += share * tensor.double()
    return total.to(first.dtype)
