"""Choices of a fine-tuning by people, images, detail of the faces and machine."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import yaml

from facetrain.config.loading import load_config, plain_config
from facetrain.errors import ConfigError
from facetrain.finetune.choices import Facts, choose, config_text
from facetrain.finetune.face_detail import face_detail

FACTS = Facts(
    model="y1.pt",
    backbone={"name": "mbf_small", "embedding_size": 128, "image_size": 112},
    train="out/data/train",
    people=20,
    images=140,
    detail=20,
    held_out="out/held_out.bin",
    teacher_cache="out/embeddings.safetensors",
    has_gpu=False,
)


def values_of(**facts):
    return {key: value for choice in choose(replace(FACTS, **facts)) for key, value in choice.values.items()}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {"train.global_batch_size": 32, "train.epochs": 32, "optim.lr": 1.5e-3}),
        ({"detail": 112}, {"train.global_batch_size": 32, "train.epochs": 32, "optim.lr": 1e-3}),
        # An epoch of so few images is a single step.
        ({"images": 60}, {"train.global_batch_size": 32, "train.epochs": 128}),
        ({"images": 20}, {"train.global_batch_size": 20, "train.epochs": 128}),
        ({"people": 100, "images": 1400}, {"train.global_batch_size": 32, "train.epochs": 3}),
        ({"people": 9000, "images": 90_000}, {"train.global_batch_size": 128, "train.epochs": 2}),
        ({"has_gpu": False}, {"train.precision": "fp32"}),
    ],
)
def test_people_images_detail_and_machine_choose_the_settings(facts, expected):
    found = values_of(**facts)
    assert {key: found[key] for key in expected} == expected


def test_a_gpu_keeps_the_default_precision():
    assert "train.precision" not in values_of(has_gpu=True)


def test_the_choices_are_an_ordinary_config_with_the_reason_of_each_and_the_overrides_of_the_user(tmp_path):
    text, config = config_text(choose(FACTS), ["optim.lr=0.5"], "run", str(tmp_path))
    path = tmp_path / "finetune.yaml"
    path.write_text(text)
    assert plain_config(load_config(path)) == plain_config(config)
    assert yaml.safe_load(text)["optim"]["lr"] == 0.5
    for choice in choose(FACTS):
        assert f"{', '.join(choice.values)}: {choice.reason}" in text
    with pytest.raises(ConfigError, match=r"and the command line.*optim\.rate"):
        config_text(choose(FACTS), ["optim.rate=1"], "run", str(tmp_path))


@pytest.mark.parametrize("pixels", [16, 20, 24, 32, 112])
def test_the_detail_of_enlarged_images_is_the_size_that_they_had(pixels):
    """Noise whose spectrum falls about like that of photos."""
    rng = np.random.default_rng(pixels)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(112), np.fft.fftfreq(112))) ** 1.5
    frequency[0, 0] = 1
    images = []
    for _ in range(9):
        noise = np.fft.ifft2(np.fft.fft2(rng.normal(size=(112, 112))) / frequency).real
        sharp = ((noise - noise.min()) / np.ptp(noise) * 255).astype(np.uint8)
        small = cv2.resize(sharp, (pixels, pixels), interpolation=cv2.INTER_AREA)
        images.append(cv2.cvtColor(cv2.resize(small, (112, 112)), cv2.COLOR_GRAY2RGB))
    assert 0.75 * pixels <= face_detail(images) <= 1.35 * pixels
