"""Inputs that can be embedded, with the names and labels of their images."""

import gzip
import re
import shutil
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from facetrain.api.model import Model
from facetrain.data.formats.bin import write_bin
from facetrain.data.images.decode import encode_png
from facetrain.data.images.normalize import normalize
from facetrain.embeddings import embed_images as image_embeddings
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.embeddings import Embeddings
from facetrain.embeddings.image_inputs import read_input
from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError, ImageError, ModelError, RunError
from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.inference_network import inference_network
from tests.support.datasets import damage_records, encoded_image, write_records
from tests.support.faults import small_disk

CPU = torch.device("cpu")


def read(path):
    images, names, labels, _ = read_input(path)
    return list(images), list(names), np.asarray(labels).tolist()


def test_an_image_and_a_folder_of_images_have_file_names_and_no_labels(tmp_path):
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_bytes(encoded_image(ord(name[0])))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._a.png").write_bytes(b"attributes that macOS keeps beside an image")
    assert read(tmp_path / "b.png") == ([encoded_image(ord("b"))], ["b.png"], [-1])
    assert read(tmp_path) == (
        [encoded_image(ord("a")), encoded_image(ord("b"))],
        ["a.png", "b.png"],
        [-1, -1],
    )


@pytest.mark.parametrize("name", ["a.png", "x/a.png"])
def test_a_damaged_image_is_named_by_its_file(model, tmp_path, name):
    damaged = tmp_path / "images" / name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"damaged")
    with pytest.raises(ImageError, match=re.escape(f"{damaged}: ")):
        image_embeddings.embed_input(model, tmp_path / "images", Inference("cpu"))


def test_one_folder_per_person_gives_labels(tmp_path):
    for person, number in (("x", 1), ("x", 2), ("y", 3)):
        (tmp_path / person).mkdir(exist_ok=True)
        (tmp_path / person / f"{number}.png").write_bytes(encoded_image(number))
    images, names, labels = read(tmp_path)
    assert images == [encoded_image(n) for n in (1, 2, 3)] and labels == [0, 0, 1]
    assert [name.rpartition("/")[2] for name in names] == ["1.png", "2.png", "3.png"]


def write_identities(folder):
    for person in ("x", "y"):
        (folder / person).mkdir(parents=True)
        (folder / person / "1.png").write_bytes(encoded_image(ord(person)))


def write_shard(folder):
    write_identities(folder / "images")
    with tarfile.open(folder / "shard.tar", "w") as shard:
        shard.add(folder / "images", ".")
    shutil.rmtree(folder / "images")


@pytest.mark.parametrize(
    "write", [write_identities, write_shard, lambda folder: write_records(folder, [0, 1])]
)
def test_images_beside_a_dataset_do_not_hide_it(tmp_path, write, capsys):
    write(tmp_path)
    images, names, labels = read(tmp_path)
    for number in range(2):
        (tmp_path / f"0{number}.png").write_bytes(encoded_image(9))
    assert capsys.readouterr().err == ""
    assert read(tmp_path) == read(tmp_path) == (images, names, labels) and labels == [0, 1]
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}: read as a dataset; the images beside it (00.png) are not read; to embed such images, "
        "move them to another folder\n"
    )


def test_a_folder_of_images_may_have_one_subfolder_of_other_images(tmp_path, capsys):
    for name in ("a.png", "thumbnails/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded_image(1))
    assert read(tmp_path) == ([encoded_image(1)], ["a.png"], [-1])
    assert "the images in its subfolder thumbnails are not read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.rec", "others.rec"])
def test_a_record_file_is_read_by_its_own_name(tmp_path, name):
    write_records(tmp_path / "of_others", [0, 0, 5])
    for suffix in ("rec", "idx"):
        (tmp_path / "of_others" / f"train.{suffix}").rename(tmp_path / f"others.{suffix}")
    write_records(tmp_path, [0, 0, 0, 0, 1])
    (tmp_path / "property").write_text("2,16,16")
    images, names, labels = read(tmp_path / name)
    assert labels == ([0, 0, 0, 0, 1] if name == "train.rec" else [0, 0, 5])
    assert images == [encoded_image(n + 1) for n in range(len(labels))]
    assert all(name in where and f"key {n + 1}" in where for n, where in enumerate(names))


@pytest.mark.parametrize("name", ["a.tar.gz", "A.TGZ"])
def test_a_compressed_archive_is_refused_with_the_command_that_decompresses_it(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"an archive"))
    with pytest.raises(DataError, match=rf"{name}: .*gunzip "):
        read_input(tmp_path / name)


