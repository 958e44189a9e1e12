from facetrain.data.dataset import identity_name
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.inspect import find_identity, inspect
from tests.support.datasets import encoded_image, write_records


def test_identities_images_sizes_and_formats_are_counted(dataset, tmp_path):
    found = inspect(dataset)
    assert (found.images, found.identities, found.fewest, found.median, found.most) == (6, 3, 1, 2.0, 3)
    assert found.histogram == {"1": 1, "2": 1, "3": 1}
    assert found.sizes == {"112×112": 6} and found.formats == {"JPEG": 6}


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
    for label in (0, 4, 7, 12, 14, 15, 19, 25):
        assert find_identity(mixture, str(label)) == label
        assert identity_name(open_dataset(mixture), label) == str(label)
    assert [find_identity(mixture, name) for name in ("007", "20", "ann")] == [26, 27, 28]
