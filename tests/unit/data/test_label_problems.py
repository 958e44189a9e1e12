from types import SimpleNamespace

import numpy as np
import pytest

from facetrain.data import identity_counts
from facetrain.data.identity_counts import count_images
from facetrain.data.label_problems import label_remarks, require_trainable_labels
from facetrain.data.open_dataset import open_dataset, require_aligned
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records
from tests.support.memory import traced_peak


def test_one_identity_is_no_training_set(tmp_path):
    source = open_dataset(write_records(tmp_path / "data", [0] * 9))
    with pytest.raises(
        DataError, match="data.*one identity.*per person, or a list file of images and people"
    ):
        require_trainable_labels(source, "data", may_have_gaps=True)


def dataset_of(*labels, classes):
    return SimpleNamespace(labels=np.array(labels, np.int32), num_images=len(labels), num_classes=classes)


@pytest.mark.parametrize(
    ("labels", "classes", "named"),
    [((0, 1, 2, 2), 3, "2 of 3"), ((1, 1, 2, 2), 3, "begin at 1"), ((0, 0, 2, 2), 3, "1 label below")],
)
def test_identities_without_images_or_with_one_are_named(labels, classes, named):
    (remark,) = label_remarks(dataset_of(*labels, classes=classes), "x")
    assert remark.startswith("x: ") and named in remark
    require_trainable_labels(dataset_of(*labels, classes=classes), "x", may_have_gaps=False)


def test_identities_with_two_images_each_are_nothing_to_remark():
    assert list(label_remarks(dataset_of(0, 0, 1, 1, 2, classes=3), "x")) == []


def test_images_are_counted_without_a_copy_of_all_labels(monkeypatch):
    monkeypatch.setattr(identity_counts, "_CHUNK", 1 << 14)
    labels = np.resize(np.array([0, 2, 2], np.int32), 1 << 20)
    source = SimpleNamespace(labels=labels, num_images=len(labels), num_classes=4)
    with traced_peak() as peak:
        present, counts = count_images(source)
    assert present.tolist() == [0, 2] and counts.tolist() == [349_526, 699_050]
    assert peak.bytes < labels.nbytes


def test_labels_with_large_gaps_are_refused_unless_the_config_states_their_number(tmp_path):
    lines = "".join(f"{number}.png\t{69_003_068 + number // 3}\n" for number in range(12))
    (tmp_path / "people.txt").write_text(lines)
    source = open_dataset(tmp_path / "people.txt")
    with pytest.raises(DataError, match="label.*data convert"):
        require_trainable_labels(source, "people.txt", may_have_gaps=False)
    require_trainable_labels(source, "people.txt", may_have_gaps=True)


def test_a_folder_with_a_list_and_no_image_names_the_list(tmp_path):
    (tmp_path / "train.lst").write_text("1\tphotos/a.png\t0\n1\tphotos/b.png\t1\n")
    (tmp_path / "property").write_text("2,112,112")
    with pytest.raises(DataError, match=r"give .*train\.lst"):
        open_dataset(tmp_path)


def test_a_list_of_photos_with_landmarks_is_to_be_packed_first(tmp_path):
    points = "\t".join(map(str, np.arange(14)))
    (tmp_path / "a.lst").write_text(f"0\ta.png\t0\t{points}\n1\tb.png\t1\n")
    (tmp_path / "b.lst").write_text("1\ta.png\t0\n1\tb.png\t1\n")
    with pytest.raises(DataError, match=r"1 image .*data pack"):
        require_aligned(open_dataset(tmp_path / "a.lst"), "a.lst")
    require_aligned(open_dataset(tmp_path / "b.lst"), "b.lst")


def test_a_folder_has_the_only_record_file_whatever_its_name(tmp_path):
    write_records(tmp_path / "mydata", [0, 0, 1])
    for suffix in (".rec", ".idx"):
        (tmp_path / "mydata" / f"train{suffix}").rename(tmp_path / "mydata" / f"mydata{suffix}")
    assert open_dataset(tmp_path / "mydata").num_images == 3
    (tmp_path / "mydata" / "other.rec").touch()
    with pytest.raises(DataError, match=r"mydata\.rec.*other\.rec"):
        open_dataset(tmp_path / "mydata")
    (tmp_path / "mydata" / "other.rec").unlink()
    for name in ("ann", "bob"):
        (tmp_path / "mydata" / name).mkdir()
        (tmp_path / "mydata" / name / "1.png").write_bytes(encoded_image(0))
    with pytest.raises(DataError, match=r"mydata\.rec.*ann"):
        open_dataset(tmp_path / "mydata")
