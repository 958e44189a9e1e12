import numpy as np

from facetrain.data.images.copies import different_images


def test_of_equal_images_the_first_one_counts_and_none_if_their_labels_differ():
    images, labels = [b"c", b"a", b"c", b"b", b"a", b"d", b"b"], [0, 1, 0, 2, 1, 3, 4]
    different, disputed = different_images(images, np.array(labels))
    assert different.tolist() == [0, 1, 5] and disputed.tolist() == [3, 6]
    assert [one.tolist() for one in different_images([], np.array([], int))] == [[], []]
