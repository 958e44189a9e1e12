import numpy as np

from facetrain.data.tools.overlap import find_overlap
from tests.unit.data.tools.helpers import EACH, SIZE, unit


def test_identities_of_the_test_set_are_found_and_no_others(faces):
    embedding, person = faces
    trained, in_both = (person < 30) & (np.arange(len(person)) % EACH < 5), np.isin(person, [3, 17])
    tested = (in_both & ~trained) | (person >= 35)
    report = find_overlap(embedding[trained], person[trained], embedding[tested])
    found = report.overlapping
    assert report.separation.eer < 0.01 and report.threshold.expected_false < 0.1
    assert sorted(one.identity for one in found) == [3, 17]
    numbers, test_person = person[trained], person[tested]
    for one in found:
        assert numbers[one.image] == test_person[one.test_image] == one.identity
        assert one.test_images == 3


def test_a_model_that_cannot_tell_identities_apart_finds_no_overlap(faces):
    _, person = faces
    random = unit(np.random.default_rng(0).normal(size=(len(person), SIZE)))
    report = find_overlap(random[::2], person[::2], random[1::2])
    assert report.overlapping == [] and report.separation.useless
