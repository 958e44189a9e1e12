import pytest

from facetrain.config.loading import load_config
from facetrain.data.published_datasets import require_dataset
from facetrain.data.settings import DataSettings
from facetrain.errors import DataError
from facetrain.run.parts.open_data import open_data
from tests.support.command import ROOT


def test_a_preset_without_its_dataset_says_where_to_get_it_and_how_to_give_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as refused:
        open_data(load_config(ROOT / "configs" / "glint360k.yaml"))
    assert str(refused.value) == (
        "data/glint360k: no such folder or file; get Glint360K from "
        "https://github.com/deepinsight/insightface/tree/master/recognition/partial_fc (partly made from "
        "MS-Celeb-1M, which Microsoft withdrew in 2019) and put it there; the nearest that can be had: facetrain get "
        "hsface10k, or give another dataset: facetrain train --data FOLDER, for other commands --set "
        "data.train=FOLDER --set data.num_classes=null --set data.num_images=null"
    )


def test_without_data_the_quickstart_names_the_command_that_writes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "facetrain data synth --output data/quickstart --image-size 48"
    config = ROOT / "configs" / "quickstart.yaml"
    with pytest.raises(DataError, match=f"^data/quickstart: .*`{command}`"):
        open_data(load_config(config))
    # The same command in the comment of the preset, and before the training in `make quickstart`.
    assert all(command in path.read_text() for path in (config, ROOT / "Makefile"))
    require_dataset(DataSettings(train=str(tmp_path), num_classes=7))
