"""Commands without a run take the newest one, and say so; `eval` takes the verification sets of the run."""

import os
from pathlib import Path

import pytest

from facetrain.data.formats.bin import write_bin
from facetrain.run.asked_config import recorded_config
from facetrain.run.request import TrainRequest
from tests.support.command import facetrain, refusal
from tests.support.faces import face
from tests.support.models import write_model


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Write two runs into the folder runs, of which `b` is older than `a`."""
    for time, name in ((1e9, "b"), (2e9, "a")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"data: {{train: {tmp_path}}}\neval: {{targets: [val]}}\n")
        (run / "environment.json").write_text("{}")
        os.utime(run / "environment.json", (time, time))
        write_model(run / "model.safetensors")
    (tmp_path / "runs" / "no_run").mkdir()
    write_bin(tmp_path / "val.bin", [face(n) for n in range(40)], [n % 2 == 0 for n in range(20)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_eval_takes_the_newest_run_and_its_sets(runs):
    done = facetrain("eval", "--bootstrap", 0, cwd=runs)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["runs/a: the newest run", "runs/a: its own verification sets: val"]
    assert any(line.startswith("val") for line in lines)
    done = facetrain("eval", runs / "runs" / "b", "--bootstrap", 0, "--json", "-", cwd=runs)
    assert done.stdout.startswith("{") and done.stderr.startswith(
        f"{runs}/runs/b: its own verification sets: val"
    )


@pytest.mark.slow
def test_report_takes_the_newest_run(runs):
    done = facetrain("report", cwd=runs)
    assert done.stdout.splitlines() == ["runs/a: the newest run", "runs/a/report.html"], done.stderr


def test_resume_takes_the_newest_run(runs):
    assert "runs/a" in str(refusal("resume", "--set", "train.device=cpu"))
    folder, asked = recorded_config(TrainRequest(command="resume"))
    assert (folder, asked.remarks) == (Path("runs/a"), ("runs/a: the newest run",))


@pytest.mark.parametrize("command", ["eval", "report", "resume"])
def test_without_any_run_one_is_asked_for(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "runs: has no run; give the folder of one" in str(refusal(command))
