import io
import json
import pickle
import tarfile

import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_tar_shards_take_identities_from_label_files(tmp_path):
    write_tar(tmp_path / "b.tar", {"2.png": encoded_image(2), "2.json": json.dumps({"label": 1}).encode()})
    write_tar(
        tmp_path / "a.tar",
        {"0.cls": b"1\n", "0.png": encoded_image(0), "1.png": encoded_image(1), "1.cls": b"0"},
    )
    for _ in range(2):  # the second time from the catalog that was kept
        dataset = open_dataset(tmp_path)
        assert images_of(dataset) == [(1, encoded_image(0)), (0, encoded_image(1)), (1, encoded_image(2))]
    assert dataset.num_classes == 2 and "b.tar" in dataset.location(2)
    assert images_of(pickle.loads(pickle.dumps(dataset))) == images_of(dataset)


def test_tar_shards_take_identities_from_folder_names(tmp_path):
    write_tar(
        tmp_path / "a.tar", {f"faces/{who}/1.jpg": encoded_image(n) for n, who in enumerate(["zoe", "ann"])}
    )
    assert images_of(open_dataset(tmp_path)) == [(1, encoded_image(0)), (0, encoded_image(1))]


@pytest.mark.parametrize(
    ("members", "message"),
    [({"1.png": b"x"}, "nor a folder that names"), ({"1.png": b"x", "1.json": b"{}"}, "no identity"),
     ({}, "no images")],
)  # fmt: skip
def test_tar_shards_without_images_or_identities_are_refused(tmp_path, members, message):
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b nonsense" * 99)
    with pytest.raises(DataError, match="not an uncompressed tar"):
        open_dataset(tmp_path)
