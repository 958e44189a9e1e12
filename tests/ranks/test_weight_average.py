"""The moving average of the weights in a run that continues on another number of ranks."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.run import training
from tests.ranks.test_resume import free_ports, with_rank
from tests.runs.conftest import dataset, describe  # noqa: F401
from tests.support.ranks import start_ranks


def train_and_resume(rank, config, folder, ports):
    torch.set_num_threads(1)
    options = ["data.workers=0", "eval.targets=[]", "optim.lr=0.01", "optim.ema=0.8"]
    described = load_config(config, options)
    with_rank(rank, 2, ports[0], training.train, described, folder / "two")
    if rank == 0:
        for name in ("stays", "one", "loaded"):
            shutil.copytree(folder / "two", folder / name)
            # With RANK set, this counts as a restart, which continues from the newest checkpoint.
            shutil.rmtree(folder / name / "checkpoints" / "step_00000004")
    with_rank(rank, 2, ports[1], training.resume, described, folder / "stays", 2)
    with_rank(rank, 1, ports[2], training.resume, described, folder / "one", 2)
    # No step is left, so that the file holds what the single rank has loaded.
    ended = load_config(config, [*options, "train.max_steps=2"])
    with_rank(rank, 1, ports[3], training.resume, ended, folder / "loaded", 2)


@pytest.mark.slow
def test_the_average_continues_exactly_on_as_many_ranks_and_to_rounding_on_another_number(describe, tmp_path):  # noqa: F811
    config = describe(steps=4, checkpoint="every_steps: 2, keep: 9")
    start_ranks(train_and_resume, (config, tmp_path, free_ports(4)), 2)
    runs = ("two", "one", "stays", "loaded")
    files = {name: load_file(tmp_path / name / "model_ema.safetensors") for name in runs}
    saved = Checkpoint.open(tmp_path / "two", 2).replicated("ema.")
    assert len(saved) > 20
    for name, value in files["two"].items():
        assert torch.equal(files["stays"][name], value), name
        torch.testing.assert_close(files["one"][name], value, rtol=1e-4, atol=1e-5)
        assert name not in saved or torch.equal(files["loaded"][name], saved[name]), name
