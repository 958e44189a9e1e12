import numpy as np
import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools import similarity
from facetrain.data.tools.wrong_labels import corrected_labels, find_wrong_labels
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records
from tests.support.memory import traced_peak
from tests.unit.data.tools.helpers import EACH, IDENTITIES, SIZE, unit, write_cleaned

MOVED = {3: 7, 50: 8, 91: 9}


def drawn(identities, each, noise, seed):
    """Return embeddings of identities with this noise per dimension, of 64, and the identities."""
    rng = np.random.default_rng(seed)
    person = np.repeat(np.arange(identities), each)
    center = unit(rng.normal(size=(identities, SIZE)))
    return unit(center[person] + noise * rng.normal(size=(len(person), SIZE))), person


def with_wrong_labels(person):
    label = person.copy()
    label[list(MOVED)] = list(MOVED.values())
    return label


def test_right_labels_and_the_only_image_of_an_identity_are_not_changed(faces):
    embedding, person = faces
    for rows in (np.arange(len(person)), np.append(np.arange(0, 10 * EACH), 10 * EACH)):
        assert find_wrong_labels(embedding[rows], person[rows]).wrong == []


def test_wrong_labels_are_found_and_corrected(faces):
    embedding, person = faces
    label = with_wrong_labels(person)
    wrong = find_wrong_labels(embedding, label).wrong
    assert [(one.image, one.identity, one.target) for one in wrong] == [
        (image, other, int(person[image])) for image, other in MOVED.items()
    ]
    assert (corrected_labels(label, wrong) == person).all()


def test_blocks_give_the_same_result_as_all_embeddings_at_once(faces, monkeypatch):
    embedding, label = faces[0], with_wrong_labels(faces[1])
    whole = find_wrong_labels(embedding, label).wrong
    monkeypatch.setattr(similarity, "_BLOCK_NUMBERS", 7 * SIZE)
    blocks = find_wrong_labels(embedding, label).wrong
    assert [(one.image, one.target) for one in blocks] == [(one.image, one.target) for one in whole] != []


def test_all_embeddings_are_never_in_memory_at_once(monkeypatch):
    rng, label = np.random.default_rng(0), np.repeat(np.arange(100), 40)
    embedding = unit(rng.normal(size=(100, 512))[label] + 0.5 * rng.normal(size=(len(label), 512)))
    label[::200] += 7
    monkeypatch.setattr(similarity, "_BLOCK_NUMBERS", 100 * 512)
    with traced_peak() as peak:
        assert find_wrong_labels(embedding, label).wrong
    assert peak.bytes < embedding.nbytes / 2


def test_labels_with_large_gaps_need_no_more_memory_than_labels_without(faces):
    embedding, label = faces[0], with_wrong_labels(faces[1])
    spread = np.where(label == IDENTITIES - 1, 2**31 - 1, label * 1000)
    with traced_peak() as peak:
        wide = find_wrong_labels(embedding, spread).wrong
    assert peak.bytes < 1 << 28
    dense = find_wrong_labels(embedding, label).wrong
    assert [(one.image, one.target) for one in wide] == [(one.image, one.target * 1000) for one in dense]


def test_an_image_that_matches_no_identity_is_left_out(faces):
    embedding, person = faces
    embedding[10] = unit(np.random.default_rng(9).normal(size=SIZE))
    wrong = find_wrong_labels(embedding, person).wrong
    assert [(one.image, one.target) for one in wrong] == [(10, -1)]
    assert np.flatnonzero(corrected_labels(person, wrong) < 0).tolist() == [10]


def test_a_cleaned_dataset_is_written_with_the_corrected_labels(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 2, 2])
    written = write_cleaned(data, np.array([0, 0, 0, -1, 2]), tmp_path / "out")
    assert (written.identities, written.images) == (2, 4)
    source = open_dataset(tmp_path / "out")
    assert source.labels.tolist() == [0, 0, 0, 1] and source.read(3) == encoded_image(5)
    with pytest.raises(DataError, match="no image"):
        write_cleaned(data, np.full(5, -1), tmp_path / "none")


def test_an_identity_keeps_its_name_if_most_of_its_images_are_moved_there(tmp_path):
    for image in ["ann/1.png", "bob/1.png", "bob/2.png", "bob/3.png"]:
        (tmp_path / "photos" / image).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / image).write_bytes(encoded_image(1))
    write_cleaned(tmp_path / "photos", np.array([0, 0, 0, 1]), tmp_path / "out")
    assert list(open_dataset(tmp_path / "out").identity_names()) == ["ann", "bob"]


def test_images_without_identities_are_refused(faces):
    with pytest.raises(DataError, match="no identities"):
        find_wrong_labels(faces[0], np.full(len(faces[0]), -1))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.08, 0.14])
def test_planted_wrong_labels_are_found_with_the_promised_precision(noise, seed):
    embedding, person = drawn(200, 10, noise, seed)
    label, wrong = planted(person, seed)
    report = find_wrong_labels(embedding, label)
    images = {one.image for one in report.wrong}
    assert len(images & wrong) >= 0.95 * len(images) and len(images & wrong) >= 0.9 * len(wrong)
    assert report.threshold.expected_false <= 0.06 * len(images) and report.separation.eer < 0.05


def planted(label, seed, share=0.05):
    """Return labels with a share of random other ones, and the images that have them."""
    rng = np.random.default_rng(seed)
    wrong = rng.choice(len(label), round(share * len(label)), replace=False)
    changed = label.copy()
    changed[wrong] = (label[wrong] + rng.integers(1, label.max() + 1, len(wrong))) % (label.max() + 1)
    return changed, set(wrong.tolist())


@pytest.mark.parametrize("noise", [0.3, 0.5, 0.9])
def test_a_weak_model_reports_little_and_a_useless_one_nothing(noise):
    embedding, person = drawn(200, 10, noise, 1)
    label, _ = planted(person, 0)
    assert len(find_wrong_labels(embedding, label).wrong) <= 0.02 * len(label)
    report = find_wrong_labels(drawn(200, 10, 30, 1)[0], label)
    assert report.separation.useless and report.wrong == []
