import errno
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from facetrain.cli.progress_bar import progress_bar
from facetrain.errors import RunError
from facetrain.telemetry import meter as meter_module
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines, read_jsonl
from facetrain.telemetry.log import log_to, logger, stop_logging, was_replaced
from facetrain.telemetry.meter import Meter
from tests.support.command import environment
from tests.support.faults import files_limited_to, full, small_disk
from tests.support.waiting import set_time


def test_the_meter_reports_means_since_the_last_report():
    meter = Meter()
    for loss in (1.0, 3.0):
        meter.add("loss", torch.tensor(loss, requires_grad=True))
    meter.add_images(10)
    report = meter.report()
    assert report["loss"] == 2.0
    assert report["images_per_s"] > 0
    assert set(meter.report()) == {"images_per_s"}


def test_images_per_second_count_the_time_of_training_alone(monkeypatch):
    now = 0.0
    set_time(monkeypatch, meter_module.__name__, perf_counter=lambda: now)
    meter = Meter()
    meter.add_images(10)
    now = 2.0
    assert meter.report()["images_per_s"] == 5.0
    meter.add_images(30)
    now = 4.0
    assert meter.report()["images_per_s"] == 15.0
    meter.add_images(10)
    now = 7.0
    meter.restart_clock()
    meter.add_images(6)
    now = 14.0
    meter.exclude(4.0)
    assert meter.report()["images_per_s"] == 2.0


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


def test_a_resume_removes_the_changes_of_an_earlier_resume_from_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for rate in (0.5, 0.1):
        lines = JsonLines(path, resume_at=20)
        lines.write(20, {"config_key": "optim.lr", "now": rate})
        lines.write(20, {"loss": 1.0})
        lines.close()
    assert [record.get("now") for record in read_jsonl(path)] == [None, 0.1]
    JsonLines(path, resume_at=30).close()
    assert len(read_jsonl(path)) == 2


def test_a_record_that_is_repeated_after_a_resume_is_in_the_file_once_and_a_new_run_starts_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for resume_at in (None, 10, 10, None):
        lines = JsonLines(path, resume_at=resume_at)
        lines.write(10, {"lfw/accuracy": 0.5})
        lines.write(20, {"loss": 1.0})
        lines.close()
        assert [record["step"] for record in read_jsonl(path)] == [10, 20]


def test_a_sync_writes_the_records_that_a_full_disk_has_refused(tmp_path):
    with small_disk(tmp_path / "disk", size_kib=64):
        lines = JsonLines(tmp_path / "disk" / "metrics.jsonl")
        with full(tmp_path / "disk"):
            lines.write(10, {"loss": 1.0})
            with pytest.raises(OSError, match="some records are not written yet"):
                lines.sync()
        lines.sync()
        assert [record["step"] for record in read_jsonl(tmp_path / "disk" / "metrics.jsonl")] == [10]
        lines.close()


