"""Files that a run writes at its end: the model, the skipped images, the report of a divergence."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from torch import Tensor

from facetrain.backbone.low_rank import merge_adapters
from facetrain.data.dataset_card import read_copied_cards
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.errors import DivergedError
from facetrain.files import error_reason, write_atomically
from facetrain.models.model_file import (
    CARDS_KEY,
    CODE_KEY,
    MODEL_FILE,
    STEP_KEY,
    TRAINED_ON_KEY,
    save_model,
    training_data,
)
from facetrain.run.build import Parts
from facetrain.run.folder.run_files import CARDS_FILE, DIVERGED_FILE, SKIPPED_FILE
from facetrain.run.parts.backbone import describe_model
from facetrain.run.summary import Ending, more_steps, print_lines, summarize
from facetrain.telemetry.log import warn


def model_metadata(parts: Parts) -> dict[str, Any]:
    """Return the metadata of a model file: network and its code, config, paths and cards of all training data."""
    code = parts.plan.inputs.get("code model.backbone")
    data = {
        TRAINED_ON_KEY: training_data(parts.state.earlier, {TRAINED_ON_KEY: [parts.config.data.train]}),
        CARDS_KEY: read_copied_cards(parts.folder / CARDS_FILE),
    }
    return describe_model(parts.config) | data | ({CODE_KEY: code} if code else {})


def write_skipped_images(parts: Parts, loader: StagedLoader) -> list[str]:
    """Write the list of images that any rank could not read, and return it. Collective."""
    parts.state.add_skipped_images(loader.skipped)
    skipped = sorted(parts.state.skipped_images)
    if skipped and parts.is_leader:
        path = parts.folder / SKIPPED_FILE
        try:
            write_atomically(path, "\n".join(skipped) + "\n")
        except OSError as error:  # it must not hide how the run ended
            warn(f"{path}: {error_reason(error)}; the images that were skipped are not listed")
    return skipped


def write_divergence(parts: Parts, error: DivergedError) -> None:
    """Write the last step of a run that has diverged to diverged.json. For the leader only."""
    with suppress(OSError):  # a full disk must not hide the reason why the run ended
        write_atomically(parts.folder / DIVERGED_FILE, json.dumps(error.report) + "\n")


def write_results(parts: Parts, weights: dict[str, Tensor], skipped: list[str], *, has_learned: bool) -> None:
    """Write the model file, and print the summary. For the leader only.

    `has_learned` is false if the check of the first steps has found that the run does not learn.
    """
    path, metadata = parts.folder / MODEL_FILE, model_metadata(parts)
    # Adapters are added to the weights, so that the file opens as any other of this network.
    save_model(path, merge_adapters(weights, str(path)), metadata | {STEP_KEY: parts.state.step})
    ending = Ending(
        more_steps(
            parts.schedule, parts.state.step, parts.early_stop, max_steps=parts.config.train.max_steps
        ),
        parts.plan.request.is_part,
        parts.early_end,
        skipped,
        has_learned=has_learned,
        seconds=time.perf_counter() - parts.began_at,
    )
    print_lines(summarize(parts.folder, parts.config, ending))