def test_images_of_a_verification_set_are_numbered(tmp_path):
    write_bin(tmp_path / "s.bin", [encoded_image(n) for n in range(4)], [True, False])
    assert read(tmp_path / "s.bin") == (
        [encoded_image(n) for n in range(4)],
        [f"s.bin:{n}" for n in range(4)],
        [-1] * 4,
    )


@pytest.mark.parametrize("name", ["none.png", "none.rec", "none"])
def test_a_missing_input_is_named(tmp_path, name):
    with pytest.raises(DataError, match="none"):
        read(tmp_path / name)


class Seen(nn.Module):
    """A layer that autocast runs in 16 bits, and remembers in which type it did."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.dtype = nn.Linear(3 * 16 * 16, 8), None

    def forward(self, image_BCHW):
        embedding = self.fc(image_BCHW.flatten(1))
        self.dtype = embedding.dtype
        return embedding


def test_bf16_runs_the_network_in_bfloat16():
    network, images = Seen(), [encoded_image(n) for n in range(9)]
    found = {}
    for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        embedder = ImageEmbedder(inference_network(network, CPU, bf16=bf16), 16, 4, CPU)
        found[bf16] = embedder.embed(images, name="set")
        assert network.dtype == dtype and found[bf16].dtype == np.float32
    gap = np.abs(found[True] - found[False]).max() / np.abs(found[False]).max()
    assert 0 < gap < 0.02


class RowByRow(nn.Module):
    """A layer whose result for an image does not depend on the rest of the batch; it notes the batch sizes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, image_BCHW):
        self.sizes.append(len(image_BCHW))
        return torch.stack([image.mean((1, 2)) for image in image_BCHW])


@pytest.mark.parametrize(("count", "sizes"), [(11, [4, 4, 4]), (8, [4, 4]), (3, [3])])
def test_on_a_gpu_the_last_batch_is_as_large_as_the_others(count, sizes, monkeypatch):
    images = [encoded_image(n) for n in range(count)]
    expected = ImageEmbedder(RowByRow(), 16, 4, CPU).embed(images, name="set", flip=False)
    monkeypatch.setattr(ImageEmbedder, "_pads_last_batch", True)
    network, done = RowByRow(), []
    embedder = ImageEmbedder(network, 16, 4, CPU, progress=lambda *progress: done.append(progress))
    np.testing.assert_array_equal(embedder.embed(images, name="set", flip=False), expected)
    assert network.sizes == sizes and done[-1] == (count, count)


def test_embeddings_in_a_temporary_file_equal_those_in_memory(model, tmp_path, monkeypatch):
    write_records(tmp_path / "data", [0, 0, 1, 1, 2, 2, 2])
    reports, found = [], []
    for chunk in (7, 3):
        monkeypatch.setattr(image_embeddings, "_CHUNK", chunk)
        found.append(
            image_embeddings.embed_input(
                model, tmp_path / "data", Inference("cpu", 2),
                progress=lambda done, count: reports.append((done, count)),
            )
        )  # fmt: skip
    whole, in_chunks = found
    np.testing.assert_allclose(in_chunks.embedding, whole.embedding, atol=1e-6)
    assert list(in_chunks.name) == list(whole.name)
    np.testing.assert_allclose(in_chunks.quality, whole.quality, rtol=1e-6)
    assert in_chunks.label.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert reports == [(n, 7) for n in (2, 4, 6, 7)] + [(n, 7) for n in (2, 3, 5, 6, 7)]


