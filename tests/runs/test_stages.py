"""Runs in stages: on any number of ranks, and resumed within a stage and at its border."""

from pathlib import Path

import pytest
import torch

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.errors import ConfigError
from tests.support import training
from tests.support.ranks import free_ports, start_ranks
from tests.support.runs import losses, metrics
from tests.support.worlds import in_worlds

BORDER, END = 10, 14
"""The first stage has 10 steps, each with 12 of the 120 images."""
SETTINGS = (
    "train.stages=[{until_epoch: 1, global_batch_size: 12, sample_rate: 0.3, expectations: off}]",
    "head.expectations=moving",
    "data.workers=0",
    "eval.targets=[]",
    "optim.lr=0.02",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "resumed"),
    [
        ((1, 2), [(1, 1, 5), (2, 1, BORDER)]),
        pytest.param(
            (1, 2, 3),
            [(1, 1, BORDER), (1, 2, 5), (1, 3, 5), (1, 3, BORDER), (3, 1, 5), (3, 2, BORDER)],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_in_stages_is_the_same_on_any_number_of_ranks_and_after_any_stop(
    describe, tmp_path, sizes, resumed
):
    config = describe(steps=END, checkpoint="every_steps: 5, keep: 9")
    ports = free_ports(len(sizes) + len(resumed))
    start_ranks(in_worlds, (config, SETTINGS, tmp_path, sizes, resumed, ports), max(sizes))
    alone = losses(tmp_path / "1")
    assert len(alone) == END
    for size in sizes:
        assert losses(tmp_path / f"{size}") == pytest.approx(alone, rel=1e-4)
    for saved_on, size, step in resumed:
        folder = tmp_path / f"{saved_on}_to_{size}_at_{step}"
        assert losses(folder) == pytest.approx(alone, rel=1e-4), folder
        if saved_on == size == 1:
            assert metrics(folder) == metrics(tmp_path / "1"), "bit by bit"
            last = [
                Checkpoint(Path(run, "checkpoints", f"step_{END:08d}")) for run in (folder, tmp_path / "1")
            ]
            states = [checkpoint.replicated("backbone.") for checkpoint in last]
            assert torch.equal(*(checkpoint.rows("expectation", 0, 20) for checkpoint in last))
            assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    records = [record for record in metrics(tmp_path / "1") if "loss" in record]
    assert [record["epoch"] for record in records] == [0] * BORDER + [1] * (END - BORDER)
    log = (tmp_path / "1" / "log.txt").read_text()
    assert "step 0 (epoch 0) to step 10: 12 images per step, 0.3 of the classes" in log
    assert "step 14: 24 images per step, all classes, moving expectations" in log

    fixed = load_config(config, [*SETTINGS, "head.expectations=fixed"])
    with pytest.raises(ConfigError, match=r"head.expectations: .* restore"):
        training.resume(fixed, tmp_path / "1", BORDER)
    other = load_config(config, [SETTINGS[0].replace("0.3", "0.5"), *SETTINGS[1:]])
    with pytest.raises(ConfigError, match=r"train.stages: .* restore"):
        training.resume(other, tmp_path / "1", BORDER)


def test_a_new_run_cannot_keep_its_random_centers_as_expectations(describe, tmp_path):
    fixed, stages = "head.expectations=fixed", "train.stages=[{until_epoch: 1, expectations: off}]"
    config = load_config(describe(steps=1), [*SETTINGS[2:], fixed])
    with pytest.raises(ConfigError, match=r"^head\.expectations: fixed from the first step"):
        training.train(config, tmp_path / "run")
    assert (
        training.train(load_config(describe(steps=1), [*SETTINGS[2:], fixed, stages]), tmp_path / "run") == 0
    )
    # Only new runs are refused.
    assert training.resume(config, tmp_path / "run", set_keys=["train.stages"]) == 0


def test_expectations_that_would_stay_random_centers_are_refused(describe, tmp_path, model):
    fixed = ["head.expectations=fixed", "model.embedding_size=16"]
    extended = [*fixed, f"model.init_from={model}", "head.init_from=extend"]
    for values in (fixed, extended):
        with pytest.raises(ConfigError, match=r"head\.expectations: fixed .*head\.init_from: keep"):
            training.train(load_config(describe(steps=1), values), tmp_path / "run")
