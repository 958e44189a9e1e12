import json

import torch

from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines, read_jsonl
from facetrain.telemetry.meter import Meter


def test_the_meter_averages_what_came_since_the_last_report():
    meter = Meter()
    for loss in (1.0, 3.0):
        meter.add("loss", torch.tensor(loss, requires_grad=True))
    meter.add_images(10)
    report = meter.report()
    assert report["loss"] == 2.0
    assert report["images_per_s"] > 0
    assert set(meter.report()) == {"images_per_s"}


def test_records_of_steps_after_the_checkpoint_are_forgotten_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in (10, 20, 30):
        first.write(step, {"loss": float(step)})
    first.close()
    path.write_text(path.read_text() + '{"step": 40, "lo')
    second = JsonLines(path, resume_at=20)
    second.write(30, {"loss": float("nan")})
    second.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]
    assert read_jsonl(path)[-1]["loss"] == "nan"


def test_a_new_run_in_an_old_folder_starts_its_metrics_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        lines = JsonLines(path)
        lines.write(1, {"loss": 1.0})
        lines.close()
    assert len(read_jsonl(path)) == 1


def test_progress_without_a_terminal_is_a_line_with_rate_time_left_and_memory(capfd):
    console = Console(total_steps=200)
    values = {"loss": 1.5, "lr": 0.1, "images_per_s": 1234.0, "left_s": 65.0, "memory_gib": 0.5}
    console.write(100, values)
    console.write(100, {"lfw/accuracy": 0.9951})
    console.close()
    said = capfd.readouterr().err
    assert "step 100/200  loss 1.5000  lr 0.10000  1,234 images/s  0:01:05 left  0.50 GiB" in said
    assert "verification accuracy  lfw 99.51%" in said
