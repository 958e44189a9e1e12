import pytest

from facetrain.data.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.pack import pack
from facetrain.errors import DataError, ImageError


def test_packed_images_keep_their_bytes_order_and_identities(dataset, tmp_path):
    packed = pack(dataset, tmp_path / "out")
    assert (packed.identities, packed.images, packed.skipped) == (3, 6, [])
    before, after = open_dataset(dataset), open_dataset(tmp_path / "out")
    assert after.labels.tolist() == before.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert [after.read(n) for n in range(6)] == [before.read(n) for n in range(6)]
    assert (tmp_path / "out" / "property").read_text() == "3,112,112\n"


def test_images_are_resized_to_the_image_size(dataset, tmp_path):
    pack(dataset, tmp_path / "out", image_size=64)
    assert decode_rgb(open_dataset(tmp_path / "out").read(0), location="x").shape == (64, 64, 3)


def test_a_shuffle_depends_only_on_the_seed(dataset, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack(dataset, tmp_path / name, shuffle=True, seed=seed)
    a, b, c = ((tmp_path / name / "train.rec").read_bytes() for name in "abc")
    assert a == b != c
    assert sorted(open_dataset(tmp_path / "a").labels.tolist()) == [0, 0, 0, 1, 2, 2]


def test_small_identities_and_damaged_images_can_be_left_out(dataset, tmp_path):
    assert pack(dataset, tmp_path / "two", min_images_per_identity=2).identities == 2
    (dataset / "bob" / "bob_0001.jpg").write_bytes(b"damaged")
    with pytest.raises(ImageError, match="bob_0001"):
        pack(dataset, tmp_path / "strict")
    packed = pack(dataset, tmp_path / "lenient", skip_bad=True)
    assert (packed.identities, packed.images) == (2, 5) and "bob_0001" in packed.skipped[0]
    assert open_dataset(tmp_path / "lenient").labels.tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(DataError, match="already exists"):
        pack(dataset, tmp_path / "lenient")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
