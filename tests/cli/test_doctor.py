import json
import sys

import numpy as np
import pytest

from facetrain.cli.app import main
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.landmark_file import write_landmarks
from facetrain.data.open_dataset import open_dataset
from tests.support.command import torchrun
from tests.support.datasets import images_of, write_records


def run(monkeypatch, capsys, *arguments):
    """Run the command in this process; return its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["facetrain", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


SHAPE = {"layers": [1, 1, 1, 1], "widths": [8, 8, 8, 8]}


def write_config(tmp_path, labels=(0, 0, 1, 1), **data):
    """Write a dataset, and a config that trains on it."""
    write_records(tmp_path / "data", labels, size=data.get("image_size", 16))
    config = {
        "run": {"dir": str(tmp_path / "runs")},
        "data": {"train": str(tmp_path / "data"), "image_size": 16, **data},
        "model": {"backbone": "iresnet", "embedding_size": 16} | SHAPE,
        "optim": {"lr": 0.0004},
        "train": {"batch_size": 2, "epochs": 1, "precision": "fp32", "device": "cpu"},
        "eval": {"targets": []},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.slow
def test_a_run_without_problems_passes(tmp_path, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--config", write_config(tmp_path))
    assert code == 0 and "0 failures, 0 warnings" in out
    assert "4 images of 2 identities" in out


@pytest.mark.slow
def test_landmarks_of_the_training_images_are_required_and_counted(tmp_path, monkeypatch, capsys):
    settings = ("model.backbone=vit_s_kprpe", "model.layers=null", "model.widths=null")
    options = ("--config", write_config(tmp_path), *(word for value in settings for word in ("--set", value)))
    code, out, _ = run(monkeypatch, capsys, *options)
    assert code == 1 and "has no landmarks, which backbone vit_s_kprpe needs" in out
    points = np.full((4, 5, 2), 0.5, np.float32)
    for missing, status in ((2, "ok"), (3, "warning")):
        points[:missing] = np.nan
        write_landmarks(tmp_path / "data" / "landmarks.npy", points)
        code, out, _ = run(monkeypatch, capsys, *options, "--json")
        (found,) = [check for check in json.loads(out)["results"] if check["check"] == "landmarks"]
        assert found["status"] == status and found["message"] == f"{4 - missing} of 4 images have landmarks"


def test_failures_contain_advice_and_the_exit_code_is_one(tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, num_classes=3)
    code, out, _ = run(monkeypatch, capsys, "--config", path, "--set", "eval.targets=[lfw]", "--json")
    report = json.loads(out)
    failed = {one["check"]: one["message"] for one in report["results"] if one["status"] == "failure"}
    assert code == 1 and report["failures"] == 2
    assert "for another dataset add --set data.num_" in failed["dataset"]
    assert "no such verification set" in failed["verification sets"]


def test_pairs_of_training_images_are_reported(tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path)
    images = [image for _, image in images_of(open_dataset(tmp_path / "data"))]
    write_bin(tmp_path / "own.bin", images, [True, False])
    code, out, _ = run(
        monkeypatch, capsys, "--config", path, "--set", f"eval.targets=[{tmp_path / 'own.bin'}]"
    )
    assert code == 0 and f"own: 4 of 4 examined images are in {tmp_path / 'data'}" in out
    assert "facetrain data split" in out


@pytest.mark.slow
def test_under_torchrun_the_network_between_the_ranks_is_measured(tmp_path):
    done = torchrun(2, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    network = next(r for r in json.loads(done.stdout)["results"] if r["check"] == "network")
    assert "2 ranks on 1 host: gloo all-reduce at" in network["message"]


def test_a_setting_is_refused_without_a_config(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "--set", "no.such.key=1")
    assert code == 2 and "--set" in err and "--config" in err
