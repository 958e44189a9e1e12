"""A checkpoint's tensors and the config of the run that continues from it."""

import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from facetrain.config.loading import build_config, plain_config
from facetrain.errors import ConfigError
from facetrain.run.folder.compatibility import (
    check_compatibility,
    describe_batch_change,
    find_config_changes,
)
from facetrain.run.parts.state import is_batch_norm_synced
from facetrain.run.parts.step_schedule import schedule_steps


def mobile(layers):
    return build_config(
        {"data": {"train": "x"}, "model": {"backbone": "mbf", "layers": layers}, "train": {"max_steps": 9}},
        "x",
    )


def check(before, now):
    """Check that a run with `now` as `model.layers` can continue from a checkpoint that was trained with `before`."""
    meta = {"model": {"config": plain_config(mobile(before))}}
    saved = SimpleNamespace(folder=Path("step_00000004"), step=4, meta=meta)
    check_compatibility(saved, mobile(now), total_steps=9)


def test_the_published_numbers_of_blocks_may_be_written_out_or_left_out():
    check(None, [1, 4, 6, 2])
    check([1, 4, 6, 2], None)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (None, [2, 8, 12, 4], r"with \[1, 4, 6, 2\], .* with \[2, 8, 12, 4\]; keep .* by distill\.teacher$"),
        ([2, 8, 12, 4], None, r"with \[2, 8, 12, 4\], .* with \[1, 4, 6, 2\]; keep"),
    ],
)
def test_other_numbers_of_blocks_than_the_published_ones_are_refused_with_the_key(before, now, message):
    with pytest.raises(ConfigError, match=rf"^model\.layers: .* {message}"):
        check(before, now)


ADAMW = {"name": "adamw"}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"momentum": 0.9}, {"momentum": 0.5}, None),
        ({"momentum": 0.9} | ADAMW, {"momentum": 0} | ADAMW, None),
        (
            {},
            {"momentum": 0},
            r"momentum: .* with a value above 0, and cannot continue with 0; keep .* with model\.init_from$",
        ),
        # SGD with momentum has one moment for each weight, as Muon.
        ({}, {"muon": {}}, None),
        ({"muon": {}}, {}, None),
        (ADAMW, {"muon": {}} | ADAMW, "muon: .* with null, and cannot continue with Muon; keep null"),
        ({"muon": {}, "momentum": 0}, {"momentum": 0}, "muon: .* with Muon, and cannot continue with null"),
    ],
)
def test_an_optimizer_with_other_moments_is_refused_with_the_key(before, now, message):
    configs = [
        build_config({"data": {"train": "x"}, "optim": optim, "train": {"max_steps": 9}}, "x")
        for optim in (before, now)
    ]
    meta = {"model": {"config": plain_config(configs[0])}}
    saved = SimpleNamespace(folder=Path("step_00000004"), step=4, meta=meta)
    with pytest.raises(ConfigError, match=rf"^optim\.{message}") if message else nullcontext():
        check_compatibility(saved, configs[1], total_steps=9)


@pytest.mark.parametrize(
    ("ranks", "epoch", "options"),
    [
        (4, "6.1", "--set optim.accumulate=2"),
        (8, None, ""),
        (16, "24.6", "--set train.batch_size=64"),
        (3, "4.6", "a number of ranks that divides 1,024, which 3 does not"),
    ],
)
def test_another_number_of_ranks_gets_the_epochs_and_options_that_keep_batch_and_batch_norm(
    ranks, epoch, options
):
    config = build_config({"data": {"train": "x"}, "train": {"batch_size": 128, "epochs": 40}}, "x")
    saved, now = (schedule_steps(config, 1_000_000, number) for number in (8, ranks))
    checkpoint = SimpleNamespace(step=12_000, meta={"schedule": asdict(saved)})
    lines = describe_batch_change(checkpoint, config, now, ranks)
    assert len(lines) == (epoch is not None)
    for line in lines:
        expected = f"the schedule counts {epoch} epochs until step 12,000, and not 12.3; "
        assert f"was 1,024 images and is {now.global_batch_size:,} now: {expected}" in line
        assert line.endswith(options)
        sets = re.findall(r"--set (\S+)=(\S+)", line)
        kept = build_config({"data": {"train": "x"}, "train": {"batch_size": 128}}, "x")
        for key, value in sets:
            section, name = key.split(".")
            changed = getattr(kept, section).model_copy(update={name: int(value)})
            kept = kept.model_copy(update={section: changed})
        assert not sets or schedule_steps(kept, 1_000_000, ranks).global_batch_size == 1024
        assert not is_batch_norm_synced(kept)


@pytest.mark.parametrize("schedule", [None, [], {}, {"global_batch_size": "x"}])
def test_a_checkpoint_without_its_batch_is_not_compared(schedule):
    config = build_config({"data": {"train": "x"}}, "x")
    checkpoint = SimpleNamespace(step=1, meta={"schedule": schedule})
    assert describe_batch_change(checkpoint, config, schedule_steps(config, 1000, 1), 1) == []


def test_a_checkpoint_with_a_config_of_another_version_is_refused_and_one_without_is_not_compared():
    config = build_config({"data": {"train": "x"}, "seed": 1}, "x")

    def changes(meta):
        return find_config_changes(SimpleNamespace(folder=Path("step_00000004"), meta=meta), config)

    assert changes({}) == []
    assert [each.key for each in changes({"config": "data: {train: x}"})] == ["seed"]
    message = r"^step_00000004: its config: train\.new_key is not a key; .*with the version of facetrain that wrote it"
    with pytest.raises(ConfigError, match=message):
        changes({"config": "data: {train: x}\ntrain: {new_key: 1}"})
