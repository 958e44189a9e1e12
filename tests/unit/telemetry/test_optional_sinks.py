"""Weights & Biases behind the recorder: its runs continue after a resume, its failures end nothing."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from facetrain.telemetry import recorder as recorder_module
from facetrain.telemetry.recorder import OptionalSink, Recorder
from facetrain.telemetry.wandb import WandB

CONFIG = {"seed": 1, "optim": {"lr": 0.1}}
VALUES = {"loss": 2.0, "lfw/tar@1e-03": 0.5, "mine (v2)+x/auc": 0.25}


class Memory:
    def __init__(self, fails_at=None):
        self.written, self.end, self.fails_at = [], None, fails_at

    def write(self, step, values):
        if step == self.fails_at:
            raise ConnectionError("no route to host")
        self.written.append((step, values))

    def close(self, end):
        self.end = end


@pytest.mark.parametrize("end", ["finished", "stopped", "failed"])
def test_all_values_and_the_end_arrive_in_order_before_close_returns(end):
    sink = Memory()
    recorder = Recorder(OptionalSink("log.test", lambda: sink))
    for step in range(50):
        recorder.write(step, VALUES)
    recorder.close(end)
    assert sink.written == [(step, VALUES) for step in range(50)] and sink.end == end


def test_a_failure_is_one_warning_and_the_run_goes_on(capfd):
    sink = Memory(fails_at=2)
    recorder = Recorder(OptionalSink("log.test", lambda: sink))
    for step in range(5):
        recorder.write(step, VALUES)
    recorder.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "warning: log.test: no route to host; nothing more is sent, and training continues"
    )
    assert [step for step, _ in sink.written] == [0, 1]


def test_a_package_that_is_missing_is_one_warning(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    options = {"project": "p", "name": "n", "config": {}, "resumed": False}
    recorder = Recorder(OptionalSink("log.wandb", lambda: WandB(tmp_path, **options)))
    recorder.write(1, VALUES)
    recorder.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: log.wandb: ") and "wandb" in line.partition("log.wandb")[2]


def test_a_service_that_hangs_delays_neither_a_step_nor_the_end_beyond_the_limit(capfd, monkeypatch):
    monkeypatch.setattr(recorder_module, "CLOSE_S", 0.1)
    hang = threading.Event()

    def connect():
        hang.wait()
        return Memory()

    sink = OptionalSink("log.test", connect)
    sink.write(1, VALUES)
    sink.close()
    assert "log.test: the last values were not sent" in capfd.readouterr().err
    hang.set()


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_gets_the_metrics_and_a_resume_keeps_the_run_id(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for resumed, step, end in ((False, 5, "failed"), (True, 6, "stopped"), (True, 7, "finished")):
        sink = WandB(tmp_path, project="faces", name="tiny", config=CONFIG, resumed=resumed)
        sink.write(step, VALUES)
        sink.close(end)
    wandb.teardown()
    run_id = (tmp_path / "wandb_run_id.txt").read_text().strip()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert files and {path.name for path in files} == {f"run-{run_id}.wandb"}
    content = b"".join(path.read_bytes() for path in files)
    assert b"loss/loss" in content and b"eval/lfw/tar@1e-03" in content and b"tiny" in content


@pytest.mark.parametrize(
    ("end", "expected"), [("finished", [0]), ("stopped", ["preempting", 1]), ("failed", [1])]
)
def test_wandb_gets_the_end_of_the_run(tmp_path, monkeypatch, end, expected):
    calls = []
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        mark_preempting=lambda: calls.append("preempting"),
        finish=lambda exit_code: calls.append(exit_code),
    )
    package = SimpleNamespace(init=lambda **_: run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    WandB(tmp_path, project="faces", name="tiny", config=CONFIG, resumed=False).close(end)
    assert calls == expected


def test_the_package_is_not_imported_if_it_is_off():
    script = "import sys, facetrain.run.training; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3]).returncode == 0
