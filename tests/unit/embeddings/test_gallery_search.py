"""Search in blocks, beside a full sort in float64."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from facetrain.cli.search import _name_results
from facetrain.embeddings import embeddings, gallery_search
from facetrain.embeddings.embed_images import embed_input
from facetrain.embeddings.embeddings import Embeddings
from facetrain.embeddings.gallery_search import search_gallery
from facetrain.embeddings.inference import Inference
from facetrain.embeddings.normalization import l2_normalize
from facetrain.errors import DataError
from facetrain.models.embedding_model import open_model
from facetrain.models.export.export import ExportOptions, export
from tests.support.faces import face
from tests.support.models import write_model

SIZE = 24


def stored(rows, path="gallery.npz"):
    names = [f"{row}.jpg" for row in range(len(rows))]
    return Embeddings(np.asarray(rows), names, np.arange(len(rows)), Path(path), model=np.eye(SIZE)[0])


def reference(probe, gallery, count):
    def unit(row):
        row = row.astype(np.float64)
        return row / np.maximum(np.linalg.norm(row, axis=1, keepdims=True), 1e-12)

    # Rounded: the order of equal entries must not depend on the last bit of a matrix product.
    cosine = np.round(unit(probe) @ unit(gallery).T, 12)
    order = np.argsort(-cosine, axis=1, kind="stable")[:, :count]
    return order, np.take_along_axis(cosine, order, 1)


def hard_gallery(dtype=np.float32):
    """Return probes and entries with equal, opposite and nearly equal entries."""
    random = np.random.default_rng(0)
    gallery = random.normal(size=(700, SIZE)).astype(dtype)
    gallery[100:108] = gallery[3]
    gallery[300:308] = gallery[3] * (1 + 1e-4 * random.normal(size=(8, SIZE)))
    gallery[400] = -gallery[3]
    near = gallery[:9].astype(np.float32) + 0.2 * random.normal(size=(9, SIZE)).astype(np.float32)
    return np.concatenate([near, gallery[3:4].astype(np.float32)]), gallery


def test_many_results_of_many_probes_are_compared_in_little_memory():
    random = np.random.default_rng(0)
    probe, gallery = (random.normal(size=(count, SIZE)).astype(np.float32) for count in (256, 2000))
    search_gallery(stored(probe), stored(gallery), 1)
    tracemalloc.start()
    found = search_gallery(stored(probe), stored(gallery), 1500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * 1500 * SIZE * 8, "a copy of all candidates"
    np.testing.assert_allclose(found.cosine_QK, reference(probe, gallery, 1500)[1], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries_per_block", "dtype"),
    [
        (1, np.float32),
        (7, np.float32),
        (350, np.float32),
        (1000, np.float32),
        (7, np.float16),
        (1000, np.float16),
    ],
)
def test_results_are_those_of_a_full_sort_for_blocks_of_any_size(monkeypatch, entries_per_block, dtype):
    monkeypatch.setattr(embeddings, "BLOCK_BYTES", entries_per_block * 4 * SIZE)
    monkeypatch.setattr(gallery_search, "_PROBES_AT_ONCE", 4)
    monkeypatch.setattr(gallery_search, "_PROBES_PER_PASS", 6)
    probe, gallery = hard_gallery(dtype)
    gallery = gallery[: 120 * entries_per_block]  # many blocks of one entry take long
    found = search_gallery(stored(probe), stored(gallery), 12)
    row, cosine = reference(probe, gallery, 12)
    np.testing.assert_array_equal(found.row_QK, row)
    np.testing.assert_allclose(found.cosine_QK, cosine, atol=1e-11)


@pytest.mark.parametrize("row", [np.arange(4), np.arange(0, 700, 3), np.array([3, 120, 699])])
def test_a_part_of_a_gallery_is_searched_as_if_the_other_entries_were_not_there(monkeypatch, row):
    monkeypatch.setattr(embeddings, "BLOCK_BYTES", 50 * 4 * SIZE)
    probe, gallery = hard_gallery()
    found = search_gallery(stored(probe), stored(gallery), 9, among=np.isin(np.arange(700), row))
    # With fewer entries than results, all are listed.
    position, cosine = reference(probe, gallery[row], min(9, len(row)))
    np.testing.assert_array_equal(found.row_QK, row[position])
    np.testing.assert_allclose(found.cosine_QK, cosine, atol=1e-11)


@pytest.mark.parametrize("copies", [9, 40, 300])
def test_copies_of_a_face_are_found_in_the_order_of_their_rows(monkeypatch, copies):
    monkeypatch.setattr(embeddings, "BLOCK_BYTES", 700 * 4 * SIZE)
    monkeypatch.setattr(gallery_search, "_PROBES_AT_ONCE", 2)
    random = np.random.default_rng(0)
    gallery = random.normal(size=(1000, SIZE)).astype(np.float32)
    gallery[500 : 500 + copies] = gallery[5]
    gallery[4] = gallery[5] + 0.1 * random.normal(size=SIZE)
    gallery[850:900] = gallery[6] * (1 + 1e-7 * random.normal(size=(50, SIZE)))
    probe = gallery[[4, 5, 6, 7]]
    found = search_gallery(stored(probe, "probes.npz"), stored(gallery), 3)
    row, cosine = reference(probe, gallery, 3)
    assert found.row_QK[[0, 1, 3]].tolist() == row[[0, 1, 3]].tolist() and row[0].tolist() == [4, 5, 500]
    np.testing.assert_allclose(found.cosine_QK, cosine, atol=1e-12)


def test_embeddings_of_zeros_find_nothing_and_are_never_found(monkeypatch, caplog):
    monkeypatch.setattr(embeddings, "BLOCK_BYTES", 2 * 4 * SIZE)
    monkeypatch.setattr(gallery_search, "_PROBES_PER_PASS", 2)
    gallery = np.random.default_rng(0).normal(size=(5, SIZE)).astype(np.float32)
    probe = gallery.copy()
    gallery[[0, 3, 4]] = 0
    probe[1] = 0
    among = np.array([True, True, True, True, False])
    probes, entries = stored(probe, "probes.npz"), stored(gallery)
    compared = []
    found = search_gallery(
        probes, entries, 3, among=among, progress=lambda done, total: compared.append((done, total))
    )
    assert compared == [(done, 25) for done in (4, 8, 10, 14, 18, 20, 22, 24, 25)]
    assert [sorted(rows) for rows in found.row_QK.tolist()] == [[-1, 1, 2], [-1] * 3] + 3 * [[-1, 1, 2]]
    assert (np.isneginf(found.cosine_QK) == (found.row_QK == -1)).all()
    names = [[entry["name"] for entry in one["found"]] for one in _name_results(found, probes, entries, -1)]
    assert names[1] == [] and sorted(names[0]) == ["1.jpg", "2.jpg"]
    assert caplog.messages == [
        "probes.npz: 1 of 5 images find nothing; embedding of zeros",
        "gallery.npz: 2 of 5 images are never found; embedding of zeros",
    ]


def test_entries_of_any_length_are_compared_by_their_direction():
    probe, gallery = hard_gallery()
    # Their squares are no numbers in float32, and those of the largest and smallest in float64 neither.
    length = 10.0 ** np.random.default_rng(1).choice([-290, -170, -30, 0, 30, 160, 290], (len(gallery), 1))
    found = search_gallery(stored(probe[:9]), stored(gallery * length), 5)
    expected = search_gallery(stored(probe[:9]), stored(gallery), 5)
    assert (found.row_QK[:, 0] == expected.row_QK[:, 0]).mean() > 0.8
    np.testing.assert_allclose(found.cosine_QK, expected.cosine_QK, atol=1e-12)


def test_embeddings_of_different_sizes_are_refused():
    with pytest.raises(DataError, match=r"g\.npz has embeddings of size 5, p\.npz of size 4; embed both"):
        search_gallery(stored(np.ones((2, 4)), "p.npz"), stored(np.ones((2, 5)), "g.npz"), 1)


def test_a_threshold_of_1_lists_the_entries_that_equal_the_probe():
    row = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    faces = Embeddings(l2_normalize(row), [str(n) for n in range(50)], np.full(50, -1))
    found = search_gallery(faces, faces, 3)
    assert (found.cosine_QK[:, 0] < 1).any(), "rounded to a number below 1"
    results = _name_results(found, faces, faces, 1.0)
    assert [[entry["row"] for entry in one["found"]] for one in results] == [[n] for n in range(50)]


def test_no_cosine_is_above_1():
    faces = stored(np.random.default_rng(0).normal(size=(50, SIZE)))
    assert (search_gallery(faces, faces, 1).cosine_QK <= 1).all()


def test_a_file_that_does_not_say_its_model_is_named(caplog):
    known = stored(np.eye(SIZE))
    unknown = replace(known, path=Path("edited.npz"), model=None)
    for probes, gallery in ((known, known), (unknown, known), (known, unknown)):
        search_gallery(probes, gallery, 1)
    search_gallery(known, unknown, 1, other_model=True)
    assert [message.partition(" fingerprint")[0] for message in caplog.messages] == ["edited.npz: has no"] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_embeddings_of_two_models_are_refused_and_those_of_its_exported_form_are_not(tmp_path):
    folder = tmp_path / "faces"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(face(number, size=32))
    write_model(tmp_path / "first.safetensors")
    write_model(tmp_path / "second.safetensors")
    model = open_model(tmp_path / "first.safetensors", torch.device("cpu"))
    export(model, "onnx", tmp_path / "first.onnx", ExportOptions(opset=17))  # by the faster exporter
    one, other, onnx, bf16 = (
        embed_input(tmp_path / name, folder, Inference("cpu", bf16=bf16))
        for name, bf16 in (
            ("first.safetensors", False), ("second.safetensors", False), ("first.onnx", False),
            ("first.safetensors", True),
        )
    )  # fmt: skip
    for same in (onnx, bf16, replace(other, model=None)):
        search_gallery(one, same, 1)
    with pytest.raises(DataError, match="of another model than"):
        search_gallery(one, other, 1)
    assert search_gallery(one, other, 1, other_model=True).row_QK.shape == (3, 1)
