import numpy as np

from facetrain.data.tools.overlap import find_overlap
from tests.unit.data.tools.helpers import EACH


def test_identities_of_the_test_set_are_found_and_no_others(faces):
    embedding, person = faces
    trained, in_both = (person < 30) & (np.arange(len(person)) % EACH < 5), np.isin(person, [3, 17])
    tested = (in_both & ~trained) | (person >= 35)
    _, found = find_overlap(embedding[trained], person[trained], embedding[tested])
    assert sorted(one.identity for one in found) == [3, 17]
    numbers, test_person = person[trained], person[tested]
    for one in found:
        assert numbers[one.image] == test_person[one.test_image] == one.identity
        assert one.test_images == 3
