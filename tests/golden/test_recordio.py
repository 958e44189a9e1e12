"""RecordIO files written by MXNet 1.9.1, with their expected content."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from facetrain.data.formats.record_index import read_index
from facetrain.data.formats.recordio import RecordReader, RecordWriter, decode_record
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from tests.support.golden import golden_path

NAMES = ["insightface", "im2rec", "vector_labels", "magic_inside", "no_index"]


def expected_records(name):
    return json.loads(golden_path("recordio/recordio.json").read_text())[name]["records"]


@pytest.mark.parametrize("name", NAMES)
def test_every_record_reads_as_mxnet_wrote_it_and_is_written_with_the_same_bytes(name, tmp_path):
    path = golden_path(f"recordio/{name}.rec")
    keys, offsets = read_index(path, path.with_suffix(".idx"))
    reader = RecordReader(path)
    expected = {record["key"]: record for record in expected_records(name)}
    assert len(keys) == len(expected)
    for key, offset in zip(keys.tolist(), offsets.tolist(), strict=True):
        header, payload = decode_record(reader.read_at(offset, key), str(path))
        record = expected[key]
        assert (header.flag, header.id, header.id2) == (record["flag"], record["id"], record["id2"])
        assert list(header.labels) == pytest.approx(np.float32(record["label"]).tolist())
        assert (len(payload), hashlib.sha256(payload).hexdigest()) == (record["bytes"], record["sha256"])
    by_offset = dict(zip(offsets.tolist(), keys.tolist(), strict=True))
    with RecordWriter(tmp_path / "again.rec") as writer:
        for offset in reader.scan_offsets():
            writer.write(by_offset[offset], *decode_record(reader.read_at(offset), str(path)))
    assert (tmp_path / "again.rec").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["insightface", "im2rec", "vector_labels"])
def test_a_dataset_has_the_images_and_identities_written_by_mxnet(name, tmp_path):
    for suffix in ("rec", "idx"):
        shutil.copy(golden_path(f"recordio/{name}.{suffix}"), tmp_path / f"train.{suffix}")
    dataset = open_dataset(tmp_path)
    images = [record for record in expected_records(name) if record["bytes"] > 0]
    assert dataset.num_images == len(images)
    assert sorted(dataset.labels.tolist()) == sorted(int(record["label"][0]) for record in images)


def test_images_have_the_mean_colors_of_mxnets_decoder():
    means = json.loads(golden_path("recordio/recordio.json").read_text())["decoded_rgb_mean"]
    path = golden_path("recordio/insightface.rec")
    reader = RecordReader(path)
    images = [decode_record(reader.read_at(offset), "")[1] for offset in reader.scan_offsets()]
    for expected, image in zip(means, [p for p in images if p], strict=False):
        assert decode_rgb(image, location="x").mean((0, 1)) == pytest.approx(expected, abs=0.5)
