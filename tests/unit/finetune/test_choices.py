"""Choices of a fine-tuning by people, images and machine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

from facetrain.config.loading import load_config, plain_config
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import ConfigError
from facetrain.finetune.choices import Facts, choose, config_text
from facetrain.finetune.prepare import _facts
from facetrain.finetune.workplace import Workplace
from tests.support.datasets import write_records

FACTS = Facts(
    model="y1.pt",
    backbone={"name": "mbf_small", "embedding_size": 128, "image_size": 112},
    train="out/data/train",
    people=20,
    images=140,
    held_out="out/held_out.bin",
    teacher_cache="out/embeddings.safetensors",
    has_gpu=False,
)


def values_of(**facts):
    return {key: value for choice in choose(replace(FACTS, **facts)) for key, value in choice.values.items()}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {"train.global_batch_size": 32, "train.epochs": 32, "optim.lr": 1e-3}),
        # An epoch of so few images is a single step.
        ({"images": 60}, {"train.global_batch_size": 32, "train.epochs": 128}),
        ({"images": 20}, {"train.global_batch_size": 20, "train.epochs": 128}),
        ({"people": 100, "images": 1400}, {"train.global_batch_size": 32, "train.epochs": 3}),
        ({"people": 9000, "images": 90_000}, {"train.global_batch_size": 128, "train.epochs": 2}),
        ({"has_gpu": False}, {"train.precision": "fp32"}),
    ],
)
def test_people_images_and_machine_choose_the_settings(facts, expected):
    found = values_of(**facts)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ([], {}),
        (["model.options.drop_path_rate=0.1"], {"drop_path_rate": 0.1}),
        (["model.options={patch_size: 16, depth: 6}"], {"patch_size": 16, "depth": 6}),
        (["model.options.norm.eps=0.1"], {"norm": {"bias": False, "eps": 0.1}}),
    ],
)
def test_the_options_of_an_own_network_are_options_of_the_model_beside_those_of_the_user(overrides, more):
    options = {"patch_size": 8, "norm": {"bias": False}}
    own = {"name": "timm/vit_tiny_patch16_224", "embedding_size": 8, "image_size": 112, "own": options}
    choices = choose(replace(FACTS, backbone=own), overrides)
    config = config_text(choices, overrides, name="a", folder="b")[1]
    assert config.model.options == options | more


def test_a_gpu_keeps_the_default_precision():
    assert "train.precision" not in values_of(has_gpu=True)


@pytest.mark.parametrize(("device", "has_gpu"), [("auto", True), ("cpu", False)])
def test_a_device_that_the_user_gives_decides_whether_there_is_a_gpu(device, has_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    place = Workplace(tmp_path)
    write_records(place.train, [0, 0, 1, 1], size=16)
    request = SimpleNamespace(address=None, model=None, overrides=[f"train.device={device}"])
    assert _facts(request, tmp_path, {}, place, open_dataset(place.train)).has_gpu is has_gpu


def test_the_choices_are_an_ordinary_config_with_the_reason_of_each_and_the_overrides_of_the_user(tmp_path):
    choices, overrides = choose(FACTS, ["optim.lr=0.5"]), ["optim.lr=0.5"]
    text, config = config_text(choices, overrides, "run", str(tmp_path))
    path = tmp_path / "finetune.yaml"
    path.write_text(text)
    assert plain_config(load_config(path)) == plain_config(config)
    assert yaml.safe_load(text)["optim"]["lr"] == 0.5
    for choice in choices:
        assert f"{', '.join(choice.values)}: {choice.reason}" in text
    with pytest.raises(ConfigError, match=r"optim\.rate"):
        config_text(choose(FACTS), ["optim.rate=1"], "run", str(tmp_path))


@pytest.mark.parametrize(
    ("override", "left"),
    [
        ("train.precision=bf16", []),
        ("train.epochs=3", ["train.global_batch_size: 32"]),
        ("data.augment.flip=0", ["data.augment.color: 0.2, data.augment.crop: 0.2"]),
        ("data.augment={color: 0, crop: 0}", ["data.augment.flip: 0.5"]),
    ],
)
def test_a_setting_of_the_user_is_not_said_to_be_chosen(override, left):
    key = override.partition("=")[0]
    found, plain = choose(FACTS, [override]), choose(FACTS)
    changed = [choice for choice in found if choice not in plain]
    assert [choice.settings for choice in changed] == left and len(found) == len(plain) - 1 + len(left)
    assert all(choice.reason.startswith(f"as without --set {key}") for choice in changed)
    assert config_text(found, [override], "a", "b")[1] == config_text(plain, [override], "a", "b")[1]


def test_a_batch_per_rank_takes_the_place_of_the_chosen_batch_of_all_ranks():
    override = "train.batch_size=16"
    choices = choose(FACTS, [override])
    (epochs,) = (choice for choice in choices if "train.epochs" in choice.values)
    assert epochs == ({"train.epochs": 32}, f"as without --set {override.partition('=')[0]}")
    train = config_text(choices, [override], "a", "b")[1].train
    assert (train.batch_size, train.global_batch_size, train.epochs) == (16, None, 32)
