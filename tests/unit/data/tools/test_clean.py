import tracemalloc

import numpy as np
import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools import identity_groups, similarity
from facetrain.data.tools.clean import find_label_faults
from facetrain.data.tools.label_faults import apply_faults
from facetrain.data.tools.overlap import find_overlap
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records
from tests.unit.data.tools.helpers import EACH, IDENTITIES, SIZE, unit, write_cleaned


def drawn(identities, each, noise, seed):
    """Return embeddings of identities with this noise per dimension, of 64, and the identities."""
    rng = np.random.default_rng(seed)
    person = np.repeat(np.arange(identities), each)
    center = unit(rng.normal(size=(identities, SIZE)))
    return unit(center[person] + noise * rng.normal(size=(len(person), SIZE))), person


def found(report, kind):
    return [fault for fault in report.faults if fault.kind == kind]


def same_partition(one, other):
    return (
        len({*zip(one.tolist(), other.tolist(), strict=True)}) == len(np.unique(one)) == len(np.unique(other))
    )


def test_right_labels_and_the_only_image_of_an_identity_are_not_changed(faces):
    embedding, person = faces
    for rows in (np.arange(len(person)), np.append(np.arange(0, 10 * EACH), 10 * EACH)):
        report = find_label_faults(embedding[rows], person[rows])
        assert report.faults == [] and same_partition(report.label_N, person[rows])


def test_blocks_give_the_same_result_as_all_embeddings_at_once(faces, monkeypatch):
    embedding, label = faces[0], labels_of(labels_of(faces[1], "mislabeled"), "duplicate")
    whole, overlapping = find_label_faults(embedding, label), find_overlap(embedding, label, embedding[::9])
    monkeypatch.setattr(similarity, "_BLOCK_NUMBERS", 7 * SIZE)
    blocks, again = find_label_faults(embedding, label), find_overlap(embedding, label, embedding[::9])
    assert (blocks.label_N == whole.label_N).all()
    assert [vars(one) | {"similarity": 0} for one in blocks.faults] == [
        vars(one) | {"similarity": 0} for one in whole.faults
    ]
    assert [one.image for one in again.overlapping] == [one.image for one in overlapping.overlapping]
    assert len(overlapping.overlapping) == 36


def test_labels_with_large_gaps_give_the_faults_of_labels_without_gaps(faces):
    embedding, person = faces
    label = person.copy()
    label[[98, 50, 91]] = [7, 8, 9]
    label[person == 1] = 0
    label[5 * EACH : 5 * EACH + EACH // 2] = IDENTITIES
    spread = label * 1000
    spread[label == IDENTITIES] = 2**31 - 1
    tracemalloc.start()
    wide, overlapping = (
        find_label_faults(embedding, spread),
        find_overlap(embedding, spread, embedding),
    )
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()
    dense = find_label_faults(embedding, label)
    # −1 is the last one, the group of the mixed identity the one before.
    label_of = np.array([*range(0, IDENTITIES * 1000, 1000), 2**31 - 1, 2**31, -1])
    assert {one.kind for one in dense.faults} == {"mixed_identity", "duplicate_identity", "mislabeled_image"}
    for one, other in zip(dense.faults, wide.faults, strict=True):
        numbers = [int(label_of[number]) for number in (one.identity, one.other, one.target)]
        assert [other.identity, other.other, other.target] == numbers
        assert (one.kind, one.image, one.images) == (other.kind, other.image, other.images)
    assert (wide.label_N == label_of[dense.label_N]).all()
    found = find_overlap(embedding, label, embedding).overlapping
    assert (
        [label_of[one.identity] for one in found] == [one.identity for one in overlapping.overlapping] != []
    )


def test_an_identity_with_very_many_images_is_split_by_some_of_them(faces, monkeypatch):
    embedding, person = faces
    label = np.where(person == 1, 0, person)
    for candidates, expected in ((6, [0]), (1, [])):  # a single candidate gives no second seed
        monkeypatch.setattr(identity_groups, "_MAX_SEED_CANDIDATES", candidates)
        mixed = found(find_label_faults(embedding, label), "mixed_identity")
        assert [fault.identity for fault in mixed] == expected


def labels_of(person, change):
    label = person.copy()
    if change == "mislabeled":
        label[[3, 50, 91]] = [7, 8, 9]
    elif change == "mixed":
        label[person == 5] = 2
    else:
        label[4:8] = IDENTITIES
    return label


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ("mislabeled", "mislabeled_image", {(7, 0, (3,)), (8, 6, (50,)), (9, 11, (91,))}),
        ("mixed", "mixed_identity", {(2, -1, tuple(range(16, 24))), (2, -1, tuple(range(40, 48)))}),
        ("duplicate", "duplicate_identity", {(0, IDENTITIES, ())}),
    ],
)
def test_wrong_labels_are_found_and_corrected(faces, change, kind, expected):
    embedding, person = faces
    label = labels_of(person, change)
    report = find_label_faults(embedding, label)
    assert {one.kind for one in report.faults} == {kind}
    assert {(one.identity, one.other, one.images) for one in report.faults} <= expected
    assert same_partition(apply_faults(label, report.faults), person)


