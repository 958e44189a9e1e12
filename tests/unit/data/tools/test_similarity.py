import numpy as np
import pytest

from facetrain.data.tools.similarity import (
    SelectedRows,
    compute_centers,
    leave_one_out_similarity,
    measure_separation,
    nearest_image,
    nearest_other_center,
)
from tests.unit.data.tools.helpers import EACH, IDENTITIES, unit


def test_similarities_follow_their_definition_in_blocks_too(faces, monkeypatch):
    embedding, person = faces
    centers = compute_centers(embedding, person, IDENTITIES + 1)
    assert not centers.unit_KD[IDENTITIES].any()
    genuine = leave_one_out_similarity(embedding, person, centers)
    expected = unit(embedding[1:EACH].sum(0)) @ embedding[0]
    assert genuine[0] == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr("facetrain.data.tools.similarity._BLOCK_NUMBERS", 7 * IDENTITIES)
    identity, cosine = nearest_other_center(embedding, person, centers.unit_KD)
    similar = embedding @ centers.unit_KD.T
    similar[np.arange(len(person)), person] = -2
    assert (identity == similar.argmax(1)).all()
    np.testing.assert_allclose(cosine, similar.max(1), rtol=1e-5)


def test_the_nearest_image_of_an_identity_is_another_one_in_blocks_too(faces, monkeypatch):
    embedding, person = faces
    alone = np.append(person[:-1], IDENTITIES)  # an identity with one image
    monkeypatch.setattr("facetrain.data.tools.similarity._BLOCK_NUMBERS", 7 * EACH)
    absent = np.where(np.arange(len(alone)) == 0, IDENTITIES + 1, np.roll(alone, 3))
    for identity in (alone, np.roll(alone, 3), absent):
        similar = np.where(alone == identity[:, None], embedding @ embedding.T, np.nan)
        np.fill_diagonal(similar, np.nan)
        found = nearest_image(embedding, alone, identity)
        np.testing.assert_allclose(found, np.fmax.reduce(similar, axis=1), rtol=1e-5)
    assert np.isnan(nearest_image(embedding, alone, alone)[-1])
    assert np.isnan(found[0])


def test_the_separation_of_some_rows_is_that_of_a_copy_of_them_in_blocks_too(faces, monkeypatch):
    embedding, person = faces
    rows = np.flatnonzero(np.arange(len(person)) % 5 > 0)
    noisy = unit(embedding + 0.3 * np.random.default_rng(1).normal(size=embedding.shape))
    for _ in range(2):
        found = measure_separation(SelectedRows(noisy, rows), person[rows])
        assert found == measure_separation(noisy[rows], person[rows]) and found.eer > 0
        monkeypatch.setattr("facetrain.data.tools.similarity._BLOCK_NUMBERS", 7 * IDENTITIES)


@pytest.mark.parametrize("labels", [[0] * 6, range(6)])
def test_without_another_identity_or_image_there_is_no_error(labels):
    embedding_ND = unit(np.random.default_rng(0).normal(size=(6, 8)))
    found = measure_separation(embedding_ND, np.array(labels))
    assert found.eer is None and found.useless and "EER" not in found.sentence()
