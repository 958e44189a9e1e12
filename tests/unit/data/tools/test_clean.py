import numpy as np
import pytest

from facetrain.data.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools import clean as clean_module
from facetrain.data.tools import similarity as likeness
from facetrain.data.tools.clean import Cleaning, clean, write_cleaned
from facetrain.data.tools.overlap import draw_pairs, overlap
from facetrain.data.tools.similarity import best_other, find_centers, own_similarity
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records

PEOPLE, EACH, SIZE = 40, 8, 64


def unit(x):
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture
def faces():
    """Embeddings of 40 people, 8 images each, cosine about 0.7 among a person's, and whose they are."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(PEOPLE), EACH)
    center = unit(rng.normal(size=(PEOPLE, SIZE)))
    return unit(center[person] + 0.08 * rng.normal(size=(len(person), SIZE))), person


def found(cleaning, kind):
    return [finding for finding in cleaning.findings if finding.kind == kind]


def same_partition(one, other):
    return (
        len({*zip(one.tolist(), other.tolist(), strict=True)}) == len(np.unique(one)) == len(np.unique(other))
    )


def test_right_labels_are_left_alone(faces):
    cleaning = clean(*faces)
    assert cleaning.findings == [] and same_partition(cleaning.label_N, faces[1])


def test_what_is_gone_through_in_stretches_is_what_is_held_at_once(faces, monkeypatch):
    embedding, label = faces[0], faces[1].copy()
    label[[3, 50, 90]] = [7, 8, 9]
    label[4:8] = PEOPLE
    whole, shared = clean(embedding, label), overlap(embedding, label, embedding[::9])
    monkeypatch.setattr(likeness, "_AT_ONCE", 7 * SIZE)
    parts, again = clean(embedding, label), overlap(embedding, label, embedding[::9])
    assert (parts.label_N == whole.label_N).all() and parts.threshold == whole.threshold
    assert [vars(one) | {"similarity": 0} for one in parts.findings] == [
        vars(one) | {"similarity": 0} for one in whole.findings
    ]
    assert [one.image for one in again[1]] == [one.image for one in shared[1]] and len(shared[1]) == 36


def test_an_identity_of_very_many_images_is_parted_by_some_of_them(faces, monkeypatch):
    embedding, person = faces
    label = np.where(person == 1, 0, person)
    monkeypatch.setattr(clean_module, "_COMPARED", 6)
    assert [finding.identity for finding in found(clean(embedding, label), "mixed")] == [0]
    monkeypatch.setattr(clean_module, "_COMPARED", 1)
    assert not found(clean(embedding, label), "mixed"), "one alone can be compared with none"


def test_images_under_a_wrong_label_go_to_whom_they_show(faces):
    embedding, person = faces
    label = person.copy()
    label[[3, 50, 90]] = [7, 8, 9]
    cleaning = clean(embedding, label)
    assert {one.image: (one.identity, one.other) for one in found(cleaning, "moved")} == {
        3: (7, 0), 50: (8, 6), 90: (9, 11),
    }  # fmt: skip
    assert same_partition(cleaning.label_N, person)


def test_one_person_under_two_identities_becomes_one(faces):
    embedding, person = faces
    label = person.copy()
    label[4:8] = PEOPLE
    cleaning = clean(embedding, label)
    assert [(one.identity, one.other) for one in cleaning.findings if one.kind == "same"] == [(0, PEOPLE)]
    assert same_partition(cleaning.label_N, person)


def test_two_people_under_one_identity_become_two(faces):
    embedding, person = faces
    label = np.where(person == 5, 2, person)
    cleaning = clean(embedding, label)
    assert [one.identity for one in cleaning.findings] == [2] and cleaning.findings[0].kind == "mixed"
    assert same_partition(cleaning.label_N, person)


def test_a_image_of_nobody_is_left_out(faces):
    embedding, person = faces
    embedding[10] = unit(np.random.default_rng(9).normal(size=SIZE))
    cleaning = clean(embedding, person)
    assert [one.image for one in found(cleaning, "stranger")] == [10]
    assert np.flatnonzero(cleaning.label_N < 0).tolist() == [10]


def test_a_single_image_of_an_identity_is_not_judged(faces):
    embedding, person = faces
    alone = np.append(np.arange(0, 10 * EACH), 10 * EACH)
    assert clean(embedding[alone], person[alone]).findings == []


def test_a_cleaned_dataset_is_written_with_the_labels_that_were_found(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 2, 2])
    cleaning = Cleaning(0.5, [], np.array([0, 0, 0, -1, 2]))
    written = write_cleaned(data, cleaning, tmp_path / "out")
    assert (written.identities, written.images) == (2, 4)
    source = open_dataset(tmp_path / "out")
    assert source.labels.tolist() == [0, 0, 0, 1] and source.read(3) == encoded_image(5)
    with pytest.raises(DataError, match="no image is like"):
        write_cleaned(data, Cleaning(0.5, [], np.full(5, -1)), tmp_path / "none")


def test_similarities_are_those_of_the_definition_in_chunks_too(faces, monkeypatch):
    embedding, person = faces
    centers = find_centers(embedding, person, PEOPLE + 1)
    assert not centers.unit_KD[PEOPLE].any()
    own = own_similarity(embedding, person, centers)
    expected = unit(embedding[1:EACH].sum(0)) @ embedding[0]
    assert own[0] == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr("facetrain.data.tools.similarity._AT_ONCE", 7 * PEOPLE)
    identity, cosine = best_other(embedding, person, centers.unit_KD)
    similar = embedding @ centers.unit_KD.T
    similar[np.arange(len(person)), person] = -2
    assert (identity == similar.argmax(1)).all()
    np.testing.assert_allclose(cosine, similar.max(1), rtol=1e-5)


def test_people_whom_a_test_set_has_too_are_found_and_nobody_else(faces):
    embedding, person = faces
    trained, shared = (person < 30) & (np.arange(len(person)) % EACH < 5), np.isin(person, [3, 17])
    tested = (shared & ~trained) | (person >= 35)
    _, both = overlap(embedding[trained], person[trained], embedding[tested])
    assert sorted(one.identity for one in both) == [3, 17]
    numbers, test_person = person[trained], person[tested]
    for one in both:
        assert numbers[one.image] == test_person[one.test_image] == one.identity
        assert one.test_images == 3


def test_images_without_identities_are_refused(faces):
    for tool in (lambda e, y: clean(e, y), lambda e, y: overlap(e, y, e)):
        with pytest.raises(DataError, match="no identities"):
            tool(faces[0], np.full(len(faces[0]), -1))


def test_pairs_are_drawn_side_by_side(tmp_path):
    draw_pairs([(0, 1), (2, 3)], encoded_image, encoded_image, tmp_path / "pairs.png", columns=1, size=16)
    sheet = decode_rgb((tmp_path / "pairs.png").read_bytes(), location="x")
    assert (sheet[18:34, 16:32] == decode_rgb(encoded_image(3), location="x")).all()
