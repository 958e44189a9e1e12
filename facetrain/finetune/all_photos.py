"""Second training of a fine-tuning, on all photos, with the settings and the share of the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from facetrain.config.loading import build_config, override_values, plain_config
from facetrain.config.schema import Config
from facetrain.data.open_dataset import open_dataset
from facetrain.embeddings.inference import Inference
from facetrain.finetune.choices import FEW_IMAGES
from facetrain.finetune.judge import Verdict, forgotten_on, write_candidate
from facetrain.finetune.prepare import Bar, Prepared
from facetrain.models.model_file import THRESHOLDS_KEY, read_model, save_model
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.run.parts.teacher_embeddings import write_teacher_embeddings
from facetrain.verify.evaluate import evaluate


def needs_all_photos(prepared: Prepared, verdict: Verdict) -> bool:
    """Return whether the held-out images are worth a second training: not if there are many others, or none helps."""
    return verdict.share > 0 and open_dataset(prepared.place.train).num_images < FEW_IMAGES


def config_for_all_photos(prepared: Prepared, *, bar: Bar) -> Config:
    """Return the config of the second training: the first one on all photos, with as many steps.

    The first model's embeddings of all photos are written, if they do not exist.

    Raises:
        ModelError: the first model cannot be opened.
        DataError: the faces cannot be read, or the embeddings cannot be written.
    """
    place = prepared.place
    cache = place.folder / "all_embeddings.safetensors"
    if not cache.exists():
        with bar("embedding") as progress:
            write_teacher_embeddings(prepared.model, place.faces, cache, progress=progress)
    first = schedule_steps(prepared.config, open_dataset(place.train).num_images, world_size=1)
    changes = {
        "run.name": place.run_on_all.name,
        "data.train": str(place.faces),
        "distill.cache": str(cache),
        "train.max_steps": first.total_steps,
        "eval.targets": [],  # it learns the held-out images, too, so that they show nothing
    }
    return build_config(override_values(plain_config(prepared.config), changes), "facetrain finetune")


def judge_on_others(prepared: Prepared, verdict: Verdict, *, say: Callable[[str], None], bar: Bar) -> Verdict:
    """Average the model of the second training with the first model, and keep it unless it forgets other people.

    The comparison on the held-out images and the thresholds remain those of the first training, which did not see
    these images.

    Raises:
        ModelError: a model cannot be opened, or an embedding is not finite.
        RunError: a file cannot be written.
    """
    place = prepared.place
    average = place.run_on_all / "average.safetensors"
    write_candidate(prepared, place.run_on_all, verdict.share, average)
    results = {}
    if prepared.targets:
        inference = Inference(prepared.config.train.device)
        with bar("other people") as progress:
            evaluated = evaluate(
                average, list(prepared.targets), Path(), inference=inference, progress=progress
            )
        results = evaluated.results
        before = {name: verdict.compared.other_results[name] for name in results}
        if forgotten := forgotten_on(before, results):
            say(f"the training on all photos is left out: {forgotten}")
            return verdict
    weights, description, _ = read_model(average)
    thresholds = {THRESHOLDS_KEY: [asdict(threshold) for threshold in verdict.thresholds]}
    save_model(place.model, weights, description | thresholds)
    compared = verdict.compared
    compared = replace(compared, results=compared.results | results).compared_with(
        compared.against, compared.other_results
    )
    return replace(verdict, compared=compared, is_on_all=True)