@pytest.mark.parametrize("chunk", [7, 2])
def test_images_that_cannot_be_read_are_left_out_and_listed(model, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(image_embeddings, "_CHUNK", chunk)
    write_records(tmp_path / "data", [0, 0, 1, 1, 2, 2, 2])
    options = (model, tmp_path / "data", Inference("cpu", 2))
    whole, bad = image_embeddings.embed_input(*options), (0, 2, 3, 5)  # all of a chunk, and some of others
    damage_records(tmp_path / "data" / "train.rec", bad)
    with pytest.raises(ImageError, match=r"key 1 at byte.*; leave it out"):
        image_embeddings.embed_input(*options, advice="leave it out")
    skipped, good = [], [1, 4, 6]
    found = image_embeddings.embed_input(*options, skipped=skipped)
    np.testing.assert_allclose(found.embedding, whole.embedding[good], atol=1e-6)
    np.testing.assert_allclose(found.quality, whole.quality[good], rtol=1e-6)
    assert list(found.name) == [whole.name[number] for number in good] and found.label.tolist() == [0, 2, 2]
    assert [one.name for one in skipped] == [whole.name[number] for number in bad]
    assert all(one.kind == "unreadable" and "at byte" in one.reason for one in skipped)
    damage_records(tmp_path / "data" / "train.rec", range(7))
    with pytest.raises(DataError, match="none of the 7 images can be used; the first: .*key 1 at byte"):
        image_embeddings.embed_input(*options, skipped=[])


class Lengths(nn.Module):
    """Embeddings of the mean colors, of length 1 or as they are."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit
        self.embedded = 0

    def forward(self, image_BCHW):
        self.embedded += len(image_BCHW)
        embedding = image_BCHW.float().mean((2, 3)) + torch.arange(3)
        return nn.functional.normalize(embedding) if self.unit else embedding


@pytest.mark.parametrize("flip", [True, False])
def test_embeddings_that_the_network_normalizes_have_no_quality(flip):
    images = [encoded_image(n) for n in range(5)]
    for unit in (True, False):
        embedder = ImageEmbedder(Lengths(unit), 16, 4, CPU)
        unit_ND, quality_N = image_embeddings.embed_images(embedder, images, "set", flip=flip)
        assert np.isnan(quality_N).all() == unit and np.isfinite(quality_N).all() == (not unit)
        np.testing.assert_allclose(np.linalg.norm(unit_ND, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("unit", [True, False])
def test_a_model_asks_its_first_images_alone_whether_its_network_normalizes(unit):
    network = Lengths(unit)
    model = Model(Path("m.onnx"), EmbeddingModel(network, 16, 3, normalize, "colors"), CPU)
    images = np.stack([np.full((16, 16, 3), color, np.uint8) for color in (0, 90, 200)])
    first, again = (model.embed(images, return_quality=True)[1] for _ in range(2))
    assert network.embedded == 2 + 2 * 3 + 2 * 3
    np.testing.assert_array_equal(first, again)
    assert np.isnan(first).all() == unit


@pytest.mark.parametrize("number", [np.nan, 0.0])
def test_an_embedding_that_is_not_finite_or_zero_is_named_by_its_image_after_images_that_are_left_out(number):
    images = [encoded_image(n) for n in range(7)]
    images[0] = images[4] = b"damaged"
    images[5] = encode_png(np.full((16, 16, 3), 255, np.uint8))

    def network(image_BCHW):
        mean_BC = image_BCHW.float().mean((2, 3))
        return mean_BC.masked_fill(mean_BC > 0.99, number)

    embedder = ImageEmbedder(network, 16, 3, CPU)
    with pytest.raises(ModelError, match="the embedding of image 5 is"):
        image_embeddings.embed_images(embedder, images, "set", flip=False, faults={})


def test_a_chunk_tells_the_other_ranks_its_own_faults_alone(monkeypatch):
    images = [b"damaged" if n in (1, 2, 3, 7) else encoded_image(n) for n in range(8)]
    told, faults = [], {}

    def gather(own):
        told.append([index for index, *_ in own])
        return [own]

    monkeypatch.setattr(image_embeddings, "_CHUNK", 3)
    monkeypatch.setattr(image_embeddings.collectives, "gather_json", gather)
    embedder = ImageEmbedder(lambda image_BCHW: image_BCHW.float().mean((2, 3)), 16, 3, CPU)
    unit_ND, _ = image_embeddings.embed_images(embedder, images, "set", faults=faults)
    assert told == [[1, 2], [3], [7]] and list(faults) == [1, 2, 3, 7] and len(unit_ND) == 4


def test_a_lowest_quality_is_refused_for_embeddings_without_one_and_if_none_reaches_it():
    known = Embeddings(np.eye(2, dtype=np.float32), ["a", "b"], np.array([0, 1]))
    for quality, fault in (
        (None, "has no column `quality`"),
        (np.full(2, np.nan), "no quality; give no minimum"),
        (np.array([0.5, np.nan]), "quality of 1 or more; the highest is 0.5"),
    ):
        with pytest.raises(DataError, match=fault):
            replace(known, quality=quality).usable(1.0)
    assert replace(known, quality=np.full(2, np.nan)).usable(0).all()


def test_rows_larger_than_the_disk_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="free some space, or set TMPDIR"):
        image_embeddings._temporary_rows(1 << 50, 64)
    with small_disk(tmp_path / "disk", size_kib=64):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
        with pytest.raises(RunError, match="disk: No space .*free some space, or set TMPDIR"):
            image_embeddings._temporary_rows(300, 64)
