import numpy as np
import pytest

from facetrain.data.augment import Augment
from facetrain.data.decode import decode_rgb, encode_jpeg
from facetrain.data.formats.bin import read_bin
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.contact_sheet import augmented_sheet, identities_sheet, identity_sheet
from facetrain.data.tools.inspect import images_of, inspect
from facetrain.data.tools.pack import pack
from facetrain.data.tools.pair_lists import build_pairs
from facetrain.errors import DataError, ImageError, PairsError


def jpeg(number, size=112):
    ramp = np.linspace(0, 200, size)[:, None, None] + np.array([number * 7 % 50, 0, 30])
    return encode_jpeg(np.broadcast_to(ramp, (size, size, 3)).astype(np.uint8), 90)


@pytest.fixture
def people(tmp_path):
    for name, count in (("ann", 3), ("bob", 1), ("cy", 2)):
        (tmp_path / "people" / name).mkdir(parents=True)
        for number in range(1, count + 1):
            (tmp_path / "people" / name / f"{name}_{number:04d}.jpg").write_bytes(
                jpeg(len(name) * 10 + number)
            )
    return tmp_path / "people"


def test_packed_images_keep_their_bytes_their_order_and_their_people(people, tmp_path):
    packed = pack(people, tmp_path / "out")
    assert (packed.identities, packed.images, packed.skipped) == (3, 6, [])
    before, after = open_dataset(people), open_dataset(tmp_path / "out")
    assert after.labels.tolist() == before.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert [after.read(n) for n in range(6)] == [before.read(n) for n in range(6)]
    assert (tmp_path / "out" / "property").read_text() == "3,112,112\n"


def test_other_sizes_are_brought_to_the_one_asked_for(people, tmp_path):
    pack(people, tmp_path / "out", image_size=64)
    assert decode_rgb(open_dataset(tmp_path / "out").read(0), location="x").shape == (64, 64, 3)


def test_a_shuffle_mixes_people_and_depends_on_the_seed_alone(people, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack(people, tmp_path / name, shuffle=True, seed=seed)
    a, b, c = ((tmp_path / name / "train.rec").read_bytes() for name in "abc")
    assert a == b != c
    assert sorted(open_dataset(tmp_path / "a").labels.tolist()) == [0, 0, 0, 1, 2, 2]


def test_people_with_few_images_and_damaged_images_can_be_left_out(people, tmp_path):
    assert pack(people, tmp_path / "two", min_images_per_identity=2).identities == 2
    (people / "bob" / "bob_0001.jpg").write_bytes(b"damaged")
    with pytest.raises(ImageError, match="bob_0001"):
        pack(people, tmp_path / "strict")
    packed = pack(people, tmp_path / "lenient", skip_bad=True)
    assert (packed.identities, packed.images) == (2, 5) and "bob_0001" in packed.skipped[0]
    assert open_dataset(tmp_path / "lenient").labels.tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(DataError, match="is there already"):
        pack(people, tmp_path / "lenient")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_inspection_counts_people_images_sizes_and_formats(people, tmp_path):
    found = inspect(people)
    assert (found.images, found.identities, found.fewest, found.median, found.most) == (6, 3, 1, 2.0, 3)
    assert found.histogram == {"1": 1, "2": 1, "3": 1}
    assert found.sizes == {"112×112": 6} and found.formats == {"JPEG": 6}


def drawn(path):
    return decode_rgb(path.read_bytes(), location="x")


def test_sheets_show_identities_or_all_images_of_one(people, tmp_path):
    identities_sheet(people, tmp_path / "sheet.png", columns=3)
    assert drawn(tmp_path / "sheet.png").shape == (3 * 112, 3 * 112, 3)
    identity_sheet(people, 0, tmp_path / "ann.png", columns=2)
    shown, source = drawn(tmp_path / "ann.png"), open_dataset(people)
    for number, (top, left) in enumerate([(0, 0), (0, 112), (112, 0)]):
        expected = decode_rgb(source.read(number), location="x")
        assert (shown[top : top + 112, left : left + 112] == expected).all()
    assert (shown[112:, 112:] == 255).all()
    assert [where.split("/")[-1] for where in images_of(people, 2)] == ["cy_0001.jpg", "cy_0002.jpg"]
    with pytest.raises(DataError, match="identity 3 has no image; identities go from 0 to 2"):
        identity_sheet(people, 3, tmp_path / "nobody.png")


def test_a_sheet_of_augmentations_shows_what_training_sees(people, tmp_path):
    augmented_sheet(people, Augment(0, flip=1.0), tmp_path / "sheet.png", rows=4, epochs=2, size=64)
    shown = drawn(tmp_path / "sheet.png")
    assert shown.shape == (4 * 64, 3 * 64, 3)
    plain, *seen = np.split(shown, 3, axis=1)
    for epoch in seen:
        for row in range(4):
            part = slice(row * 64, (row + 1) * 64)
            assert (epoch[part] == plain[part, ::-1]).all()
    augmented_sheet(people, Augment(0, flip=0.0, gray=1.0), tmp_path / "gray.png", epochs=1)
    gray = drawn(tmp_path / "gray.png")[:, 112:]
    assert (gray[..., 0] == gray[..., 2]).all()


def test_a_list_of_pairs_becomes_a_verification_set(people, tmp_path):
    (tmp_path / "pairs.txt").write_text("1\t1\nann\t1\t3\nann\t2\tcy\t1\n")
    assert build_pairs(tmp_path / "pairs.txt", people, tmp_path / "set.bin") == (2, 1)
    images, same = read_bin(tmp_path / "set.bin")
    assert same.tolist() == [True, False]
    assert images[3] == (people / "cy" / "cy_0001.jpg").read_bytes()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ann 1 9", "line 1: there is no"),
        ("ann", "neither"),
        ("../ann 1 2", "no image"),
        ("ann x 2", "no image"),
        ("", "no pairs"),
    ],
)
def test_a_wrong_line_of_a_list_is_named(people, tmp_path, line, said):
    (tmp_path / "pairs.txt").write_text(line + "\n")
    with pytest.raises(PairsError, match=said):
        build_pairs(tmp_path / "pairs.txt", people, tmp_path / "set.bin")
