"""Verdict on a fine-tuned model: it replaces the first model only if it gains and other people do not suffer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.cli.progress_bar import progress_bar
from facetrain.config.loading import build_config
from facetrain.data.formats.bin import write_bin
from facetrain.finetune import judge as judge_module
from facetrain.finetune import other_people
from facetrain.finetune.first_model import backbone_of
from facetrain.finetune.held_out import write_photo_pairs
from facetrain.finetune.judge import SHARES, describe, headline, judge
from facetrain.finetune.other_people import Harm, OtherPeople
from facetrain.finetune.prepare import Prepared
from facetrain.finetune.workplace import Workplace
from facetrain.models.embedding_model import open_model
from facetrain.models.model_file import MODEL_FILE
from facetrain.verify.metrics.result import Result
from facetrain.verify.model_comparison import Difference
from tests.support.faces import face
from tests.support.models import SMALL, write_model


def results(accuracy, pairs):
    return {"lfw": Result("verification", {"accuracy": accuracy, "pairs": pairs})}


def harm(cosine, before, after, pairs=6000):
    return list(Harm(cosine, results(before, pairs), results(after, pairs)).reasons())


def test_other_people_suffer_if_their_embeddings_move_or_an_accuracy_falls_by_more_than_two_tenths_of_a_point():
    assert harm(0.99, 0.995, 0.9931) == []
    (moved,) = harm(0.9, 0.995, 0.995)
    assert "strangers" in moved and "0.900" in moved
    (fallen,) = harm(0.99, 0.995, 0.992)
    assert "lfw falls from 99.50% to 99.20%" in fallen
    # One of 200 pairs shows nothing, two do.
    assert harm(0.99, 0.95, 0.945, pairs=200) == [] and len(harm(0.99, 0.95, 0.94, pairs=200)) == 1


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Held-out images of ten people, four people set aside, and no model yet."""
    monkeypatch.setattr(other_people, "_DRAWN", 8)
    place = Workplace(tmp_path)
    for folder, people in ((place.held_out, range(10)), (place.set_aside, range(10, 14))):
        for person in people:
            (folder / f"p{person}").mkdir(parents=True)
            for number in range(5):
                (folder / f"p{person}" / f"{number}.png").write_bytes(face(person, number, size=32))
    write_photo_pairs(place.held_out, place.pairs)
    write_photo_pairs(place.set_aside, place.set_aside_pairs)
    place.run.mkdir()
    config = build_config({"data": {"train": "unused"}, "train": {"device": "cpu"}}, "test")
    return Prepared(place, tmp_path / "first.safetensors", (), [], config, "")


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


def is_blind(path):
    return not open_model(path, torch.device("cpu")).network.features.weight.any()


def allow_all_movement(monkeypatch):
    """Planted networks have nothing in common: all embeddings move."""
    monkeypatch.setattr(other_people, "LEAST_COSINE", -1)


@pytest.mark.slow
def test_a_model_that_gains_on_held_out_photos_is_kept(prepared, monkeypatch):
    allow_all_movement(monkeypatch)
    plant(prepared.model, blind=True)
    plant(prepared.place.run / MODEL_FILE, blind=False)
    verdict = judge(prepared, say=print, bar=progress_bar)
    assert verdict.share == 1 and list(verdict.tried) == [1]
    assert verdict.gain.interval[0] > 0 and verdict.gain.first >= verdict.gain.second + 0.2
    kept = open_model(prepared.place.model, torch.device("cpu"))
    assert not is_blind(prepared.place.model) and (kept.metadata["thresholds"] or verdict.refused)
    assert headline(verdict) == "kept: the fine-tuned model"


