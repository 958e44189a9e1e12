"""Steps, batch sizes and learning rates of a run in stages."""

import numpy as np
import pytest

from facetrain.config.loading import build_config
from facetrain.data.loading.sampler import GlobalSampler, MixtureSampler, SampleOrder
from facetrain.errors import ConfigError
from facetrain.optim.learning_rate import Polynomial
from facetrain.run.parts.step_schedule import schedule_steps, stage_configs
from facetrain.run.parts.stepper import learning_rates

IMAGES = 103
STAGES = [{"until_epoch": 2, "global_batch_size": 8}, {"until_epoch": 3, "global_batch_size": 24}]


def config_of(stages=STAGES, images=12, epochs=5, optim=None, **train):
    values = {"global_batch_size": images, "epochs": epochs, "stages": stages} | train
    return build_config({"data": {"train": "x"}, "train": values, "optim": optim or {}}, "x")


def test_every_stage_has_the_steps_of_its_epochs_and_its_batch():
    schedule = schedule_steps(config_of(), IMAGES, 2)
    facts = [
        (stage.first_step, stage.stop_step, stage.first_epoch, stage.local_batch_size, stage.steps_per_epoch)
        for stage in schedule.stages
    ]
    assert facts == [(0, 24, 0, 4, 12), (24, 28, 2, 12, 4), (28, 44, 3, 6, 8)]
    assert schedule.total_steps == schedule.steps_of_all_epochs == 44
    stage_of = {0: 0, 23: 0, 24: 1, 27: 1, 28: 2, 43: 2, 44: 2}
    assert all(schedule.stage_at(step) is schedule.stages[stage] for step, stage in stage_of.items())
    assert schedule.images_after(0) == 24 * 8 + 4 * 24 + 16 * 12
    assert schedule.images_after(26) == 2 * 24 + 16 * 12


def test_a_limit_of_steps_leaves_out_the_stages_after_it():
    schedule = schedule_steps(config_of(max_steps=26), IMAGES, 1)
    assert [(stage.first_step, stage.stop_step) for stage in schedule.stages] == [(0, 24), (24, 26)]
    assert schedule.total_steps == 26 and schedule.steps_of_all_epochs == 44
    assert schedule_steps(config_of(max_steps=99), IMAGES, 1) == schedule_steps(config_of(), IMAGES, 1)


@pytest.mark.parametrize("mode", ["full", "blocks"])
@pytest.mark.parametrize("mixed", [False, True])
def test_every_epoch_of_every_stage_shows_each_image_once(mode, mixed):
    stages = [{"until_epoch": 2, "global_batch_size": 20}]
    schedule = schedule_steps(config_of(stages, images=10), 100, 1)
    orders = []
    for stage in schedule.stages:
        options = {
            "seed": 7, "mode": mode, "block": 4, "window": 3, "global_batch_size": stage.global_batch_size,
            "first_step": stage.first_step, "first_epoch": stage.first_epoch,
        }  # fmt: skip
        sampler = (
            MixtureSampler([60, 40], [1, 1], SampleOrder(**options))
            if mixed
            else GlobalSampler(100, SampleOrder(**options))
        )
        steps = range(stage.first_step, stage.stop_step)
        epochs = np.array([sampler.epoch(step) for step in steps]).reshape(-1, stage.steps_per_epoch)
        assert (stage.first_epoch + np.arange(len(epochs)) == epochs.T).all()
        orders += np.concatenate([sampler.batch(step)[0] for step in steps]).reshape(-1, 100).tolist()
    assert len(orders) == 5 and all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(map(tuple, orders))) == 5
    # The order of the images of an epoch does not depend on the batch size.
    order = SampleOrder(**options | {"first_step": 0, "first_epoch": 0})
    plain = MixtureSampler([60, 40], [1, 1], order) if mixed else GlobalSampler(100, order)
    assert np.concatenate([plain.batch(step)[0] for step in range(50)]).reshape(-1, 100).tolist() == orders


def test_without_stages_rates_and_steps_are_those_of_the_polynomial_bit_by_bit():
    config = config_of(stages=[], optim={"warmup_epochs": 0.7, "lr": 0.3})
    schedule = schedule_steps(config, IMAGES, 1)
    assert len(schedule.stages) == 1 and schedule.total_steps == 40
    rates = learning_rates(config, schedule)
    polynomial = Polynomial(base=0.3, warmup_steps=6, total_steps=40, steps_per_epoch=8, power=2)
    assert [rates(step) for step in range(42)] == [polynomial(step) for step in range(42)]


