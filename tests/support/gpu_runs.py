"""Runs whose losses on GPUs are compared with those of the CPU, or of another number of GPUs."""

from facetrain.config.loading import load_config
from tests.support import training
from tests.support.runs import losses

DEVICE = "cuda"
HEADS = {
    "on the device": {},
    "sampled": {"sample_rate": 0.3},
    "on the host": {"head": "placement: host"},
    "sampled on the host": {"sample_rate": 0.3, "head": "placement: host"},
    "sampled on a disk": {"sample_rate": 0.3, "head": "placement: disk"},
    "in micro-batches": {"accumulate": 2, "sample_rate": 0.3},
    "adaface": {"margin": "adaface"},
}
"""Options of `describe` by what is special about the head."""


def trained(config, folder, *changes):
    """Return the losses of a run in this process."""
    assert training.train(load_config(config, ["eval.targets=[]", *changes]), folder) == 0
    return losses(folder)
