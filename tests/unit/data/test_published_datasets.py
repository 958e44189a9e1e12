import pytest

from facetrain.config.loading import load_config
from facetrain.data.published_datasets import require_dataset
from facetrain.errors import DataError
from facetrain.run.build.open_data import open_data
from tests.support.command import ROOT


def test_a_preset_without_its_dataset_says_where_to_get_it_and_how_to_give_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as refused:
        open_data(load_config(ROOT / "configs" / "glint360k.yaml"))
    assert str(refused.value) == (
        "data/glint360k: no such folder or file; download Glint360K from "
        "https://github.com/deepinsight/insightface/tree/master/recognition/partial_fc and put it there, or give "
        "another dataset: --set data.train=FOLDER --set data.num_classes=null --set data.num_images=null"
    )


def test_a_missing_dataset_that_is_not_public_names_the_key(tmp_path):
    with pytest.raises(
        DataError, match="mine: no such folder or file; correct data.train, or give another dataset"
    ):
        require_dataset(tmp_path / "mine", num_classes=7, num_images=None)
    require_dataset(tmp_path, num_classes=7, num_images=None)
