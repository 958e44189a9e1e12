import json

import cv2
import numpy as np
import torch

from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines, read_jsonl
from facetrain.telemetry.log import log_to, logger, stop_logging
from facetrain.telemetry.meter import Meter
from facetrain.telemetry.recorder import Recorder
from facetrain.telemetry.tensorboard import TensorBoard
from tests.support.events import read_events
from tests.support.faults import full, small_disk


def test_the_meter_reports_means_since_the_last_report():
    meter = Meter()
    for loss in (1.0, 3.0):
        meter.add("loss", torch.tensor(loss, requires_grad=True))
    meter.add_images(10)
    report = meter.report()
    assert report["loss"] == 2.0
    assert report["images_per_s"] > 0
    assert set(meter.report()) == {"images_per_s"}


def test_a_resume_removes_the_records_of_steps_after_the_checkpoint(tmp_path):
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


def test_a_record_that_is_repeated_after_a_resume_is_in_the_file_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for resume_at in (None, 10, 10):
        lines = JsonLines(path, resume_at=resume_at)
        lines.write(10, {"lfw/accuracy": 0.5})
        lines.write(20, {"loss": 1.0})
        lines.close()
    assert [record["step"] for record in read_jsonl(path)] == [10, 20]


def test_a_new_run_in_an_old_folder_starts_with_empty_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        lines = JsonLines(path)
        lines.write(1, {"loss": 1.0})
        lines.close()
    assert len(read_jsonl(path)) == 1


def test_without_a_terminal_progress_is_a_line_with_rate_time_left_and_memory(capfd):
    console = Console(total_steps=200)
    values = {"loss": 1.5, "lr": 0.1, "images_per_s": 1234.0, "left_s": 65.0, "memory_gib": 0.5}
    console.write(100, values)
    console.write(100, {"lfw/accuracy": 0.9951})
    console.close()
    stderr = capfd.readouterr().err
    assert "step 100/200  loss 1.5000  lr 0.10000  1,234 images/s  0:01:05 left  0.50 GiB" in stderr
    assert "verification accuracy  lfw 99.51%" in stderr


def test_images_in_an_event_file_keep_every_pixel(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    recorder = Recorder(board=TensorBoard(tmp_path))
    recorder.write(7, {"loss": 1.5})
    recorder.show(7, {"lfw/roc": image})
    recorder.close()
    events = read_events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 1.5)]
    (event,) = events.Images("lfw/roc")
    decoded = cv2.imdecode(np.frombuffer(event.encoded_image_string, np.uint8), cv2.IMREAD_COLOR)
    assert event.step == 7
    np.testing.assert_array_equal(decoded[:, :, ::-1], image)


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    for resume_at, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        board = TensorBoard(tmp_path, resume_at=resume_at)
        for step in steps:
            board.write(step, {"loss": float(step)})
        board.close()
    assert [event.step for event in read_events(tmp_path).Scalars("loss")] == [1, 2, 3, 4]


def test_without_tensorboard_images_are_not_wanted():
    assert not Recorder().has_board
    Recorder().show(1, {"lfw/roc": np.zeros((2, 2, 3), np.uint8)})


def test_a_full_disk_is_reported_once_per_file_and_metrics_lose_no_record(tmp_path, capfd):
    disk = tmp_path / "disk"
    with small_disk(disk, size_kib=64):
        log = log_to(disk / "log.txt", 0)
        lines, board = JsonLines(disk / "metrics.jsonl"), TensorBoard(disk / "tensorboard")
        recorder = Recorder([lines], board)
        recorder.write(1, {"loss": 1.0})
        with full(disk):
            for step in range(2, 40):
                recorder.write(step, {"loss": float(step)} | {f"number_{n}": 0.0 for n in range(50)})
                logger.info("x" * 200)
            assert len(read_jsonl(disk / "metrics.jsonl")) < 39
        recorder.write(40, {"loss": 40.0})
        assert [record["step"] for record in read_jsonl(disk / "metrics.jsonl")] == list(range(1, 41))
        recorder.close()
        stop_logging(log)
        steps = [event.step for event in read_events(disk / "tensorboard").Scalars("loss")]
        assert steps[0] == 1 and steps[-1] == 40 and len(steps) < 40
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert all("warning: " in line and "No space left on device" in line for line in lines)
