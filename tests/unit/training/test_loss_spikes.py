import pytest
import torch

from facetrain.config.loading import load_config
from facetrain.data.loading.loader import Batch
from facetrain.run import training
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.training.loss_spikes import SpikeDetector
from tests.runs.conftest import dataset  # noqa: F401
from tests.runs.test_training import metrics

CPU = torch.device("cpu")


def batches(step):
    sample_B = torch.tensor([step, 1000 + step])
    return (Batch(step, 0, torch.zeros(2, 1, 1, 3), sample_B % 7, sample_B),)


def observe(detector, steps, loss):
    return [detector.observe(n, torch.tensor(loss(n)), torch.tensor(2.0), batches(n)).item() for n in steps]


def falling(n):
    return 40.0 - 0.05 * n + 0.3 * (n * 7919 % 11 - 5) / 5


def test_a_spike_is_reported_with_its_images_and_neither_noise_nor_the_first_steps_are():
    detector = SpikeDetector(10, CPU)
    assert sum(observe(detector, range(30), lambda n: 90.0 if n == 20 else falling(n))) == 0
    assert sum(observe(detector, range(30, 300), falling)) == 0 and detector.report() == []
    assert observe(detector, [300, 301, 302], lambda n: [60.0, falling(n), float("nan")][n - 300]) == [
        1,
        0,
        0,
    ]
    (spike,) = detector.report()
    assert (spike["step"], spike["loss"], spike["grad_norm"]) == (300, 60.0, 2.0)
    assert spike["images_and_labels_by_rank"] == [[[[300, 1300], [300 % 7, 1300 % 7]]]]
    assert spike["median"] == pytest.approx(falling(236), abs=0.5) and detector.report() == []


def test_a_detector_continues_from_its_saved_state():
    whole, first, second = (SpikeDetector(2, CPU) for _ in range(3))
    found = observe(whole, range(100), falling)
    observe(first, range(60), falling)
    second.load_state({name: losses.clone() for name, losses in first.state().items()})
    assert observe(second, range(60, 100), falling) == found[60:]


def test_a_resumed_run_reports_the_same_spikes_as_the_uninterrupted_one(dataset, tmp_path):  # noqa: F811
    (tmp_path / "tiny.yaml").write_text(
        f"data: {{train: {dataset}/data, image_size: 32, workers: 0}}\n"
        "model: {backbone: iresnet, layers: [1, 1, 1, 1], widths: [8, 8, 16, 16], embedding_size: 16}\n"
        "train: {global_batch_size: 24, epochs: 99, max_steps: 60, precision: fp32, device: cpu, loss_spike: 0.2}\n"
        "optim: {lr: 1.0e-6}\neval: {targets: []}\nlog: {tensorboard: false, report: false, every_steps: 7}\n"
        "checkpoint: {every_steps: 48}\n"
    )
    config = load_config(tmp_path / "tiny.yaml")
    assert training.train(config, tmp_path / "run") == 0
    spikes, recorded = read_jsonl(tmp_path / "run" / "loss_spikes.jsonl"), metrics(tmp_path / "run")
    assert {spike["step"] <= 48 for spike in spikes} == {True, False}
    assert sum(record["loss_spike"] for record in recorded if "loss" in record) > 0
    assert "loss spike at step" in (tmp_path / "run" / "log.txt").read_text()
    assert training.resume(config, tmp_path / "run", 48) == 0
    assert read_jsonl(tmp_path / "run" / "loss_spikes.jsonl") == spikes
    assert metrics(tmp_path / "run") == recorded
