from facetrain.data.dataset import identity_name
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.inspect import count_images, find_identity
from tests.support.datasets import encoded_image, write_records


def test_identities_images_sizes_and_formats_are_counted(dataset, tmp_path):
    expected = {"images": 6, "identities": 3, "identities_without_images": 0, "fewest": 1, "median": 2.0, "most": 3,
                "histogram": {"1": 1, "2": 1, "3": 1}, "sample": 6, "sizes": {"112×112": 6},
                "formats": {"JPEG": 6}}  # fmt: skip
    assert count_images(open_dataset(dataset)) == expected


def test_the_number_of_an_identity_without_a_name_is_its_label_in_the_mixture(tmp_path):
    for name, identities in (("five", 5), ("ten", 10), ("filtered", 20)):
        write_records(tmp_path / name, range(identities))
    for name in ("ann", "007", "20"):
        (tmp_path / "named" / name).mkdir(parents=True)
        (tmp_path / "named" / name / "1.png").write_bytes(encoded_image(0))
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(9, 20))))
    mixture = tmp_path / "mix.yaml"
    entries = ["five", "ten", "filtered\n    identities: keep.txt", "named"]
    mixture.write_text("datasets:\n" + "".join(f"  - path: {entry}\n" for entry in entries))
    source = open_dataset(mixture)
    for label in (0, 4, 7, 12, 14, 15, 19, 25):
        assert find_identity(source, str(label), mixture) == label
        assert identity_name(source, label) == str(label)
    assert [find_identity(source, name, mixture) for name in ("007", "20", "ann")] == [26, 27, 28]