def test_a_sync_says_why_records_are_not_written(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    with files_limited_to(1 << 20):
        lines.write(10, {"names": "x" * (1 << 20)})
        with pytest.raises(OSError, match="File too large: some records are not written yet"):
            lines.sync()
    lines.close()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [10]


def test_a_file_server_that_fails_at_the_start_is_an_error_of_the_run(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched, pytest.raises(RunError, match=r"metrics\.jsonl: .*[Ss]tale"):
        patched.setattr(Path, "exists", fail)
        JsonLines(tmp_path / "metrics.jsonl")


def test_a_sync_that_fails_loses_no_record(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write(10, {"loss": 1.0})
    lines.sync()
    synced = path.read_bytes()

    def refuse(_):
        # A file server takes a write, and refuses it at the sync: zeros stand where the bytes were to be.
        os.truncate(path, len(synced))
        os.truncate(path, len(synced) + 50)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    lines.write(20, {"loss": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="metrics.jsonl"):
            lines.sync()
    assert path.read_bytes() == synced
    lines.sync()
    lines.write(30, {"loss": 1.0})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]


@pytest.mark.parametrize("fault", ["removed", "replaced", "lost handle"])
def test_a_file_that_another_host_has_removed_or_replaced_is_opened_again(tmp_path, monkeypatch, fault):
    log, lines, fsync = log_to(tmp_path / "log.txt", 0), JsonLines(tmp_path / "metrics.jsonl"), os.fsync
    lost = {"log.txt", "metrics.jsonl"} if fault == "lost handle" else set()
    lines.write(10, {"loss": 1.0})
    lines.sync()
    lines.write(20, {"loss": 1.0})
    for path in (tmp_path / "log.txt", tmp_path / "metrics.jsonl"):
        if fault == "removed":
            path.unlink()
        elif fault == "replaced":
            path.with_name("copy").write_bytes(path.read_bytes())
            path.with_name("copy").replace(path)

    def refuse_once(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name in lost:
            lost.remove(name)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_once)
    log.sync()
    lines.sync()
    logger.info("after it")
    lines.write(30, {"loss": 1.0})
    lines.close()
    stop_logging(log)
    steps = [20, 30] if fault == "removed" else [10, 20, 30]
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == steps
    assert "after it" in (tmp_path / "log.txt").read_text() and not lost


def test_another_file_at_the_path_of_an_open_one_replaces_it_but_no_link_and_not_a_file_whose_folder_is_gone(
    tmp_path, monkeypatch
):
    path, other = tmp_path / "run" / "log.txt", tmp_path / "other"
    path.parent.mkdir()
    other.touch()

    def fail(_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with path.open("w") as file:
        assert not was_replaced(file.fileno(), path)
        path.unlink()
        assert was_replaced(file.fileno(), path)
        path.symlink_to(other)
        assert not was_replaced(file.fileno(), path)
        other.replace(path)
        assert was_replaced(file.fileno(), path)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fstat", fail)
            assert was_replaced(file.fileno(), path), "a file server has lost it"
        path.parent.rename(tmp_path / "moved")
        assert not was_replaced(file.fileno(), path)


def test_a_log_on_a_disk_that_fails_is_one_warning_and_its_file_is_opened_again(tmp_path, monkeypatch, capfd):
    log = log_to(tmp_path / "run" / "log.txt", 0)
    close = log.stream.close

    def fail(*_):
        close()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    log.stream.close = fail
    log.sync()
    shutil.rmtree(tmp_path / "run")
    log.sync()
    logger.info("a line that is lost")
    (tmp_path / "run").mkdir()
    logger.info("a line after it")
    stop_logging(log)
    assert (tmp_path / "run" / "log.txt").read_text().count("a line") == 1
    assert capfd.readouterr().err.count("lines of the log may be lost") == 1


@pytest.mark.parametrize("output", ["metrics", "log"])
def test_a_slow_sync_does_not_hold_up_what_the_run_writes(tmp_path, monkeypatch, output):
    log, lines = log_to(tmp_path / "log.txt", 0), JsonLines(tmp_path / "metrics.jsonl")
    sync, write = {
        "metrics": (lines.sync, lambda: lines.write(10, {"loss": 1.0})),
        "log": (log.sync, lambda: logger.info("step 10")),
    }[output]
    held_up = []

    def write_beside(_):
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(timeout=10)
        held_up.append(writer.is_alive())

    monkeypatch.setattr(os, "fsync", write_beside)
    sync()
    assert held_up == [False]
    lines.close()
    stop_logging(log)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == (output == "metrics"), "a record is written once"


def test_no_message_advises_to_remove_the_metrics_because_the_disk_is_full(tmp_path):
    with small_disk(tmp_path / "disk", size_kib=64):
        path = tmp_path / "disk" / "metrics.jsonl"
        path.write_text('{"step": 1, "loss": 2.0}\n')
        with full(tmp_path / "disk"), pytest.raises(RunError, match="metrics.jsonl: No space") as caught:
            JsonLines(path, resume_at=1)
    assert "remove" not in str(caught.value) and "free space" in str(caught.value)


def test_records_that_are_lost_at_the_end_are_counted(tmp_path, capfd):
    with small_disk(tmp_path / "disk", size_kib=64):
        lines = JsonLines(tmp_path / "disk" / "metrics.jsonl")
        with full(tmp_path / "disk"):
            for step in (10, 20):
                lines.write(step, {"loss": 1.0})
            lines.close()
    assert "metrics.jsonl: 2 records are lost, because they could not be written" in capfd.readouterr().err


STEP = {"loss": 1.5, "lr": 0.1, "images_per_s": 1234.0, "left_s": 65.0, "peak_memory_gib": 0.5}
VERIFICATION = {"lfw/accuracy": 0.9951, "lfw/auc": 0.99876, "lfw/tar@1e-03": 0.99998, "lfw/pairs": 6000.0}
STEP_LINE = "step 100/200  loss 1.5000  lr 0.10000  1,234 images/s  0:01:05 left  peak memory 0.50 GiB"
VERIFICATION_LINE = "step 100: verification of lfw  accuracy 99.51%  AUC 0.9988  TAR@1E-03 99.9980%"


def write_both(console):
    console.write(100, STEP)
    console.write(100, VERIFICATION)
    console.close()


@pytest.mark.parametrize(
    ("is_terminal", "variables"), [(False, {}), (False, {"FORCE_COLOR": "1"}), (True, {"TERM": "dumb"})]
)
def test_where_no_bar_can_be_drawn_progress_is_a_line_with_rate_time_left_and_peak_memory(
    tmp_path, capfd, monkeypatch, is_terminal, variables
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    log = log_to(tmp_path / "log.txt", 0)
    write_both(Console(total_steps=200))
    stop_logging(log)
    assert capfd.readouterr().err.splitlines() == [STEP_LINE, VERIFICATION_LINE]
    text = (tmp_path / "log.txt").read_text()
    assert STEP_LINE in text and VERIFICATION_LINE in text


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=len, flush=bool)], ids=["none", "no isatty"])
def test_a_program_may_have_replaced_standard_error(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    write_both(Console(total_steps=200))
    with progress_bar("embedding") as progress:
        progress(1, 2)


def test_a_line_is_not_wrapped_and_the_name_of_a_set_is_shown_as_it_is(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    Console(total_steps=200).write(3, {"[red]mine\x1b[2J/accuracy": 0.5})
    assert capfd.readouterr().err == "step 3: verification of [red]mine\\x1b[2J  accuracy 50.00%\n"


def test_the_log_has_times_in_utc_on_every_host(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        log = log_to(tmp_path / "a new folder" / "log.txt", 0)
        logger.info("a line")
        stop_logging(log)
    time.tzset()
    day, clock, *_ = (tmp_path / "a new folder" / "log.txt").read_text().split()
    written = datetime.fromisoformat(f"{day} {clock}")
    assert timedelta(0) <= datetime.now(UTC) - written < timedelta(minutes=10)


def test_a_terminal_shows_the_progress_beside_the_bar_and_the_verification_above_it(capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    console = Console(total_steps=200, start_step=20)
    console._bar.refresh()
    console.advance(50, "verifying [a]: 40%")
    console._bar.refresh()
    first = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    assert "10%" in first and "25% verifying [a]: 40%" in first
    write_both(console)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    assert STEP_LINE in text and VERIFICATION_LINE in text
    assert all(before.endswith("% ") for before in text.split(STEP_LINE)[:-1]), "never on a line of its own"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_a_record_does_not_let_a_run_write_outside_of_its_folder(tmp_path, exists):
    outside, log, metrics = tmp_path / "outside", tmp_path / "log.txt", tmp_path / "metrics.jsonl"
    content = '{"step": 1, "loss": 2.0}\n'
    if exists:
        outside.write_text(content)
    for path in (log, metrics):
        path.symlink_to(outside)
    with pytest.raises(RunError, match=re.escape(str(log))):
        log_to(log, 0)
    writer = JsonLines(metrics, resume_at=1)
    writer.write(2, {"loss": 1.0})
    writer.close()
    assert not metrics.is_symlink() and metrics.read_text().count("\n") == 1 + exists
    assert outside.read_text() == content if exists else not outside.exists()


def test_messages_go_to_the_handlers_of_the_program_again_when_the_run_has_ended(tmp_path, caplog):
    log = log_to(tmp_path / "log.txt", 0)
    logger.warning("during")
    stop_logging(log)
    logger.warning("after")
    assert [record.message for record in caplog.records] == ["after"]
    assert "after" not in (tmp_path / "log.txt").read_text() and logger.level == logging.NOTSET


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"lr": 4e-6}, "lr 4e-06"),
        ({"lr": 0.0012}, "lr 0.00120"),
        ({"lr": 0.0}, "lr 0"),
        ({"images_per_s": 0.4}, "0.4 images/s"),
        ({"images_per_s": 123456.7}, "123,457 images/s"),
        ({"loss": 1e30}, "loss 1e+30"),
        ({"loss": 0.00012}, "loss 0.00012"),
        ({"loss": -1.5}, "loss -1.5000"),
        ({"loss": math.nan}, "loss nan"),
    ],
)
def test_a_line_has_digits_of_small_numbers_and_few_of_a_loss_that_diverges(capfd, values, shown):
    console = Console(total_steps=200)
    console.write(100, STEP | values)
    console.close()
    assert f"  {shown}  " in capfd.readouterr().err


def test_a_line_has_the_distillation_loss_and_no_auc_without_impostor_pairs(capfd):
    console = Console(total_steps=200)
    console.write(100, STEP | {"distill_loss": 0.27})
    console.write(3, {"mine/accuracy": 0.5})
    console.close()
    step, verification = capfd.readouterr().err.splitlines()
    assert "  loss 1.5000  distill loss 0.2700  lr 0.10000  " in step
    assert verification == "step 3: verification of mine  accuracy 50.00%"


def test_a_warning_outside_a_run_is_printed_once():
    # In a process of its own: pytest adds a handler.
    code = "from facetrain.telemetry.log import warn; warn('the disk is slow')"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), text=True, capture_output=True)
    assert done.stderr == "warning: the disk is slow\n"


