import csv
import os

import cv2
import numpy as np
import pytest

from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.data.images.header import jpeg_orientation
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import SKIP_KINDS
from facetrain.data.tools.pack import pack
from facetrain.errors import DataError, ImageError
from tests.support.datasets import encoded_image
from tests.support.exif import turned_jpeg


def test_packed_images_keep_their_bytes_order_and_identities(dataset, tmp_path):
    packed = pack(dataset, tmp_path / "out")
    assert (packed.identities, packed.images, packed.skipped, packed.resized) == (3, 6, [], 0)
    before, after = open_dataset(dataset), open_dataset(tmp_path / "out")
    assert after.labels.tolist() == before.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert [after.read(n) for n in range(6)] == [before.read(n) for n in range(6)]
    assert (tmp_path / "out" / "property").read_text() == "3,112,112\n"


def test_damaged_images_can_be_left_out(dataset, tmp_path):
    (dataset / "bob" / "bob_0001.jpg").write_bytes(b"damaged")
    with pytest.raises(ImageError, match="bob_0001"):
        pack(dataset, tmp_path / "strict")
    packed = pack(dataset, tmp_path / "lenient", skip_bad=True)
    assert (packed.identities, packed.images) == (2, 5) and packed.skipped[0].name == "bob/bob_0001.jpg"
    assert packed.lost_identities == ["bob"]
    assert open_dataset(tmp_path / "lenient").labels.tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(DataError, match="already exists"):
        pack(dataset, tmp_path / "lenient")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_every_format_is_packed_and_images_are_turned_upright(tmp_path):
    (tmp_path / "photos" / "ann").mkdir(parents=True)
    image = np.full((120, 90, 3), 60, np.uint8)
    image[:60, :45] = 220
    suffixes = [suffix for suffix in (".pgm", ".ppm", ".webp", ".tif", ".bmp", ".JPG", ".avif")
                if cv2.haveImageWriter(suffix.lower())]  # fmt: skip
    for suffix in suffixes:
        gray = image[..., 0] if suffix == ".pgm" else image
        (tmp_path / "photos" / "ann" / f"a{suffix}").write_bytes(cv2.imencode(suffix.lower(), gray)[1])
    (tmp_path / "photos" / "ann" / "turned.jpg").write_bytes(turned_jpeg(np.rot90(image).copy(), 6))
    packed = pack(tmp_path / "photos", tmp_path / "out", image_size=90)
    assert (packed.images, packed.skipped, packed.resized) == (len(suffixes) + 1, [], len(suffixes) + 1)
    source, expected = open_dataset(tmp_path / "out"), resize_square(image, 90)
    for number in range(source.num_images):
        found = decode_rgb(source.read(number), location="x")
        blocks = cv2.resize(found, (3, 3), interpolation=cv2.INTER_AREA).astype(int)
        assert np.abs(blocks - cv2.resize(expected, (3, 3), interpolation=cv2.INTER_AREA)).max() < 16


def test_training_on_the_folder_and_on_the_packed_folder_sees_the_same_pixels(tmp_path):
    (tmp_path / "photos" / "ann").mkdir(parents=True)
    image = np.zeros((112, 112, 3), np.uint8)
    image[:56, :56] = 255
    turned = turned_jpeg(np.rot90(image).copy(), 6)
    (tmp_path / "photos" / "ann" / "1.jpg").write_bytes(turned)
    pack(tmp_path / "photos", tmp_path / "out")
    before, after = (open_dataset(tmp_path / name).read(0) for name in ("photos", "out"))
    assert after != turned and jpeg_orientation(after) == 1, "other programs would show the image turned"
    one, other = (decode_rgb(data, location="x").astype(int) for data in (before, after))
    assert np.abs(one - other).mean() < 3 and np.abs(one - image).mean() < 3


