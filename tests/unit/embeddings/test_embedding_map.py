"""Maps from the embeddings of an old model to those of a new one."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

import facetrain
from facetrain.embeddings.embedding_map import fit_map, open_map, save_map
from facetrain.embeddings.embeddings import Embeddings
from facetrain.embeddings.gallery_search import search_gallery
from facetrain.embeddings.normalization import l2_normalize
from facetrain.errors import DataError


def of_model(rows, model, path="old.npz"):
    names = [str(n) for n in range(len(rows))]
    return Embeddings(rows.astype(np.float32), names, np.arange(len(rows)), Path(path), model=model)


@pytest.fixture
def models():
    """Return embeddings of the same 400 faces by two models, which differ by a rotation, a size and some noise."""
    random = np.random.default_rng(0)
    face_NF = random.normal(size=(400, 12))
    rows = [
        l2_normalize(face_NF @ random.normal(size=(12, size)) + 0.05 * random.normal(size=(400, size)))
        for size in (16, 24)
    ]
    return [of_model(each, each[0].astype(np.float32)) for each in rows]


def test_a_mapped_gallery_is_searched_as_if_the_new_model_had_embedded_it(models, tmp_path):
    old, new = models
    learn = slice(100, None)
    save_map(
        tmp_path / "map.npz",
        fit_map(of_model(old.embedding[learn], old.model), of_model(new.embedding[learn], new.model)),
    )
    found = open_map(tmp_path / "map.npz")
    gallery, probes = (of_model(each.embedding[:100], each.model) for each in models)
    mapped = found.mapped(gallery)
    assert (mapped.count, mapped.size) == (100, 24)
    assert (search_gallery(probes, mapped, 1).row_QK[:, 0] == np.arange(100)).all()
    cosine_N = (mapped.embedding * probes.embedding).sum(1)
    assert cosine_N.mean() > 0.95 > np.median(mapped.embedding @ probes.embedding.T)
    for length in (7, 1e-30, 1e30):
        applied = facetrain.load_map(tmp_path / "map.npz").apply(gallery.embedding * np.float32(length))
        np.testing.assert_allclose(applied, mapped.embedding, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(applied, axis=1), 1, atol=1e-6)
    gallery.embedding[3] = 0  # without a face
    assert not found.apply(gallery.embedding)[3].any() and found.apply(gallery.embedding)[4].any()


def test_a_gallery_of_a_third_model_is_not_mapped(models):
    old, new = models
    found = fit_map(old, new)
    with pytest.raises(DataError, match=r"third\.npz: .*old model"):
        found.mapped(of_model(old.embedding, -old.model, "third.npz"))
    with pytest.raises(DataError, match=r"^old\.npz: .*map\.npz"):
        found.mapped(new)
    with pytest.raises(DataError, match="maps embeddings of size 16"):
        found.apply(new.embedding)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": np.ones((16, 3))},
        {"bias": np.full(24, np.nan)},
        {"old": None},
        {"weight": np.ones(16)},
        {"new": np.array(["x"] * 24)},
        {"old": np.ones(16, np.complex64)},
    ],
)
def test_a_file_that_is_no_map_is_refused_in_one_line(models, tmp_path, change):
    path = tmp_path / "map.npz"
    save_map(path, fit_map(*models))
    with np.load(path) as stored:
        arrays = dict(stored) | change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(DataError, match=r"map\.npz: .*not a map of `facetrain align`") as caught:
        open_map(path)
    assert "\n" not in str(caught.value)
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"map\.npz: damaged"):
        open_map(path)
    path.unlink()
    with pytest.raises(DataError, match=r"map\.npz: No such file or directory$"):
        open_map(path)


def test_a_map_with_a_damaged_name_is_not_to_be_saved_as_text(tmp_path):
    path = tmp_path / "map.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("weightä.npy", b"")
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xff\xfe"))
    with pytest.raises(DataError, match=r"map\.npz: damaged.*\(text not in UTF-8 \(byte 0xff\)\)$"):
        open_map(path)
