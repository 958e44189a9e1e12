"""Runs of a backbone with KP-RPE, which takes landmarks with each image."""

import numpy as np
import pytest

from facetrain.data.formats.landmark_file import write_landmarks
from facetrain.errors import DataError
from tests.support.command import facetrain, refusal
from tests.support.datasets import write_records
from tests.support.runs import checked, losses

SETTINGS = (
    "model.backbone=vit_s_kprpe", "model.layers=null", "model.widths=null", "train.global_batch_size=8",
    "train.max_steps=4", "checkpoint.every_steps=2", "eval.targets=[]", "data.augment.crop=0.5", "optim.lr=0.5",
    "data.min_images_per_identity=1",
)  # fmt: skip


@pytest.fixture
def arguments(describe, tmp_path):
    def make(folder, *settings):
        options = [
            f"--set={setting}" for setting in (*SETTINGS, f"data.train={tmp_path / 'data'}", *settings)
        ]
        return ["train", "--config", describe(), *options, "--run-dir", folder]

    write_records(tmp_path / "data", [n // 4 for n in range(40)], size=32)
    return make


def test_a_dataset_without_landmarks_is_refused_with_the_command_that_writes_them(arguments, tmp_path):
    error = refusal(*arguments(tmp_path / "a"))
    assert isinstance(error, DataError)
    assert (
        "has no landmarks, which backbone vit_s_kprpe needs; write them with `facetrain data landmarks"
        in str(error)
    )


@pytest.mark.long
def test_a_resumed_run_repeats_the_losses_and_landmarks_change_them(arguments, tmp_path):
    landmarks = np.random.default_rng(0).uniform(0, 1, (40, 5, 2)).astype(np.float32)
    write_landmarks(tmp_path / "data" / "landmarks.npy", landmarks)
    checked(facetrain(*arguments(tmp_path / "whole")))
    checked(facetrain(*arguments(tmp_path / "half", "train.max_steps=2")))
    checked(facetrain("resume", tmp_path / "half", "--set", "train.max_steps=4"))
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "half")[2:] == whole[2:]
    write_landmarks(tmp_path / "data" / "landmarks.npy", landmarks[::-1])
    error = refusal("resume", tmp_path / "half", "--set", "train.max_steps=5")
    assert "was trained with other landmarks beside the dataset" in str(error)
    checked(facetrain(*arguments(tmp_path / "other")))
    other = losses(tmp_path / "other")
    assert other[0] == whole[0]  # the biases begin at 0
    assert other[1:] != whole[1:]
