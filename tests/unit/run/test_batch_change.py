"""Warning of a resume whose schedule is in another epoch than before."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from facetrain.config.loading import build_config, dump_config
from facetrain.run.batch_change import describe_batch_change
from facetrain.run.parts.state import is_batch_norm_synced
from facetrain.run.parts.step_schedule import schedule_steps

IMAGES = 1_000_000


def lines_for(saved, saved_ranks, config, ranks, step=12_000, **meta):
    """Return the warning of a resume at a step, on so many ranks, of a run with the config `saved`."""
    checkpoint = SimpleNamespace(
        folder=Path("step_00012000"),
        step=step,
        meta=({"config": dump_config(saved)} if saved else {}) | meta,
        manifest=SimpleNamespace(world_size=saved_ranks),
    )
    return describe_batch_change(checkpoint, config, schedule_steps(config, IMAGES, ranks), IMAGES, ranks)


@pytest.mark.parametrize(
    ("ranks", "epoch", "options"),
    [
        (4, "6.144", "--set optim.accumulate=2"),
        (8, None, ""),
        (16, "24.59", "--set train.batch_size=64"),
        (3, "4.608", "a number of ranks that divides 1,024, which 3 does not"),
    ],
)
def test_another_number_of_ranks_gets_the_epochs_and_options_that_keep_batch_and_batch_norm(
    ranks, epoch, options
):
    config = build_config({"data": {"train": "x"}, "train": {"batch_size": 128, "epochs": 40}}, "x")
    now = schedule_steps(config, IMAGES, ranks)
    lines = lines_for(config, 8, config, ranks)
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
        assert not sets or schedule_steps(kept, IMAGES, ranks).global_batch_size == 1024
        assert not is_batch_norm_synced(kept)


@pytest.mark.parametrize(
    ("before", "ranks", "now", "remedy"),
    [
        ((4, 12), 8, (4, 12), None),
        ((4, 12), 8, (4, 20), None),  # the step is in the second stage, whose end is later now
        ((4, 12), 4, (4, 12), "restore train.stages and the batch sizes, on 8 ranks"),
        ((4, 12), 8, (6, 12), "restore train.stages and the batch sizes"),
        ((4, 12), 8, (), "restore train.stages and the batch sizes"),
    ],
)
def test_other_stages_are_compared_by_the_epoch_of_the_step(before, ranks, now, remedy):
    configs = []
    for ends in (before, now):
        stages = [
            {"until_epoch": end, "batch_size": size} for end, size in zip(ends, (512, 256), strict=False)
        ]
        train = {"batch_size": 128, "epochs": 40, "stages": stages}
        configs.append(build_config({"data": {"train": "x"}, "train": train}, "x"))
    lines = lines_for(configs[0], 8, configs[1], ranks, step=3000)
    assert len(lines) == (remedy is not None)
    for line in lines:
        epoch = schedule_steps(configs[1], IMAGES, ranks).epochs(3000)
        assert f"counts {epoch:.4g} epochs until step 3,000, and not 8.148; to continue" in line
        assert line.endswith(f"where the run was, {remedy}")


@pytest.mark.parametrize(
    ("images", "ranks", "expected"),
    [
        (IMAGES + 10, 8, []),
        (2 * IMAGES, 8, ["an epoch had 2,000,000 images and has 1,000,000 now: the schedule counts 12.3 epochs until "
                         "step 12,000, and not 6.144; to continue where the run was, restore the data"]),
        (IMAGES + 10, 4, ["the global batch was 1,024 images and is 512 now: the schedule counts 6.144 epochs until "
                          "step 12,000, and not 12.3; to continue where the run was, resume it with "
                          "--set optim.accumulate=2"]),
        (2 * IMAGES, 4, []),  # half the images by half the batch: the schedule is where it was
    ],
)  # fmt: skip
def test_other_data_and_another_batch_are_told_apart(images, ranks, expected):
    config = build_config({"data": {"train": "x"}, "train": {"batch_size": 128, "epochs": 40}}, "x")
    assert lines_for(config, 8, config, ranks, images_per_epoch=images) == expected
    both = lines_for(config, 8, config, 16, images_per_epoch=2 * IMAGES)
    assert [line.split(" images")[0] for line in both] == [
        "an epoch had 2,000,000",
        "the global batch was 1,024",
    ]


def test_thousands_of_epochs_are_written_out():
    config = build_config({"data": {"train": "x"}, "train": {"batch_size": 128, "epochs": 4000}}, "x")
    (line,) = lines_for(config, 8, config, 4, step=2_500_000)
    assert "counts 1280 epochs until step 2,500,000, and not 2561;" in line


@pytest.mark.parametrize("before", [{}, {"train": {"batch_size": 1_000_000}}])
def test_a_checkpoint_without_a_config_or_of_another_dataset_is_not_compared(before):
    config = build_config({"data": {"train": "x"}}, "x")
    saved = build_config({"data": {"train": "x"}} | before, "x") if before else None
    assert lines_for(saved, 2, config, 1) == []