@pytest.mark.slow
def test_a_model_that_gains_but_moves_other_people_is_left_out(prepared, monkeypatch, capsys):
    draw, drawn = other_people.draw_jpeg, []
    monkeypatch.setattr(other_people, "draw_jpeg", lambda *which: drawn.append(which) or draw(*which))
    plant(prepared.model, blind=True)
    plant(prepared.place.run / MODEL_FILE, blind=False)
    images = [face(person, 0, size=32) for person in (20, 21)]
    target = prepared.place.folder / "strangers.bin"
    write_bin(target, images, [False])
    said = []
    verdict = judge(replace(prepared, targets=(str(target),)), say=said.append, bar=progress_bar)
    assert verdict.share == 0 and list(verdict.tried) == list(SHARES) and verdict.gain is None
    assert all(list(harm.after) == ["set_aside", "strangers"] for harm in verdict.tried.values())
    assert capsys.readouterr().err.count("strangers: all pairs are of one kind") == 1, "once"
    assert len(said) == len(SHARES) and "strangers" in said[0]
    assert len(drawn) == other_people._DRAWN, "once for all models"
    assert is_blind(prepared.place.model), "the first model, with all its weights"
    assert "other people suffer" in describe(verdict)[1]


@pytest.mark.slow
def test_a_model_that_loses_accuracy_on_people_set_aside_is_left_out(prepared, monkeypatch):
    allow_all_movement(monkeypatch)
    plant(prepared.model, blind=False)
    plant(prepared.place.run / MODEL_FILE, blind=True)
    said = []
    verdict = judge(prepared, say=said.append, bar=progress_bar)
    assert "set_aside falls from" in said[0]
    assert verdict.share == 0 and not is_blind(prepared.place.model)


@pytest.mark.slow
def test_a_gain_whose_interval_holds_0_keeps_the_first_model(prepared):
    for path in (prepared.model, prepared.place.run / MODEL_FILE):
        plant(path, blind=False)
    (prepared.place.faces / "p0").mkdir(parents=True)
    (prepared.place.faces / "p0" / "0.png").write_bytes(face(0, 0, size=32))
    verdict = judge(prepared, say=print, bar=progress_bar)
    assert verdict.share == 0 and verdict.gain.interval[0] <= 0 <= verdict.gain.interval[1]
    metadata = open_model(prepared.place.model, torch.device("cpu")).metadata
    assert metadata.keys() - {"thresholds"} == open_model(prepared.model, torch.device("cpu")).metadata.keys()
    kept, reason, *_ = describe(verdict)
    assert kept == "kept: the first model" and "no gain is certain" in reason


def test_a_first_model_that_has_seen_the_held_out_photos_is_kept_without_thresholds(prepared, monkeypatch):
    monkeypatch.setattr(judge_module, "OtherPeople", lambda *_: None)
    monkeypatch.setattr(judge_module, "_largest_harmless_share", lambda *_: (0.0, {}))
    write_model(prepared.model, trained_on=[str(prepared.place.held_out)])
    verdict = judge(prepared, say=print, bar=progress_bar)
    assert verdict.share == 0 and not verdict.thresholds
    assert f"16 of 16 examined images are in {prepared.place.held_out}" in describe(verdict)[-1]


@pytest.mark.parametrize("interrupted", ["OtherPeople.harm_of", "evaluate", "calibrate_model"])
def test_an_interrupted_verdict_leaves_the_model_of_the_last_one(prepared, monkeypatch, interrupted):
    def ctrl_c(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(OtherPeople, "__init__", lambda *_: None)
    monkeypatch.setattr(OtherPeople, "harm_of", lambda *_: Harm(1.0, {}, {}))
    monkeypatch.setattr(f"facetrain.finetune.judge.{interrupted}", ctrl_c)
    judged = SimpleNamespace(differences={"held_out": {"auc": Difference(0.9, 0.8, (0.05, 0.15), p=0.01)}})
    if interrupted == "calibrate_model":
        monkeypatch.setattr(judge_module, "evaluate", lambda *_, **__: judged)
    for path in (prepared.model, prepared.place.run / MODEL_FILE):
        write_model(path)
    prepared.place.model.write_text("the model of the last verdict")
    with pytest.raises(KeyboardInterrupt):
        judge(prepared, say=print, bar=progress_bar)
    assert prepared.place.model.read_text() == "the model of the last verdict"


def test_the_network_of_a_model_file_is_found(tmp_path):
    plant(tmp_path / "m.safetensors", blind=False)
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in SMALL.items()}
    assert backbone_of(tmp_path / "m.safetensors") == {"name": "iresnet", **options}