def test_everything_that_is_left_out_is_listed(dataset, tmp_path):
    (dataset / "dataset_card.yaml").write_text("name: faces\n")  # read, not left out
    (dataset / "notes.txt").write_text("who is who")
    (dataset / "=1+1.txt").write_text("a formula for a spreadsheet")
    (dataset / ".DS_Store").write_bytes(b"x")
    (dataset / "ann" / "._ann_0001.jpg").write_bytes(b"resource fork")
    (dataset / "ann" / "ann.raw").write_bytes(b"x")
    (dataset / "ann" / "empty.jpg").write_bytes(b"")
    (dataset / "ann" / "more" / "deep").mkdir(parents=True)
    (dataset / "ann" / "more" / "deep" / "x.jpg").write_bytes((dataset / "bob" / "bob_0001.jpg").read_bytes())
    (dataset / "zoe").mkdir()
    (dataset / "lost+found").mkdir()
    (dataset / "lost+found" / "x.jpg").write_bytes((dataset / "bob" / "bob_0001.jpg").read_bytes())
    for link in ("eve", "ann/gone.jpg"):
        (dataset / link).symlink_to(tmp_path / "unmounted" / link)
    packed = pack(dataset, tmp_path / "out", skip_bad=True)
    found = {one.name: (one.kind, one.reason) for one in packed.skipped}
    assert {name: kind for name, (kind, _) in found.items()} == {
        "notes.txt": "no_identity", "=1+1.txt": "no_identity", ".DS_Store": "hidden",
        "ann/._ann_0001.jpg": "hidden", "ann/ann.raw": "suffix",
        "ann/empty.jpg": "unreadable", "ann/gone.jpg": "unreadable", "ann/more": "nested", "zoe": "empty",
        "lost+found": "special", "eve": "special",
    }  # fmt: skip
    assert "the file is empty" in found["ann/empty.jpg"][1]
    rows = list(csv.reader((tmp_path / "out" / "skipped.csv").read_text(encoding="utf-8").splitlines()))
    names = {row[0] for row in rows[1:]}
    assert rows[0] == ["file", "kind", "reason"] and names ^ set(found) == {"=1+1.txt", "'=1+1.txt"}
    assert set(SKIP_KINDS) >= {kind for kind, _ in found.values()}
    with pytest.raises(ImageError, match="--skip-bad"):
        pack(dataset, tmp_path / "strict")


def test_missing_files_of_a_list_are_reported_at_once(dataset, tmp_path):
    lines = [f"bob/{name}.jpg\tbob\n" for name in ("a", "b", "bob_0001", "c", "d")]
    (dataset / "people.txt").write_text("".join(lines))
    message = rf"txt: 4 of its 5 files do not exist \({dataset}/bob/a\.jpg, .*b\.jpg, .*c\.jpg, …\); give the folder"
    with pytest.raises(DataError, match=message):
        pack(dataset / "people.txt", tmp_path / "strict")
    packed = pack(dataset / "people.txt", tmp_path / "out", skip_bad=True)
    assert packed.images == 1 and len(packed.skipped) == 4


def test_a_list_may_name_files_with_characters_that_messages_escape(dataset, tmp_path):
    name = "bob/\u202abob_0001.jpg"
    (dataset / "bob" / "bob_0001.jpg").rename(dataset / name)
    (dataset / "people.txt").write_text(f"{name}\tbob\n", encoding="utf-8")
    assert pack(dataset / "people.txt", tmp_path / "out").images == 1


def test_images_directly_in_a_folder_need_a_list_of_their_people(dataset, tmp_path):
    with pytest.raises(DataError, match=r"`photo1\.jpg ann`"):
        pack(dataset / "ann", tmp_path / "out")


def test_names_that_are_not_utf8_are_written_as_escapes(tmp_path):
    folder = os.fsencode(tmp_path / "photos") + b"/caf\xe9"
    os.makedirs(folder)
    with open(folder + b"/a\nb.png", "wb") as file:
        file.write(encoded_image(0, 112))
    pack(tmp_path / "photos", tmp_path / "out")
    source = open_dataset(tmp_path / "out")
    assert (source.identity_name(0), source.name(0)) == (r"caf\xe9", r"caf\xe9/a\nb.png")
