"""Runs in stages: on any number of ranks, and resumed within a stage and at its border."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from facetrain import load_model
from facetrain.backbone.iresnet import IResNet
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.data.loading.sampler import GlobalSampler, SampleOrder
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import ConfigError
from facetrain.run import training
from tests.ranks.test_resume import in_worlds
from tests.runs.test_training import losses, metrics
from tests.support.ranks import free_ports, start_ranks

BORDER, END = 10, 14
"""The first stage has 10 steps, each with 12 of the 120 images."""
SETTINGS = (
    "train.stages=[{until_epoch: 1, global_batch_size: 12, image_size: 32, sample_rate: 0.3, expectations: off}]",
    "data.image_size=48",
    "head.expectations=moving",
    "data.workers=0",
    "eval.targets=[]",
    "optim.lr=0.02",
)


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
    assert "step 0 (epoch 0) to step 10: 12 images of 32 × 32 pixels per step, 0.3 of the classes" in log
    assert "step 14: 24 images of 48 × 48 pixels per step, all classes, moving expectations" in log

    other = load_config(config, [SETTINGS[0].replace("0.3", "0.5"), *SETTINGS[1:]])
    with pytest.raises(ConfigError, match=r"train.stages: .* restore"):
        training.resume(other, tmp_path / "1", BORDER)


def test_each_step_of_a_run_with_smaller_images_at_first_equals_one_of_a_plain_training_loop(
    describe, tmp_path
):
    """Each step starts from the run's own weights: over several steps, rounding grows without a bound."""
    sizes = [32] * 5 + [40] * 5 + [48] * 2  # pixels of each step; an epoch has 5
    settings = (
        "train.stages=[{until_epoch: 1, image_size: 32}, {until_epoch: 2, image_size: 40}]",
        *("data.image_size=48", "data.workers=0", "data.augment.flip=0", "eval.targets=[]"),
        *("optim.momentum=0", "optim.clip_grad_norm=null", "optim.warmup_epochs=0", "optim.power=1"),
        *("optim.lr=0.5", "optim.weight_decay=0.001", "head.margin={type: cosface, m3: 0.2, scale: 8}"),
    )
    config = load_config(describe(steps=len(sizes), checkpoint="every_steps: 1, keep: 99"), settings)
    assert training.train(config, tmp_path / "run") == 0

    source = open_dataset(Path(config.data.train))
    sampler = GlobalSampler(source.num_images, SampleOrder(seed=config.seed, global_batch_size=24))
    reported = losses(tmp_path / "run")
    for step in (4, 5, 9, 10, 11):  # the last and the first of each stage
        network, center = weights_after(step, tmp_path / "run", config, source.num_classes)
        weights = [*(p for p in network.parameters() if p.requires_grad), center]
        optimizer = torch.optim.SGD(weights, lr=0.5 * (1 - step / len(sizes)), weight_decay=0.001)
        image, label = [], torch.from_numpy(source.labels[sampler.batch(step)]).long()
        for index in sampler.batch(step):
            pixels = cv2.imdecode(np.frombuffer(source.read(index), np.uint8), cv2.IMREAD_COLOR_RGB)
            side = sizes[step]
            pixels = cv2.resize(pixels, (side, side), interpolation=cv2.INTER_LINEAR)  # stored with 32 pixels
            image.append(torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1)
        cosine = F.normalize(network(torch.stack(image))) @ F.normalize(center).T
        loss = F.cross_entropy(8 * (cosine - 0.2 * F.one_hot(label, source.num_classes)), label)
        loss.backward()
        assert reported[step] == pytest.approx(loss.item(), rel=1e-5), step
        before = [weight.detach().clone() for weight in weights]
        optimizer.step()
        trained, trained_center = weights_after(step + 1, tmp_path / "run", config, source.num_classes)
        now = [*(p for p in trained.parameters() if p.requires_grad), trained_center]
        error = sum(float((a - b).detach().square().sum()) for a, b in zip(weights, now, strict=True))
        change = sum(float((a - b).detach().square().sum()) for a, b in zip(weights, before, strict=True))
        # 1e-6 in most steps; an activation beside 0 that rounding moves across it changes some gradients.
        assert error**0.5 < 1e-2 * change**0.5, step
    assert load_model(tmp_path / "run").image_size == 48


def weights_after(step, run, config, num_classes):
    """Return the network and the class centers after a step."""
    checkpoint = Checkpoint(run / "checkpoints" / f"step_{step:08d}")
    network = IResNet(config.model.layers, config.model.widths, embedding_size=16, image_size=48)
    network.load_state_dict(checkpoint.replicated("backbone."))
    return network, torch.nn.Parameter(checkpoint.rows("weight", 0, num_classes))


def test_a_size_that_the_backbone_cannot_train_on_is_refused_before_the_run_begins(describe, tmp_path):
    settings = ["train.stages=[{until_epoch: 1, image_size: 36}]", "data.image_size=48"]
    with pytest.raises(ConfigError, match=r"^stage 1 of train.stages: image_size: 36 pixels do not fit"):
        training.train(load_config(describe(), settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
