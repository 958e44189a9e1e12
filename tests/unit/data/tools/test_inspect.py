from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.inspect import describe_images


def test_identities_images_sizes_and_formats_are_counted(dataset):
    expected = {"images": 6, "identities": 3, "identities_without_images": 0, "fewest": 1, "median": 2.0, "most": 3,
                "sample": 6, "sizes": {"112×112": 6},
                "formats": {"JPEG": 6}}  # fmt: skip
    assert describe_images(open_dataset(dataset)) == expected
