from facetrain.data.images.copies import different_images


def test_of_equal_images_the_first_one_counts():
    assert different_images([b"c", b"a", b"c", b"b", b"a", b"d"]).tolist() == [0, 1, 3, 5]
