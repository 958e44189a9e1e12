from facetrain.data.tools.inspect import inspect


def test_identities_images_sizes_and_formats_are_counted(dataset, tmp_path):
    found = inspect(dataset)
    assert (found.images, found.identities, found.fewest, found.median, found.most) == (6, 3, 1, 2.0, 3)
    assert found.histogram == {"1": 1, "2": 1, "3": 1}
    assert found.sizes == {"112×112": 6} and found.formats == {"JPEG": 6}
