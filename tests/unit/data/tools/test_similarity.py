import numpy as np
import pytest

from facetrain.data.tools.similarity import (
    compute_centers,
    leave_one_out_similarity,
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
