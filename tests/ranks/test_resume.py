"""A run saved on any of one to four ranks goes on on any other number of them, with the same losses."""

from pathlib import Path

import pytest
import torch

from facetrain.config.loading import load_config
from facetrain.run.folder.run_state import read_state
from tests.support import training
from tests.support.ranks import free_ports, start_ranks
from tests.support.runs import losses
from tests.support.worlds import in_worlds, with_rank

SIZES = (1, 2, 3, 4)
RESUMED = [(saved_on, goes_on_on, 2) for saved_on in SIZES for goes_on_on in SIZES if saved_on != goes_on_on]


RANDOM_NETWORKS = {
    "vit_t": ["model.layers=null", "model.widths=null"],
    "iresnet": ["head.sample_rate=0.3", "optim.accumulate=2"],
}


def train_random_networks(rank, config, folder, ports):
    """Train networks with random steps, of the network or of the sampled centers, on one, two and three ranks."""
    torch.set_num_threads(1)
    for name, network in RANDOM_NETWORKS.items():
        network = [f"model.backbone={name}", *network, "data.workers=0", "eval.targets=[]", "optim.lr=0.01"]
        for size in (1, 2, 3):
            run = folder / name / f"{size}"
            with_rank(rank, size, ports.pop(), training.train, load_config(config, network), run)


@pytest.mark.slow
def test_what_a_step_drops_and_samples_does_not_depend_on_the_number_of_ranks(describe, tmp_path):
    ports = free_ports(3 * len(RANDOM_NETWORKS))
    start_ranks(train_random_networks, (describe(steps=2, dropout=0.3), tmp_path, ports), 3)
    for name in RANDOM_NETWORKS:
        alone = losses(tmp_path / name / "1")
        assert len(alone) == 2
        for size in (2, 3):
            assert losses(tmp_path / name / f"{size}") == pytest.approx(alone, rel=1e-5), (name, size)


@pytest.mark.long
def test_twelve_changes_of_the_number_of_ranks_change_no_loss(describe, tmp_path):
    config = describe(steps=4, checkpoint="every_steps: 2, keep: 9", sample_rate=0.3)
    settings = ["data.workers=0", "eval.targets=[]", "optim.lr=0.01"]
    ports = free_ports(len(SIZES) + len(RESUMED))
    start_ranks(in_worlds, (config, settings, tmp_path, SIZES, RESUMED, ports), max(SIZES))
    alone = losses(tmp_path / "1")
    assert len(alone) == 4
    continued = [f"{saved_on}_to_{size}_at_{step}" for saved_on, size, step in RESUMED]
    for folder in continued:
        starts = read_state(tmp_path / folder).starts
        assert [start.step for start in starts] == [0, 2]
    for folder in [*map(str, SIZES), *continued]:
        assert losses(Path(tmp_path, folder)) == pytest.approx(alone, rel=1e-5), folder
