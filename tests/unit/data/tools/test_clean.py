import numpy as np
import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools import clean as clean_module
from facetrain.data.tools import similarity
from facetrain.data.tools.clean import CleanReport, find_label_faults, write_cleaned
from facetrain.data.tools.overlap import find_overlap
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records
from tests.unit.data.tools.helpers import EACH, IDENTITIES, SIZE, unit


def found(report, kind):
    return [fault for fault in report.faults if fault.kind == kind]


def same_partition(one, other):
    return (
        len({*zip(one.tolist(), other.tolist(), strict=True)}) == len(np.unique(one)) == len(np.unique(other))
    )


def test_right_labels_are_not_changed(faces):
    report = find_label_faults(*faces)
    assert report.faults == [] and same_partition(report.label_N, faces[1])


def test_blocks_give_the_same_result_as_all_embeddings_at_once(faces, monkeypatch):
    embedding, label = faces[0], faces[1].copy()
    label[[3, 50, 90]] = [7, 8, 9]
    label[4:8] = IDENTITIES
    whole, overlapping = find_label_faults(embedding, label), find_overlap(embedding, label, embedding[::9])
    monkeypatch.setattr(similarity, "_BLOCK_NUMBERS", 7 * SIZE)
    blocks, again = find_label_faults(embedding, label), find_overlap(embedding, label, embedding[::9])
    assert (blocks.label_N == whole.label_N).all() and blocks.threshold == whole.threshold
    assert [vars(one) | {"similarity": 0} for one in blocks.faults] == [
        vars(one) | {"similarity": 0} for one in whole.faults
    ]
    assert [one.image for one in again[1]] == [one.image for one in overlapping[1]] and len(
        overlapping[1]
    ) == 36


def test_an_identity_with_very_many_images_is_split_by_some_of_them(faces, monkeypatch):
    embedding, person = faces
    label = np.where(person == 1, 0, person)
    monkeypatch.setattr(clean_module, "_MAX_SEED_CANDIDATES", 6)
    assert [fault.identity for fault in found(find_label_faults(embedding, label), "mixed_identity")] == [0]
    monkeypatch.setattr(clean_module, "_MAX_SEED_CANDIDATES", 1)
    assert not found(find_label_faults(embedding, label), "mixed_identity"), (
        "a single candidate gives no second seed"
    )


def test_mislabeled_images_get_the_label_of_their_identity(faces):
    embedding, person = faces
    label = person.copy()
    label[[3, 50, 90]] = [7, 8, 9]
    report = find_label_faults(embedding, label)
    assert {one.image: (one.identity, one.other) for one in found(report, "mislabeled_image")} == {
        3: (7, 0), 50: (8, 6), 90: (9, 11),
    }  # fmt: skip
    assert same_partition(report.label_N, person)


def test_duplicate_identities_are_merged(faces):
    embedding, person = faces
    label = person.copy()
    label[4:8] = IDENTITIES
    report = find_label_faults(embedding, label)
    assert [(one.identity, one.other) for one in report.faults if one.kind == "duplicate_identity"] == [
        (0, IDENTITIES)
    ]
    assert same_partition(report.label_N, person)


def test_a_mixed_identity_is_split(faces):
    embedding, person = faces
    label = np.where(person == 5, 2, person)
    report = find_label_faults(embedding, label)
    assert [one.identity for one in report.faults] == [2] and report.faults[0].kind == "mixed_identity"
    assert same_partition(report.label_N, person)


def test_an_image_that_matches_no_identity_is_left_out(faces):
    embedding, person = faces
    embedding[10] = unit(np.random.default_rng(9).normal(size=SIZE))
    report = find_label_faults(embedding, person)
    assert [one.image for one in found(report, "outlier_image")] == [10]
    assert np.flatnonzero(report.label_N < 0).tolist() == [10]


def test_the_only_image_of_an_identity_is_not_a_fault(faces):
    embedding, person = faces
    alone = np.append(np.arange(0, 10 * EACH), 10 * EACH)
    assert find_label_faults(embedding[alone], person[alone]).faults == []


def test_a_cleaned_dataset_is_written_with_the_corrected_labels(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 2, 2])
    report = CleanReport(0.5, [], np.array([0, 0, 0, -1, 2]))
    written = write_cleaned(data, report, tmp_path / "out")
    assert (written.identities, written.images) == (2, 4)
    source = open_dataset(tmp_path / "out")
    assert source.labels.tolist() == [0, 0, 0, 1] and source.read(3) == encoded_image(5)
    with pytest.raises(DataError, match="no image matches"):
        write_cleaned(data, CleanReport(0.5, [], np.full(5, -1)), tmp_path / "none")


def test_images_without_identities_are_refused(faces):
    unlabeled = np.full(len(faces[0]), -1)
    with pytest.raises(DataError, match="no identities"):
        find_label_faults(faces[0], unlabeled)
    with pytest.raises(DataError, match="no identities"):
        find_overlap(faces[0], unlabeled, faces[0])


def test_faults_name_identities_of_the_dataset_after_splits_and_merges(faces):
    embedding, person = faces
    label = np.where(person == 5, 2, person)  # identity 2 shows two people: it is split
    label[(person == 9) & (np.arange(len(person)) % 2 == 0)] = (
        IDENTITIES  # identity 9 is stored twice: merged
    )
    label[np.flatnonzero(person == 30)[0]] = 2
    label[np.flatnonzero(person == 5)[0]] = 17
    report = find_label_faults(embedding, label)
    known = set(label.tolist())
    assert {one.identity for one in report.faults} <= known
    assert {one.other for one in report.faults} - {-1} <= known
    moved = [one for one in report.faults if one.kind == "mislabeled_image"]
    assert all(one.identity == label[one.image] for one in moved) and (17, 2) in {
        (one.identity, one.other) for one in moved
    }


def test_the_error_of_the_model_on_the_dataset_is_measured(faces):
    embedding, person = faces
    assert find_label_faults(embedding, person).confusion == 0
    weak = unit(np.random.default_rng(1).normal(size=embedding.shape))
    report = find_label_faults(weak, person)
    assert report.confusion > 0.5 and report.cut_images > 0.05 * len(person)
    merged = CleanReport(0.5, [], np.array([0, 0, 0, -1]))
    assert merged.cut_identities(np.array([0, 1, 2, 3])) == 3