def test_a_full_disk_is_reported_once_per_file_and_metrics_lose_no_record(tmp_path, capfd):
    disk = tmp_path / "disk"
    with small_disk(disk, size_kib=64):
        log = log_to(disk / "log.txt", 0)
        lines = JsonLines(disk / "metrics.jsonl")
        lines.write(1, {"loss": 1.0})
        with full(disk):
            for step in range(2, 40):
                lines.write(step, {"loss": float(step)} | {f"number_{n}": 0.0 for n in range(50)})
                logger.info("x" * 200)
            assert len(read_jsonl(disk / "metrics.jsonl")) < 39
            stop_logging(log)
        lines.write(40, {"loss": 40.0})
        assert [record["step"] for record in read_jsonl(disk / "metrics.jsonl")] == list(range(1, 41))
        lines.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert "warning: " in line and "No space left on device" in line


def test_a_resume_has_the_records_until_its_step_on_the_disk_before_it_trains(tmp_path, monkeypatch):
    path, synced = tmp_path / "metrics.jsonl", []
    lines = JsonLines(path)
    for step in (1, 2, 3):
        lines.write(step, {"loss": 1.0})
    lines.close()
    fsync = os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    resumed = JsonLines(path, resume_at=2)
    names, folder = synced[:-1], synced[-1]
    assert len(names) == 1 and "metrics.jsonl" in names[0] and folder == str(tmp_path)
    resumed.close()
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]
