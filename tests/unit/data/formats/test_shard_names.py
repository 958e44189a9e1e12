import pytest

from facetrain.data.formats.shard_names import training_shards
from facetrain.errors import DataError


@pytest.mark.parametrize(
    ("names", "message"),
    [(["train-00000-of-00003.parquet"], r"train-00001-of-00003\.parquet is missing .missing in all: 2."),
     (["train-00000-of-99999999999999999999.parquet"], r"train-00001-of-9+\.parquet is missing"),
     (["a-00002-of-00002.tar"], r"a-00001-of-00002\.tar is missing"),
     (["train-00000-of-00002-2f8f6bfa852eac4b.parquet"], r"folder: train-00001-of-00002\.parquet .* in all: 1"),
     (["a-00000-of-00002-2f8f6bfa852eac4b.tar", "a-00000-of-00002-0000000000000000.tar",
       "a-00001-of-00002-2173151d8cd6c7fb.tar"], r"a-00001-of-00002\.tar .* in all: 1"),
     (["b-00000-of-00001.tar", "a-00000-of-00002.tar"], r"a-00001-of-00002\.tar is missing"),
     (["shard-000000.tar", "shard-000002.tar"], r"folder: shard-000001\.tar is missing .*; download"),
     (["a-00001-of-00003.tar", "a-00003-of-00003.tar"], r"a-00002-of-00003\.tar .* in all: 1"),
     (["007.tar", "010.tar"], r"008\.tar is missing .missing in all: 2"),
     (["098.tar", "100.tar"], r"099\.tar is missing")],
)  # fmt: skip
def test_a_missing_shard_is_named(tmp_path, names, message):
    with pytest.raises(DataError, match=message):
        training_shards([tmp_path / "folder" / name for name in names])


@pytest.mark.parametrize(
    "names",
    [["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], ["a-00001-of-00001.tar"],
     ["a-00000-of-00002-2f8f6bfa852eac4b.parquet", "a-00001-of-00002-2173151d8cd6c7fb.parquet"],
     ["shard-000003.tar", "shard-000004.tar"], ["2019.tar", "2023.tar"], ["a.tar", "b01.tar", "b03.tar"],
     ["part-00000-0a9-c000.parquet", "part-00001-0a9-c000.parquet"], []],
)  # fmt: skip
def test_complete_sets_and_other_names_are_accepted(tmp_path, names):
    shards = [tmp_path / name for name in names]
    assert training_shards(shards) == (shards, [])


@pytest.mark.parametrize(
    ("train", "others"),
    [(["train.parquet"], ["test.parquet", "validation.parquet"]),
     (["imagenet1k-train-0000.tar", "train2.tar"], ["imagenet1k-validation-03.tar"]),
     (["train.clean-00000-of-00001.parquet", "part1-00000-of-00001.parquet"], ["test-00000-of-00001.parquet"]),
     (["Train_0.tar", "pretrain.tar", "latest-1.tar", "trainer-01.tar"], ["faces.Eval_0.tar", "DEV.tar"]),
     (["dev_faces_training-0.parquet", "trainval-0.tar"], ["dev_faces_testing-0.parquet", "testset-0.tar"]),
     (["my train (1).parquet", "my trainer.parquet", "éval.tar"], ["my test (1).parquet", "[val].tar"]),
     (["a+train.tar", "invalid-0.tar"], ["a+tests.tar", "validate-0.tar", "Valid.tar", "validation.tar"])],
)  # fmt: skip
def test_of_several_splits_train_is_the_dataset_with_files_of_no_split(tmp_path, train, others):
    shards, skipped = training_shards([tmp_path / name for name in (*train, *others)])
    assert [path.name for path in shards] == train
    assert [(one.name, one.kind) for one in skipped] == [(name, "split") for name in others]
    for alone in ([others[0]], ["faces.tar", others[0]]):
        assert training_shards([tmp_path / name for name in alone])[1] == []


def test_several_splits_without_train_are_refused(tmp_path):
    with pytest.raises(DataError, match="folder: has the splits test, val, and none of them is 'train'"):
        training_shards([tmp_path / "folder" / name for name in ("a.tar", "test-0.tar", "val-0.tar")])
