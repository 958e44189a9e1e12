"""Comparison of a model with its fine-tuned version: the better one is kept."""

import shutil

import pytest
import torch
from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.cli.progress import progress_bar
from facetrain.config.loading import build_config
from facetrain.finetune.all_photos import config_for_all_photos, judge_on_others, needs_all_photos
from facetrain.finetune.held_out import write_held_out_pairs
from facetrain.finetune.judge import describe, forgotten_on, judge, order_shares
from facetrain.finetune.prepare import Prepared, Workplace, backbone_of
from facetrain.models.model_file import MODEL_FILE, open_model
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.verify.metrics.result import Result
from tests.support.faces import face
from tests.support.models import SMALL, write_model


def result(accuracy, auc=0.9):
    return Result("verification", {"accuracy": accuracy, "auc": auc})


@pytest.mark.parametrize(
    ("results", "order"),
    [
        ({0.0: result(0.9), 0.5: result(0.8), 1.0: result(0.7)}, [0]),
        ({0.0: result(0.9), 0.5: result(0.9), 1.0: result(0.9)}, [0]),
        ({0.0: result(0.7), 0.5: result(0.9), 1.0: result(0.8)}, [0.5, 1, 0]),
        ({0.0: result(0.9), 0.5: result(0.9, 0.95), 1.0: result(0.9, 0.95)}, [0.5, 1, 0]),
    ],
)
def test_only_what_is_better_than_the_first_model_is_tried_the_best_first(results, order):
    assert order_shares(results) == order


def test_an_average_may_lose_two_tenths_of_a_point_on_other_people():
    before = {"lfw": result(0.995), "cfp": result(0.9)}
    assert forgotten_on(before, {"lfw": result(0.9931), "cfp": result(0.95)}) == ""
    assert "lfw falls from 99.50% to 99.20%" in forgotten_on(
        before, {"lfw": result(0.992), "cfp": result(0.95)}
    )
    assert forgotten_on({}, {"lfw": result(0.1)}) == ""


@pytest.fixture
def prepared(tmp_path):
    """Held-out images of ten people, and no model yet."""
    place = Workplace(tmp_path)
    for person in range(10):
        folder = place.held_out / f"p{person}"
        folder.mkdir(parents=True)
        for number in range(5):
            (folder / f"{number}.png").write_bytes(face(person, number, size=32))
    write_held_out_pairs(place.held_out, place.pairs)
    place.run.mkdir()
    config = build_config({"data": {"train": "unused"}, "train": {"device": "cpu"}}, "test")
    return Prepared(place, tmp_path / "first.safetensors", (str(place.pairs),), [], config)


def plant(path, *, blind):
    """Write a network with random weights; a blind one gives every image the same embedding."""
    torch.manual_seed(0)
    network = build_backbone("iresnet", **SMALL)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():  # statistics with which the embeddings of different colors differ
        network(torch.rand(64, 3, 1, 1).expand(-1, -1, 32, 32) * 2 - 1)
        if blind:
            network.features.weight.zero_()
            # Not zero, which is no direction, but too small to turn the embeddings of an average.
            network.features.bias.fill_(1e-6)
    write_model(path, network=network)


@pytest.mark.parametrize("is_better", [True, False])
def test_the_better_of_two_planted_models_is_kept(prepared, is_better, capsys):
    plant(prepared.model, blind=is_better)
    plant(prepared.place.run / MODEL_FILE, blind=not is_better)
    # The other set may not have the name of the held-out images.
    shutil.copy(prepared.place.pairs, prepared.place.folder / "others.bin")
    prepared = Prepared(**vars(prepared) | {"targets": (str(prepared.place.folder / "others.bin"),)})
    said = []
    verdict = judge(prepared, say=said.append, bar=progress_bar)
    difference = verdict.compared.differences["held_out"]["accuracy"]
    assert (verdict.share > 0) == is_better
    assert difference.first - difference.second >= (0.2 if is_better else 0)
    assert verdict.compared.differences["others"]["accuracy"].first == difference.first
    kept = open_model(prepared.place.model, torch.device("cpu"))
    assert bool(kept.network.features.weight.any()), "the blind network was kept"
    assert kept.metadata["thresholds"] or verdict.refused
    kept_line, held_out_line, others_line, *_ = describe(verdict, prepared)
    assert kept_line.startswith("kept: the average" if is_better else "kept: the first")
    assert ("optimistic" in held_out_line) == is_better and "optimistic" not in others_line


def test_the_second_training_takes_all_photos_and_as_many_steps_as_the_first(prepared):
    plant(prepared.model, blind=False)
    place = prepared.place
    for person in range(10):
        for part, numbers in ((place.train, range(5, 8)), (place.faces, range(8))):
            (part / f"p{person}").mkdir(parents=True)
            for number in numbers:
                (part / f"p{person}" / f"{number}.png").write_bytes(face(person, number, size=32))
    values = {
        "run": {"name": "run"},
        "data": {"train": str(place.train)},
        "distill": {"teacher": str(prepared.model), "cache": "train", "loss": "fixed_centers"},
        "train": {"global_batch_size": 8, "epochs": 5},
        "eval": {"targets": [str(place.pairs)]},
    }
    prepared = Prepared(**vars(prepared) | {"config": build_config(values, "test")})
    config = config_for_all_photos(prepared, bar=progress_bar)
    # 30 and 80 images: 3 and 10 steps per epoch.
    assert schedule_steps(prepared.config, 30, 1).total_steps == 15
    assert schedule_steps(config, 80, 1).total_steps == 15
    assert config.data.train == str(place.faces) and not config.eval.targets
    assert config.run.name != "run" and config.distill.cache != "train"
    assert config.optim == prepared.config.optim


@pytest.mark.parametrize("forgets", [False, True])
def test_the_second_training_is_kept_unless_it_forgets_other_people(prepared, forgets):
    plant(prepared.model, blind=True)
    plant(prepared.place.run / MODEL_FILE, blind=False)
    shutil.copy(prepared.place.pairs, prepared.place.folder / "others.bin")
    prepared = Prepared(**vars(prepared) | {"targets": (str(prepared.place.folder / "others.bin"),)})
    shutil.copytree(prepared.place.held_out, prepared.place.train)
    first = judge(prepared, say=print, bar=progress_bar)
    assert needs_all_photos(prepared, first)
    if forgets:  # the accuracy of the first model is the limit, and blind networks have the least
        better = {"others": first.compared.results["others"]}
        first.compared.other_results.update(better)
    thresholds = open_model(prepared.place.model, torch.device("cpu")).metadata["thresholds"]
    prepared.place.run_on_all.mkdir()
    plant(prepared.place.run_on_all / MODEL_FILE, blind=forgets)
    said = []
    verdict = judge_on_others(prepared, first, say=said.append, bar=progress_bar)
    kept = open_model(prepared.place.model, torch.device("cpu"))
    assert kept.metadata["thresholds"] == thresholds
    (source, _), lines = kept.metadata["average_of"], describe(verdict, prepared)
    assert source["model"] == str(prepared.place.run if forgets else prepared.place.run_on_all)
    assert bool(said) == forgets == (not verdict.is_on_all)
    assert ("trained again on all photos" in lines[1]) == (not forgets)


def test_the_network_of_a_model_file_is_found(tmp_path):
    plant(tmp_path / "m.safetensors", blind=False)
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in SMALL.items()}
    assert backbone_of(tmp_path / "m.safetensors") == {"name": "iresnet", **options}
