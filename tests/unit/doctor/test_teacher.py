"""Checks of a teacher: colors, cache and embedding size, with a network that reads one color."""

import cv2
import numpy as np
import pytest
import torch

from facetrain.config.loading import build_config
from facetrain.data.images.augment import normalize
from facetrain.data.open_dataset import open_dataset
from facetrain.doctor import teacher as checks
from facetrain.errors import DataError
from facetrain.models.model_file import EmbeddingModel
from facetrain.run.folder.data_digests import digest_labels
from facetrain.run.parts import teacher_embeddings
from facetrain.training.teacher_cache import new_cache

SIDE = 16


class RedOnly(torch.nn.Module):
    """Network whose embedding is the red channel on a coarse grid."""

    def forward(self, image_BCHW):
        return torch.nn.functional.avg_pool2d(image_BCHW[:, 0], 4).flatten(1) + 1e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twelve identities, whose red channels differ and whose blue ones are noise."""
    folder = tmp_path_factory.mktemp("colors")
    random = np.random.default_rng(0)
    for identity in range(12):
        (folder / f"{identity:02}").mkdir()
        red = np.kron(random.integers(0, 256, (4, 4)), np.ones((4, 4)))
        for number in range(2):
            noise = np.kron(random.integers(0, 256, (2, 4, 4)), np.ones((1, 4, 4)))
            image = np.stack([noise[0], noise[1], red], axis=2).astype(np.uint8)  # OpenCV's order: BGR
            cv2.imwrite(str(folder / f"{identity:02}" / f"{number}.png"), image)
    return folder


def config(data, **distill):
    model = {"backbone": "mbf_small", "embedding_size": distill.pop("size", 16)}
    distill = {"teacher": "t.onnx"} | distill
    described = {"train": str(data), "augment": {"flip": 0.0}}
    return build_config({"data": described, "model": model, "distill": distill}, "test")


def use(monkeypatch, prepare=normalize):
    model = EmbeddingModel(RedOnly(), SIDE, 0, prepare, "a network")
    for module in (checks, teacher_embeddings):
        monkeypatch.setattr(module, "open_model", lambda path, device: model)
        if module is teacher_embeddings:
            monkeypatch.setattr(module, "digest_model", lambda model, path: "digest")


def blue_first(image_BHWC):
    return normalize(image_BHWC.flip(3))


def test_the_order_of_colors_is_judged_by_the_images(data, monkeypatch):
    source = open_dataset(data)
    use(monkeypatch)
    opened, colors = checks.check_teacher(config(data), source)
    assert "embeddings of 16 elements, as the network" in opened.message and colors.status == "ok"
    use(monkeypatch, blue_first)
    opened, colors = checks.check_teacher(config(data, size=8), source)
    assert "a learned projection maps the network's 8 to them" in opened.message
    assert (colors.check, colors.status, colors.certainty) == ("teacher colors", "warning", "likely")
    assert [result.check for result in checks.check_teacher(config(data), None)] == ["teacher"]


@pytest.mark.parametrize("digest", [None, "other"])
def test_a_cache_must_be_of_the_dataset_and_the_teacher(data, tmp_path, monkeypatch, digest):
    use(monkeypatch)
    source, path = open_dataset(data), tmp_path / "cache.safetensors"
    shape = (source.num_images, 1, 16)
    with new_cache(path, shape, dataset=digest or digest_labels(source), teacher="digest"):
        pass
    check = checks.check_teacher(config(data, cache=str(path)), source)
    if digest:
        with pytest.raises(DataError, match="written for another dataset"):
            list(check)
    else:
        assert [one.check for one in check] == ["teacher", "teacher cache", "teacher colors"]
