from dataclasses import replace

import numpy as np
import pytest

from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import write_subjects
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.pair_protocol import verification_result
from facetrain.verify.sets.known_subjects import TABLE, known_subjects
from facetrain.verify.sets.pair_set import known_or_inferred_subjects, load_pair_set

PEOPLE = {"lfw": 4281, "cfp_fp": 500, "cfp_ff": 500}


def published(name):
    """Return the images of a set, each a few bytes, its labels and its subjects."""
    with np.load(TABLE) as table:
        image, subject = table[f"{name}_image"], table[f"{name}_subject"].astype(int)
    return [b"image %d" % number for number in image], subject[0::2] == subject[1::2], subject


@pytest.mark.parametrize("name", PEOPLE)
def test_a_published_set_is_recognized_by_its_repeated_images(name):
    images, same, subject = published(name)
    found = known_subjects(images, same)
    assert np.array_equal(found, subject) and np.unique(found).size == PEOPLE[name]
    fold = len(same) // 10
    assert np.array_equal(same, np.tile(np.arange(fold) < fold // 2, 10))
    # Other alignments and encodings have other bytes at the same places.
    assert np.array_equal(known_subjects([b"png" + image for image in images], same), subject)


def test_a_set_that_differs_in_one_place_is_not_recognized():
    images, same, subject = published("lfw")
    repeated = next(n for n, image in enumerate(images) if image in images[:n])
    assert known_subjects([*images[:repeated], b"other", *images[repeated + 1 :]], same) is None
    other = next(n for n in range(len(images)) if subject[n] != subject[0])
    two_people = [images[0] if image == images[other] else image for image in images]
    assert known_subjects(two_people, same) is None
    assert known_subjects(images, ~same) is None
    assert known_subjects(images[:2400], same[:1200]) is None
    # The labels of AgeDB-30, CALFW and CPLFW are those of LFW, but not the repeated images.
    assert known_subjects([b"%d" % n for n in range(12_000)], same) is None
    assert known_subjects([b"%d" % person for person in subject], same) is None


def test_two_files_of_one_person_may_be_equal_as_in_cfp():
    images, same, subject = published("cfp_ff")
    twin = next(n for n in range(1, len(images)) if subject[n] == subject[0] and images[n] != images[0])
    images = [images[0] if image == images[twin] else image for image in images]
    assert np.array_equal(known_subjects(images, same), subject)


def test_the_bootstrap_draws_the_people_of_a_published_set(tmp_path):
    images, same, subject = published("cfp_fp")
    write_bin(tmp_path / "profiles.bin", images, same.tolist())
    pairs = load_pair_set("profiles", tmp_path)
    assert np.unique(known_or_inferred_subjects(replace(pairs, subject=None))).size == 2459
    embedding = np.random.default_rng(0).normal(size=(500, 8))[subject]
    result = verification_result(embedding, embedding, pairs, draws=Draws(2))
    assert result.subjects == 500


def test_the_table_beside_a_set_goes_before_the_published_list(tmp_path):
    images, same, subject = published("cfp_ff")
    write_bin(tmp_path / "a.bin", images, same.tolist())
    write_subjects(tmp_path / "a.bin", [f"{person:03d}" for person in subject])
    assert np.unique(load_pair_set("a", tmp_path).subject).size == 500
    write_bin(tmp_path / "b.bin", [b"%d" % n for n in range(4)], [True, False])
    assert load_pair_set("b", tmp_path).subject is None
