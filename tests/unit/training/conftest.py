import pytest

from facetrain.config.loading import load_config
from tests.support import training


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):
    """A folder with a finished teacher, and a function that returns the config of a student."""
    folder = tmp_path_factory.mktemp("distill")
    sections = {"optim": {"lr": 0.02}, "train": {"max_steps": 4}}
    sections |= {"checkpoint": {"every_steps": 2}, "log": {"every_steps": 1}}

    def config(name, size, *options):
        model = {"embedding_size": size}
        path = training.write_tiny_config(folder, dataset, name=name, model=model, **sections)
        return load_config(path, options)

    assert training.train(config("teacher", 8), folder / "teacher") == 0
    return folder, config