def test_duplicate_identities_are_reported_but_not_merged(faces):
    embedding, person = faces
    label = labels_of(person, "duplicate")
    report = find_label_faults(embedding, label)
    assert [(one.kind, one.identity, one.other) for one in report.faults] == [
        ("duplicate_identity", 0, IDENTITIES)
    ]
    assert (report.label_N == label).all(), "no image moves between two identities of one person either"
    assert report.expected_false == report.thresholds["mislabeled_image"].expected_false < 0.5


def test_an_image_that_matches_no_identity_is_left_out(faces):
    embedding, person = faces
    embedding[10] = unit(np.random.default_rng(9).normal(size=SIZE))
    report = find_label_faults(embedding, person)
    assert [one.image for one in found(report, "outlier_image")] == [10]
    assert np.flatnonzero(report.label_N < 0).tolist() == [10]


def test_a_cleaned_dataset_is_written_with_the_corrected_labels(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 2, 2])
    written = write_cleaned(data, np.array([0, 0, 0, -1, 2]), tmp_path / "out")
    assert (written.identities, written.images) == (2, 4)
    source = open_dataset(tmp_path / "out")
    assert source.labels.tolist() == [0, 0, 0, 1] and source.read(3) == encoded_image(5)
    with pytest.raises(DataError, match="no image is left"):
        write_cleaned(data, np.full(5, -1), tmp_path / "none")


def test_images_without_identities_are_refused(faces):
    unlabeled = np.full(len(faces[0]), -1)
    with pytest.raises(DataError, match="no identities"):
        find_label_faults(faces[0], unlabeled)
    with pytest.raises(DataError, match="no identities"):
        find_overlap(faces[0], unlabeled, faces[0])


def test_faults_name_identities_of_the_dataset_after_splits(faces):
    embedding, person = faces
    label = np.where(person == 5, 2, person)  # identity 2 shows two people: it is split
    label[(person == 9) & (np.arange(len(person)) % 2 == 0)] = IDENTITIES  # identity 9 is stored twice
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


def planted(label, seed, share=0.05):
    """Return labels with a share of random other ones, and which they are."""
    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(label), bool)
    wrong[rng.choice(len(label), round(share * len(label)), replace=False)] = True
    other = (label + rng.integers(1, label.max() + 1, len(label))) % (label.max() + 1)
    return np.where(wrong, other, label), wrong


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.08, 0.14])
def test_planted_wrong_labels_are_found_with_the_promised_precision(noise, seed):
    embedding, person = drawn(200, 10, noise, seed)
    label, wrong = planted(person, seed)
    report = find_label_faults(embedding, label)
    images = {one.image for one in report.faults if one.image >= 0}
    right = len(images & set(np.flatnonzero(wrong).tolist()))
    assert right >= 0.95 * len(images) and right >= 0.9 * wrong.sum()
    assert report.expected_false <= 0.06 * len(report.faults) and report.separation.eer < 0.05


@pytest.mark.parametrize("noise", [0.3, 0.5, 0.9])
def test_a_weak_model_reports_little_and_a_useless_one_nothing(noise):
    embedding, person = drawn(200, 10, noise, 1)
    label, _ = planted(person, 0)
    report = find_label_faults(embedding, label)
    assert (report.label_N != label).sum() <= 0.02 * len(label)
    assert "weak" in report.separation.sentence() or "cannot separate them" in report.separation.sentence()
    random = drawn(200, 10, 30, 1)[0]
    report = find_label_faults(random, label)
    assert report.separation.useless and report.faults == [] and (report.label_N == label).all()


def test_decisions_apply_in_any_order_and_without_each_other(faces):
    embedding, person = faces
    label = np.where(person == 5, 2, person)
    label[4:8] = IDENTITIES
    label[[91, 200]] = [7, 8]
    report = find_label_faults(embedding, label)
    assert {one.kind for one in report.faults} == {"mixed_identity", "duplicate_identity", "mislabeled_image"}
    assert (apply_faults(label, report.faults[::-1]) == apply_faults(label, report.faults)).all()
    assert (apply_faults(label, []) == label).all(), "no decision, no change"
    for one in report.faults:
        changed = np.flatnonzero(apply_faults(label, [one]) != label).tolist()
        assert changed == (list(one.images) or np.flatnonzero(label == one.other).tolist())
