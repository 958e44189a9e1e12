from pathlib import PurePath

import pytest

from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.convert import convert
from facetrain.data.tools.unpack import unpack
from facetrain.errors import ImageError
from tests.support.datasets import encoded_image, images_of, write_records
from tests.unit.data.tools.helpers import grouped_images


def test_unpacked_files_have_the_bytes_of_the_records(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 1, 1, 2, 3, 3, 3, 3])
    written = unpack(data, tmp_path / "out")
    assert (written.identities, written.images) == (4, 10)
    assert grouped_images(tmp_path / "out") == grouped_images(data)
    assert (tmp_path / "out" / "3" / "9.png").read_bytes() == open_dataset(data).read(9)


def test_no_image_or_folder_takes_the_name_of_another_one(tmp_path):
    places = ["d1/1_2.jpg\tann", "d1/1.jpg\tann", "d2/1.jpg\tann", "d2/1_3.jpg\tann", "d2/2.jpg\tbob", "d2/3.jpg\tBob",
              "d2/4.jpg\tbob_1"]  # fmt: skip
    for number, line in enumerate(places):
        file = tmp_path / line.partition("\t")[0]
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(encoded_image(number))
    (tmp_path / "l.txt").write_text("\n".join(places) + "\n")
    assert unpack(tmp_path / "l.txt", tmp_path / "out").images == 7
    assert sorted(one for _, one in images_of(open_dataset(tmp_path / "out"))) == sorted(
        map(encoded_image, range(7))
    )
    folders = {path.name.lower() for path in (tmp_path / "out").iterdir()}
    assert folders == {"ann", "bob", "bob_1", "bob_2", "dataset_card.yaml"}
    assert (tmp_path / "out" / "ann" / "1_2.png").read_bytes() == encoded_image(0)


def test_images_of_a_dataset_with_some_names_keep_apart(tmp_path):
    data = write_records(tmp_path / "plain", [0, 0])
    named = write_records(tmp_path / "named", [0, 0])
    (named / "names.csv").write_text("key,name\n1,a/1.png\n2,b/1.png\n")
    (tmp_path / "both.yaml").write_text(f"datasets:\n  - path: {data}\n  - path: {named}\n")
    unpack(tmp_path / "both.yaml", tmp_path / "out")
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.png")) == [
        "0/0.png", "0/1.png", "1/1.png", "1/1_3.png",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "write", [unpack, lambda data, out: convert(data, out, "webdataset"), lambda data, out: convert(data, out, "zip")],
    ids=["unpack", "webdataset", "zip"],
)  # fmt: skip
def test_bytes_without_a_format_are_written_only_under_the_name_of_an_image(tmp_path, write):
    with RecordWriter(tmp_path / "train.rec") as writer:
        for key in range(1, 4):
            data = b"no image" if key == 2 else encoded_image(key)
            writer.write(key, RecordHeader.of_image(0, key), data)
    source = open_dataset(tmp_path / "train.rec")
    with pytest.raises(
        ImageError, match=r"key 2 at byte .*neither the name nor the bytes are those of an image; .*--repair"
    ):
        write(tmp_path / "train.rec", tmp_path / "out.zip")
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]
    (tmp_path / "names.csv").write_text("key,name\n1,a.png\n2,b.JPG\n3,c.png\n")
    write(tmp_path / "train.rec", tmp_path / "out.zip")
    written = open_dataset(tmp_path / "out.zip")
    assert images_of(written) == images_of(source)
    assert [PurePath(written.name(number)).name for number in range(3)] == ["a.png", "b.JPG", "c.png"]
