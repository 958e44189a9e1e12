"""Images that a fine-tuning holds out, and their pairs."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from facetrain.finetune.held_out import (
    Part,
    _pair_of,
    held_out_counts,
    require_enough,
    split_photos,
    write_photo_pairs,
)
from facetrain.verify.sets.pair_set import load_pair_set
from tests.support.datasets import write_records


def test_people_with_few_images_are_trained_on_with_all_of_them():
    images = np.array([1, 3, 4, 5, 10, 20, 30, 500])
    assert held_out_counts(images).tolist() == [0, 0, 2, 2, 3, 6, 9, 10]


def test_people_are_set_aside_whole_and_images_of_the_others_held_out_at_random():
    images = {0: 3, 1: 4, 2: 10, 7: 20, 9: 4, 11: 5}
    labels = np.random.default_rng(0).permutation(np.repeat(list(images), list(images.values())))
    part = split_photos(labels)
    aside = Counter(labels[part == Part.SET_ASIDE].tolist())
    assert len(aside) == 2 and all(images[person] == count >= 4 for person, count in aside.items())
    held_out = Counter(labels[part == Part.HELD_OUT].tolist())
    expected = {1: 2, 2: 3, 7: 6, 9: 2, 11: 2}
    assert held_out == {person: count for person, count in expected.items() if person not in aside}
    assert np.array_equal(part, split_photos(labels))
    assert not np.array_equal(part, split_photos(labels, seed=1))


@pytest.mark.parametrize("images", [[1, 1], [30], [1] * 500, [4] * 11, [20] * 11, [3] * 100])
def test_too_few_photos_are_refused_with_what_would_help(images, tmp_path):
    with pytest.raises(DataError, match=r"12 people with 4 images"):
        require_enough(np.repeat(np.arange(len(images)), images), tmp_path)


@pytest.mark.parametrize("images", [[4] * 12, [4] * 17, [1] * 500 + [5] * 12])
def test_enough_photos_are_accepted_and_at_least_ten_people_judge(images, tmp_path):
    labels = np.repeat(np.arange(len(images)), images)
    require_enough(labels, tmp_path)
    assert len(np.unique(labels[split_photos(labels) == Part.HELD_OUT])) >= 10


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_rank_among_the_pairs_is_that_of_their_list(count):
    images = list(range(10, 10 + count))
    expected = list(combinations(images, 2))
    assert [_pair_of(images, rank) for rank in range(len(expected))] == expected


@pytest.mark.parametrize(("images", "pairs"), [([2, 2], 2), ([2, 10], 20), ([3] * 20, 60)])
def test_pairs_are_distinct_and_half_of_them_genuine_in_every_fold(images, pairs, tmp_path):
    labels = np.repeat(np.arange(len(images)), images).tolist()
    write_photo_pairs(write_records(tmp_path / "data", labels), tmp_path / "set.bin")
    source = open_dataset(tmp_path / "data")
    label_of = {source.read(n): label for n, label in enumerate(source.labels.tolist())}
    written = load_pair_set("set", tmp_path)
    sides = [(written.images[2 * n], written.images[2 * n + 1]) for n in range(2 * pairs)]
    assert len({frozenset(side) for side in sides}) == 2 * pairs
    assert [label_of[one] == label_of[other] for one, other in sides] == [True, False] * pairs
    assert written.same.tolist() == [True, False] * pairs and written.subject is not None
