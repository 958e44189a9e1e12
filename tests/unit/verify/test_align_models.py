"""Measurement of a map between two models."""

import shutil

import numpy as np
import pytest

from facetrain.embeddings.inference import Inference
from facetrain.embeddings.normalization import l2_normalize
from facetrain.errors import DataError
from facetrain.verify.align_models import _accuracy, align_models
from tests.support.faces import face


def test_two_images_are_compared_once_by_one_model_and_twice_by_two():
    random = np.random.default_rng(0)
    label_N = np.repeat(np.arange(60), 2)
    old_ND, new_ND = (l2_normalize(random.normal(size=(120, 8))) for _ in range(2))
    # 120 · 118 / 2 = 7,080 impostor pairs: too few for 1e-4, of which two models make 14,160 comparisons.
    assert _accuracy(old_ND, old_ND, label_N)["tar@1e-04"] is None
    assert _accuracy(old_ND, new_ND, label_N)["tar@1e-04"] is not None


def test_a_copy_of_an_image_is_not_compared(model, tmp_path):
    for person in range(20):
        folder = tmp_path / "people" / f"{person:02d}"
        folder.mkdir(parents=True)
        for image in range(4):
            (folder / f"{image}.png").write_bytes(face(person, image, size=32))
    plain = align_models(model, model, tmp_path / "people", inference=Inference("cpu"))
    for folder in (tmp_path / "people").iterdir():
        shutil.copy(folder / "0.png", folder / "copy.png")
    copied = align_models(model, model, tmp_path / "people", inference=Inference("cpu"))
    assert copied.images == plain.images + 20
    assert plain.accuracy["old × old"]["tar@1e-02"] is not None
    assert copied.accuracy["old × old"] == plain.accuracy["old × old"]


def test_people_who_cannot_be_used_are_reported_before_a_model_is_opened(tmp_path):
    (tmp_path / "people" / "one").mkdir(parents=True)
    (tmp_path / "people" / "one" / "0.png").write_bytes(face(0, 0, size=32))
    missing = tmp_path / "missing.safetensors"
    for folder, message in (
        ("people/one", "has no labels"),
        ("people", "has 1 person; a map needs at least 8"),
    ):
        with pytest.raises(DataError, match=message):
            align_models(missing, missing, tmp_path / folder)
