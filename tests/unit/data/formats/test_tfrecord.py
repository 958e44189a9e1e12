import pickle

import pytest

from facetrain.data.dataset import identity_name, original_name
from facetrain.data.formats.tfrecord import masked_crc32c
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.check import check
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of, tf_example, tf_record

pytest.importorskip("google_crc32c", reason="the tfrecord extra is not installed")


def write_shards(folder, messages):
    """Write two shards."""
    shards = [b"", b""]
    for number, message in enumerate(messages):
        shards[number * 2 // len(messages)] += tf_record(message)
    for number, data in enumerate(shards):
        (folder / f"a-{number:05}.tfrecord").write_bytes(data)


def test_the_checksum_is_that_of_the_standard():
    # RFC 3720, B.4, and the mask of TFRecord: rotated by 15 bits, plus a constant.
    for data, crc in ((bytes(32), 0x8A9136AA), (b"123456789", 0xE3069283)):
        assert masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32)


def test_records_with_labels_are_read_in_the_order_of_the_shards(tmp_path):
    names = {"image": encoded_image, "label": lambda n: 4 - n, "filename": lambda n: f"f/{n}.png".encode()}
    write_shards(tmp_path, [tf_example(**{k: make(n) for k, make in names.items()}) for n in range(5)])
    for _ in range(2):  # the second time from the catalog
        dataset = open_dataset(tmp_path)
        assert images_of(dataset) == [(4 - n, encoded_image(n)) for n in range(5)]
    assert images_of(pickle.loads(pickle.dumps(dataset))) == images_of(dataset)
    assert original_name(dataset, 3) == "f/3.png" and identity_name(dataset, 1) == "1"
    assert dataset.location(0).endswith("a-00000.tfrecord: record at byte 0 (f/0.png)")
    dataset.prefetch(0, 5)
    assert not check(tmp_path).faults


@pytest.mark.parametrize(
    ("feature", "people", "labels"),
    [("image/label", [b"zoe", b"ann", b"zoe"], [1, 0, 1]), ("label", [10.0, 9.0], [10, 9]),
     # Texts of digits are texts, and never one identity.
     ("image/source_id", [b"7", b"007", b"907001234", b"7"], [1, 0, 2, 1])],
)  # fmt: skip
def test_texts_are_numbered_in_sorted_order_and_whole_numbers_are_labels(tmp_path, feature, people, labels):
    write_shards(tmp_path, [tf_example(**{"image/encoded": b"x", feature: who, "id": 7}) for who in people])
    (tmp_path / "a.tfrecord.idx").write_text("0 100\n")  # of DALI
    dataset = open_dataset(tmp_path)
    assert dataset.labels.tolist() == labels
    for who, label in zip(people, labels, strict=True):
        assert identity_name(dataset, label) == (who.decode() if isinstance(who, bytes) else str(label))


@pytest.mark.parametrize(
    "people",
    [[b"J\xe9r\xf4me", b"J\xf4r\xe9me"], [b"p" * 300 + b"1", b"p" * 300 + b"2"]],
    ids=["latin-1", "long"],
)
def test_names_that_differ_in_any_byte_are_different_people(tmp_path, people):
    write_shards(tmp_path, [tf_example(image=b"x", label=who) for who in people])
    dataset = open_dataset(tmp_path)
    assert dataset.labels.tolist() == [0, 1] and identity_name(dataset, 0) != identity_name(dataset, 1)


@pytest.mark.parametrize(
    ("message", "reason"),
    [(tf_example(label=1), "no image among the features"), (tf_example(image=b"x"), "no label among"),
     (tf_example(image=b"x", label=-1), "the label -1.0 is not a whole number"),
     (tf_example(image=b"x", label=0.5, id=7), "the feature label is 0.5; expected a whole number or a short text"),
     (tf_example(image=b"x", label=float("nan"), id=7), "label is nan"),
     (tf_example(image=b"x", label=None, id=7), "label is None"),
     (tf_example(image=b"x", label=b"x" * 5000), "expected a whole number or a short text"),
     (b"\x0a\xff\xff\xff\x07", "not a tf.Example")],
)  # fmt: skip
def test_records_without_an_image_and_a_label_are_refused(tmp_path, message, reason):
    (tmp_path / "a.tfrecord").write_bytes(tf_record(message))
    with pytest.raises(DataError, match=reason):
        open_dataset(tmp_path)


def test_a_damaged_record_is_an_error_of_this_image_only(tmp_path):
    write_shards(tmp_path, [tf_example(image=encoded_image(n), label=n) for n in range(4)])
    shard = tmp_path / "a-00000.tfrecord"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    dataset = open_dataset(tmp_path)
    with pytest.raises(
        DataError, match=r"a-00000\.tfrecord: record at byte 0: the checksum of the record is wrong"
    ):
        dataset.read(0)
    assert dataset.read(1) == encoded_image(1)
