import pytest

from facetrain.config.loading import load_config
from tests.runs.conftest import dataset  # noqa: F401
from tests.support import training


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):  # noqa: F811
    """A folder with a finished teacher, and a function that returns the config of a student."""
    folder = tmp_path_factory.mktemp("distill")
    text = (
        f"data: {{train: {dataset}/data, image_size: 32, workers: 0}}\n"
        "model: {backbone: iresnet, layers: [1, 1, 1, 1], widths: [4, 4, 4, 4], embedding_size: SIZE}\n"
        "optim: {lr: 0.02}\n"
        "train: {global_batch_size: 24, max_steps: 4, precision: fp32, device: cpu}\n"
        "checkpoint: {every_steps: 2}\neval: {targets: []}\nlog: {tensorboard: false, report: false, every_steps: 1}\n"
    )

    def config(name, size, *options):
        (folder / f"{name}.yaml").write_text(text.replace("SIZE", str(size)))
        return load_config(folder / f"{name}.yaml", options)

    assert training.train(config("teacher", 8), folder / "teacher") == 0
    return folder, config
