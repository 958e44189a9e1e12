import numpy as np
import pytest

from facetrain.bench.search import _FaceRows
from facetrain.embeddings.embedding_files import Embeddings, save_embeddings
from facetrain.errors import DataError


def faces(path, people=600, images=6, size=64):
    """Write embeddings of people that differ in the first 32 dimensions only, with noise in all of them."""
    random = np.random.default_rng(0)
    person = random.normal(size=(people, size)) * (np.arange(size) < 32)
    row = np.repeat(person, images, 0) + 0.4 * random.normal(size=(people * images, size))
    row /= np.linalg.norm(row, axis=1, keepdims=True)
    labels = np.repeat(np.arange(people), images)
    save_embeddings(path, Embeddings(row.astype(np.float32), [str(n) for n in range(len(row))], labels))
    return row


def statistics(row):
    """Return the shares of variance by dimension, and mean and deviation of cosines of different people."""
    cosine = (row[:2000] * row[-2000:]).sum(1)
    return [*row.var(0) / row.var(0).sum(), cosine.mean(), cosine.std()]


def test_a_gallery_has_the_distribution_of_real_embeddings(tmp_path):
    real = faces(tmp_path / "a.npz")
    gallery = _FaceRows(20_000, tmp_path / "a.npz")
    assert gallery.shape == (20_000, 64)
    generated = gallery[0:20_000]
    np.testing.assert_allclose(statistics(generated), statistics(real), atol=0.02)
    same = (generated[0::8] * generated[1::8]).sum(1).mean()
    assert abs(same - (real[0::6] * real[1::6]).sum(1).mean()) < 0.05
    rows = np.arange(0, 20_000, 40)
    assert (gallery.new_images(rows) * generated[rows]).sum(1).mean() == pytest.approx(same, abs=0.03)


def test_faces_of_one_person_have_no_distribution(tmp_path):
    faces(tmp_path / "a.npz", people=1)
    with pytest.raises(DataError, match=r"has 1 people; embeddings of two images of many people are needed"):
        _FaceRows(8, tmp_path / "a.npz")
