"""Weights & Biases and MLflow behind the recorder: their runs continue after a resume, their failures end nothing."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from facetrain.telemetry import recorder as recorder_module
from facetrain.telemetry.mlflow import MLflow
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


@pytest.mark.filterwarnings("ignore")  # of packages that the run does not depend on
def test_a_folder_that_mlflow_refuses_names_the_way_out(tmp_path, monkeypatch, capfd):
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    options = {"experiment": "faces", "name": "tiny", "config": CONFIG, "resumed": False}
    OptionalSink("log.mlflow", lambda: MLflow(tmp_path, uri="store", **options)).close()
    printed = capfd.readouterr().err
    assert (
        "run `mlflow server`" in printed and "MLFLOW_ALLOW_FILE_STORE=true; nothing more is sent" in printed
    )


@pytest.mark.filterwarnings("ignore")  # of packages that the run does not depend on
def test_mlflow_gets_config_and_metrics_and_a_resume_continues_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"file:{tmp_path}/store"
    client, found = MlflowClient(tracking_uri=uri), []
    for resumed, step, end in ((False, 5, "failed"), (True, 6, "stopped"), (True, 7, "finished")):
        options = {"experiment": "faces", "name": "tiny", "config": CONFIG, "resumed": resumed}
        sink = MLflow(tmp_path, uri=uri, **options)
        sink.write(step, VALUES)
        sink.close(end)
        (run,) = client.search_runs([client.get_experiment_by_name("faces").experiment_id])
        found.append(run.info.status)
    assert run.info.run_name == "tiny" and found == ["FAILED", "KILLED", "FINISHED"]
    assert run.data.params == {"seed": "1", "optim.lr": "0.1"}
    history = client.get_metric_history(run.info.run_id, "loss/loss")
    assert [(metric.step, metric.value) for metric in history] == [(5, 2.0), (6, 2.0), (7, 2.0)]
    assert run.data.metrics["eval/lfw/tar_at_1e-03"] == 0.5
    assert run.data.metrics["eval/mine _v2__x/auc"] == 0.25


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


def test_neither_package_is_imported_if_it_is_off():
    script = "import sys, facetrain.run.training; sys.exit(bool({'wandb', 'mlflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3]).returncode == 0
