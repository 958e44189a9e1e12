"""Whole runs on GPUs against the same runs on the CPU, and a step whose host does not wait."""

import math
import subprocess
import sys
from itertools import islice

import pytest
import torch

from facetrain.bench.train import build_run, repeated_batch
from facetrain.config.loading import load_config
from facetrain.data.open_dataset import open_dataset
from facetrain.distributed.world import join
from facetrain.run.parts.loader import build_loader
from facetrain.run.parts.step_schedule import schedule_steps
from tests.support import training as run
from tests.support.command import facetrain
from tests.support.gpu_runs import DEVICE, HEADS, trained
from tests.support.runs import checked, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand"),
    pytest.mark.filterwarnings("default"),  # the compiler's own are not ours
]
AUGMENTED = "data.augment={low_resolution: 0.5, blur: 0.5, gray: 0.5, color: 0.5, crop: 0.5}"


@pytest.mark.parametrize("name", HEADS)
def test_losses_are_those_of_the_cpu(name, describe, tmp_path):
    config = describe(workers=1, steps=6, **HEADS[name])
    expected = trained(config, tmp_path / "cpu")
    found = trained(config, tmp_path / "gpu", f"train.device={DEVICE}")
    assert found[:2] == pytest.approx(expected[:2], rel=1e-3)
    assert found == pytest.approx(expected, rel=2e-2)


def test_a_program_whose_run_is_the_first_to_use_a_gpu_draws_there_as_without_it(describe, tmp_path):
    program = """
import sys, torch, facetrain
torch.manual_seed(3)
if len(sys.argv) > 1:
    facetrain.train(*sys.argv[1:], eval={"targets": []}, train={"device": "cuda"})
print(torch.rand(3, device="cuda").tolist())
"""
    without, after = (
        subprocess.run([sys.executable, "-c", program, *given], check=True, capture_output=True, text=True)
        for given in ([], [describe(steps=2), tmp_path / "run"])
    )
    assert after.stdout.splitlines()[-1] == without.stdout.splitlines()[-1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_in_16_bits_are_near_those_in_32(precision, describe, tmp_path):
    expected = trained(describe(steps=4), tmp_path / "cpu")
    changes = f"train.device={DEVICE}", "train.compile=on"
    found = trained(describe(steps=4, precision=precision), tmp_path / "gpu", *changes)
    assert found[:2] == pytest.approx(expected[:2], rel=5e-2)
    assert all(map(math.isfinite, found))


@pytest.mark.parametrize("optimizer", ["name=sgd", "name=adamw", "muon.lr=0.01"])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(describe, tmp_path, optimizer, placement):
    config = describe(
        steps=6, sample_rate=0.3, head=f"placement: {placement}", checkpoint="every_steps: 2, keep: 9"
    )
    changes = (
        f"train.device={DEVICE}",
        f"optim.{optimizer}",
        "optim.lr=0.01",
        "model.widths=[16, 16, 16, 16]",
    )
    expected = trained(config, tmp_path / "run", *changes)
    assert run.resume(load_config(tmp_path / "run" / "config.yaml"), tmp_path / "run", 2) == 0
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "backbone"),
    [
        ("on the device", "iresnet"),
        ("sampled on the host", "iresnet"),
        ("in micro-batches", "iresnet"),
        ("adaface", "vit_t"),
    ],
)
def test_a_deterministic_run_resumes_bit_for_bit(describe, tmp_path, name, backbone):
    """In processes of its own: cuBLAS reads its setting when it starts."""
    layers = [] if backbone == "iresnet" else ["model.layers=null", "model.widths=null"]
    changes = [
        f"train.device={DEVICE}", "train.deterministic=true", "train.precision=bf16",
        f"model.backbone={backbone}", "eval.targets=[]", *layers,
    ]  # fmt: skip
    config = describe(workers=1, steps=6, checkpoint="every_steps: 2, keep: 9", **HEADS[name])
    command = [part for change in changes for part in ("--set", change)]
    checked(facetrain("train", "--config", config, *command, "--run-dir", tmp_path / "run"))
    expected = losses(tmp_path / "run")
    checked(facetrain("train", "--config", config, *command, "--run-dir", tmp_path / "again"))
    assert losses(tmp_path / "again") == expected
    checked(facetrain("resume", tmp_path / "run", "--checkpoint", "2"))
    assert losses(tmp_path / "run") == expected


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"accumulate": 2}])
def test_the_host_waits_for_the_device_in_no_step(describe, dataset, tmp_path, options):
    config = load_config(describe(**options), [f"train.device={DEVICE}", AUGMENTED, "data.workers=2"])
    source = open_dataset(dataset / "data")
    with join(DEVICE) as world:
        training = build_run(config, world, source.num_classes, tmp_path, source)
        # Kernels are built, averages begin.
        training.take_steps(repeated_batch(training, source.num_classes), 2)
        schedule = schedule_steps(config, source.num_images, world.size)
        loader = build_loader(config, world, source, schedule, start_step=0)
        try:
            batches = list(islice(loader, 2))
            torch.cuda.set_sync_debug_mode("error")  # a wait raises
            training.take_steps(iter(batches), 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            loader.close()
