"""Runs that choose their learning rate or batch: `--lr find`, `--batch auto`."""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from facetrain.config.loading import build_config, load_config, override_values, plain_config
from facetrain.data.open_dataset import open_dataset
from facetrain.distributed.world import World
from facetrain.errors import ConfigError
from facetrain.plan import fit_batch as fitting
from facetrain.plan.forecast import forecast
from facetrain.run import lr_range_test
from facetrain.run.asked_config import asked_config
from facetrain.run.choose import with_fitting_batch
from facetrain.run.lr_range_test import choose_rate
from facetrain.run.request import TrainRequest
from tests.support import training
from tests.support.ranks import free_ports, start_ranks
from tests.support.runs import metrics

STAGES = "[{until_epoch: 8, global_batch_size: 12}]"
STOP = ("eval.every_steps=2", "train.stop_early={metric: val/accuracy, patience: 2, min_gain: 1}")
"""End a run after the verification of step 6: those of steps 4 and 6 gain less than one over step 2."""


def find_and_repeat(rank, size, config, folder, ports):
    """Train with the rate that a range test finds, resume, and train with this rate as a number."""
    # The loss of so few steps shows no rate.
    lr_range_test.choose_rate = lambda rates, losses: rates[len(losses) // 2]
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    for port, name in zip(ports, ("found", "found", "given"), strict=True):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
        rate = (
            []
            if name == "found"
            else [f"optim.lr={load_config(folder / 'found' / 'config.yaml').optim.lr!r}"]
        )
        described = load_config(config, [f"train.stages={STAGES}", *STOP, *rate])
        choose = ("lr",) if name == "found" else ()
        assert training.train(described, folder / name, resume_existing=True, choose=choose) == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_nothing_but_the_rate_remains_of_a_range_test(describe, tmp_path, size):
    config = describe(dropout=0.2, sample_rate=0.5, accumulate=2, steps=20, checkpoint="every_steps: 4")
    start_ranks(find_and_repeat, (size, config, tmp_path, free_ports(3)), size)
    test = json.loads((tmp_path / "found" / "lr_range_test.json").read_text())
    assert len(test["losses"]) == 20 and test["lr"] != 0.05
    assert load_config(tmp_path / "found" / "config.yaml").optim.lr == test["lr"], "also after the resume"
    assert f"--lr find: optim.lr {test['lr']:.3g}" in (tmp_path / "found" / "log.txt").read_text()
    assert metrics(tmp_path / "found") == metrics(tmp_path / "given")
    assert max(record["step"] for record in metrics(tmp_path / "found")) == 6, "stopped early"
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("found", "given")]
    assert models[0] == models[1]


RATES = np.geomspace(1e-4, 10, 100)
NOISE = np.random.default_rng(0).standard_normal(100)


def test_a_loss_that_falls_at_no_rate_gives_none():
    assert choose_rate(RATES.tolist(), (12 + 0.3 * NOISE).tolist()) is None
    assert choose_rate(RATES.tolist(), np.linspace(20, 19.7, 100).tolist()) is None, "a fall of 1.5 %"


def test_a_loss_that_is_not_finite_from_the_beginning_is_refused():
    with pytest.raises(ConfigError, match=r"not finite at a learning rate of 0.00016, in step 5"):
        choose_rate(RATES.tolist(), [12.0] * 4 + [math.nan])


def test_the_rate_is_in_the_middle_of_the_valley_and_far_below_where_the_loss_rises():
    rises = 4 * np.maximum(np.log10(RATES), 0)
    losses = 20 - 8 / (1 + (0.01 / RATES)) + rises + 0.3 * NOISE
    assert 0.1 < choose_rate(RATES.tolist(), losses.tolist()) < 0.6
    # As ArcFace on 584 people: the embeddings grow alike at far too low rates, and then the loss is flat and noisy.
    losses = 44.5 + 4 / (1 + (RATES / 5e-4) ** 2) + 2 * rises + 0.5 * NOISE
    assert 0.01 < choose_rate(RATES.tolist(), losses.tolist()) < 0.2
    falls_until_it_diverges = [*(20 - 3 * np.log10(RATES[:70])), math.inf]
    last_mean = 65  # of nine losses, around the last but four of 70
    assert choose_rate(RATES.tolist(), falls_until_it_diverges) <= RATES[last_mean] / 3


def test_the_rate_is_at_most_a_third_of_the_one_with_the_smallest_loss():
    step = np.arange(100)
    losses = np.where(step < 60, np.minimum(20, 26 - 0.2 * step), 2 + 0.2 * step)
    assert choose_rate(RATES.tolist(), losses.tolist()) == pytest.approx(RATES[60] / 3)