@pytest.mark.parametrize(
    ("optimizer", "rule", "factor"),
    [("sgd", "auto", 2.0), ("adamw", "auto", 2.0**0.5), ("adamw", "linear", 2.0), ("sgd", "none", 1.0)],
)
def test_the_rate_of_a_stage_follows_its_batch_by_the_rule_and_the_schedule_counts_epochs(
    optimizer, rule, factor
):
    optim = {"name": optimizer, "batch_scaling": rule, "lr": 0.1, "warmup_epochs": 1}
    config = config_of([{"until_epoch": 2, "global_batch_size": 24}], epochs=4, optim=optim)
    schedule = schedule_steps(config, 96, 1)
    rates = learning_rates(config, schedule)
    polynomial = Polynomial(base=0.1, warmup_steps=8, total_steps=32, steps_per_epoch=8, power=2)
    for step in range(1, 8):  # a step of the first stage shows two batches of the config
        assert rates(step) == pytest.approx(factor * polynomial(2 * step))
    for step in range(8, 25):
        assert rates(step) == pytest.approx(polynomial(step + 8))


def test_a_stage_is_a_config_of_its_own():
    stages = [{"until_epoch": 1, "sample_rate": 0.1}]
    schedule = schedule_steps(config_of(stages), IMAGES, 1)
    assert schedule.stages[0].describe() == "12 images per step, 0.1 of the classes"
    (alone,) = schedule_steps(config_of([{"until_epoch": 5, "sample_rate": 0}]), IMAGES, 1).stages
    assert alone.describe() == "12 images per step, the classes of the batch"
    values = [
        (epoch, c.head.sample_rate, c.train.global_batch_size)
        for epoch, c in stage_configs(config_of([*stages, {"until_epoch": 5, "global_batch_size": 24}]))
    ]
    assert values == [(1, 0.1, 12), (5, 1.0, 24)]


def test_the_batch_of_a_stage_divides_over_the_ranks_and_fits_the_dataset():
    with pytest.raises(
        ConfigError, match=r"stage 2 of train\.stages: .*\b24 images .*\b5 ranks in 1 micro-batch each"
    ):
        stages = [{"until_epoch": 1, "global_batch_size": 20}, STAGES[1]]
        schedule_steps(config_of(stages, images=20), IMAGES, 5)
    with pytest.raises(ConfigError, match=r"^stage 1 .*batch of 208; give a smaller train.global_batch_size"):
        schedule_steps(config_of([{"until_epoch": 1, "global_batch_size": 208}]), IMAGES, 1)


@pytest.mark.parametrize(
    ("until_epoch", "changes", "message"),
    [
        (2, {}, r"train.stages\[0\]: the stage changes nothing"),
        (21, {"batch_size": 4}, "ends after epoch 21, but the run has 20"),
        (2, {"global_batch_size": 4}, "give batch_size and not global_batch_size"),
        (2, {"samplerate": 0.1}, "did you mean sample_rate"),
        (2, {"image_size": 56}, r"train.stages\[0\].image_size is not a key"),
    ],
)
def test_an_invalid_stage_is_refused_with_what_to_write(until_epoch, changes, message):
    stages = [{"until_epoch": until_epoch} | changes]
    with pytest.raises(ConfigError, match=message):
        build_config({"data": {"train": "x"}, "train": {"stages": stages}}, "x")


@pytest.mark.parametrize(
    ("stages", "further", "message"),
    [
        ([{"until_epoch": 2, "batch_size": 4}] * 2, {}, r"must grow from stage to stage, not \[2, 2\]"),
        (
            [{"until_epoch": 2, "batch_size": 4}],
            {"global_batch_size": 8},
            "give global_batch_size and not batch_size",
        ),
        (3, {}, "train.stages: .*3"),
    ],
)
def test_stages_that_do_not_fit_each_other_or_the_run_are_refused(stages, further, message):
    with pytest.raises(ConfigError, match=message):
        build_config({"data": {"train": "x"}, "train": {"stages": stages} | further}, "x")


def test_expectations_in_any_stage_are_refused_where_they_cannot_work():
    head = {"placement": "host"}
    values = {"data": {"train": "x"}, "head": head}
    stages = {"stages": [{"until_epoch": 2, "expectations": "moving"}]}
    for changes in ({"head": head | {"expectations": "fixed"}}, {"train": stages}):
        with pytest.raises(ConfigError, match=r"head\.expectations .*head\.placement"):
            build_config(values | changes, "x")
    # YAML reads the word off as false.
    off = build_config(values | {"head": head | {"expectations": False}}, "x")
    assert off.head.expectations == "off"