@pytest.mark.slow
def test_a_range_test_without_a_result_keeps_the_rate_of_the_config_with_a_warning(
    describe, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("facetrain.run.lr_range_test.choose_rate", lambda *_: None)
    described = load_config(describe(steps=24), ["optim.lr=0.0123", "eval.targets=[]"])
    assert training.train(described, tmp_path / "run", choose=("lr",)) == 0
    assert load_config(tmp_path / "run" / "config.yaml").optim.lr == 0.0123
    said = capfd.readouterr().err
    assert "warning: --lr find" in said and "0.0123" in said and "data check" not in said


def test_a_run_with_too_few_steps_for_a_range_test_is_refused_before_anything_is_built(
    describe, tmp_path, monkeypatch
):
    monkeypatch.setattr("facetrain.run.choose.build_network", lambda *_: pytest.fail("a network was built"))
    with pytest.raises(ConfigError, match="--lr find: a range test needs 20 steps .* has 12; give"):
        training.train(load_config(describe(steps=12)), tmp_path / "run", choose=("lr",))
    assert not (tmp_path / "run").exists()


def fit(describe, monkeypatch, *settings, gib=100.0, device="cuda", size=1, **options):
    config = load_config(describe(), ["train.precision=fp32", *settings])
    monkeypatch.setattr(fitting, "_free_bytes", lambda device: int(gib * 2**30))
    world = World(0, 0, size, size, torch.device(device))
    source = open_dataset(config.data.train)
    values, line = fitting.fit_batch(config, world, source, **options)
    return config, build_config(override_values(plain_config(config), values), "chosen"), line


@pytest.mark.slow
def test_a_batch_takes_the_memory_that_the_forecast_leaves_and_the_rate_follows(describe, monkeypatch):
    monkeypatch.setattr(fitting, "epoch_size", lambda source: 10**6)
    per_image = ["train.batch_size=24", "train.global_batch_size=null", "optim.accumulate=2"]
    config, chosen, line = fit(describe, monkeypatch, *per_image, gib=1.5)
    batch, memory = chosen.train.batch_size, int(1.5 * 2**30)
    assert batch % 8 == 0 and forecast(chosen, 20, 1).fits(memory)
    assert not forecast(chosen, 20, 1, batch=round(1.05 * batch)).fits(memory)
    assert chosen.optim.lr == pytest.approx(config.optim.lr * batch / 24) and "optim.lr 0.05 → " in line
    assert chosen.train.global_batch_size is None

    _, chosen, line = fit(describe, monkeypatch, "optim.name=adamw", size=2)
    assert chosen.train.global_batch_size == 8192, "the key that the config has"
    assert (
        chosen.optim.lr == pytest.approx(0.05 * math.sqrt(8192 / 24)) and "4,096 images per process" in line
    )
    _, chosen, _ = fit(describe, monkeypatch, keep_lr=True)
    assert chosen.optim.lr == 0.05


@pytest.mark.parametrize(("overrides", "lr"), [((), 0.4), (("optim.lr=0.05",), 0.05)])
def test_the_rate_follows_the_batch_unless_the_command_sets_it(describe, overrides, lr):
    def fit_batch(config, world, source, keep_lr):
        values = {"train.global_batch_size": 192, "optim.lr": 8 * config.optim.lr}
        return {key: value for key, value in values.items() if not (keep_lr and key == "optim.lr")}, "line"

    # Where a range test comes next, this is the rate that stays if the test finds none.
    choose = ("batch",) if overrides else ("batch", "lr")
    request = TrainRequest(config=str(describe()), overrides=overrides, choose=choose)
    asked = asked_config(request)
    plan = SimpleNamespace(open_choices=choose, set_keys=asked.set_keys)
    agreed = SimpleNamespace(plan=plan, config=asked.config, data=SimpleNamespace(source=None))
    fitted = with_fitting_batch(request, agreed, None, fit_batch)
    config = asked_config(fitted).config
    assert fitted.choose == choose[1:] and (config.train.global_batch_size, config.optim.lr) == (192, lr)


def test_a_batch_beyond_the_limits_stays_and_the_line_says_so(describe, monkeypatch):
    _, chosen, line = fit(describe, monkeypatch)
    assert chosen.train.global_batch_size == 24 and "the batch of the config; a larger one" in line


@pytest.mark.slow
def test_a_cpu_keeps_the_batch_of_the_config(describe, monkeypatch):
    _, chosen, line = fit(describe, monkeypatch, device="cpu")
    assert (chosen.train.global_batch_size, chosen.optim.lr) == (24, 0.05) and "no faster" in line
    with pytest.raises(ConfigError, match="--batch auto: not even two images fit into 0.0 GiB"):
        fit(describe, monkeypatch, gib=0.001)
    with pytest.raises(ConfigError, match="--batch auto: the stages of train.stages have batch sizes"):
        fit(describe, monkeypatch, f"train.stages={STAGES}")


def test_a_run_records_the_batch_that_it_has_chosen_and_a_resume_keeps_it(describe, tmp_path):
    settings = ["eval.targets=[]", "optim.batch_scaling=sqrt"]
    config, folder = load_config(describe(steps=2), settings), tmp_path / "run"
    for _ in range(2):
        asked = {"resume_existing": True, "choose": ("batch",), "fit_batch": fitting.fit_batch}
        assert training.train(config, folder, **asked) == 0
    log = (folder / "log.txt").read_text()
    assert "--batch auto: 24 images per process, 24 per step" in log
    assert "has no effect" not in log, "the scaling of the rate"
    assert log.count("optim.lr: a rate of 0.05 is far above 0.0037; ") == 1, "not at the resume"
    assert load_config(folder / "config.yaml").train.global_batch_size == 24
