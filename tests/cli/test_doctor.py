import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.cli.app import main
from facetrain.data.formats.landmark_file import write_landmarks
from tests.support.datasets import write_records
from tests.support.snapshots import snapshot


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
    assert "4 images of 2 identities" in out and "2 per step; 2 steps per epoch" in out


@pytest.mark.slow
def test_initial_weights_that_are_missing_or_of_another_network_fail(tmp_path, monkeypatch, capsys):
    options = {"layers": (1, 1, 1, 1), "embedding_size": 16, "image_size": 16}
    for name, width in (("same", 8), ("wider", 16)):
        network = build_backbone("iresnet", widths=(8, 8, 8, width), **options)
        torch.save(network.state_dict(), tmp_path / f"{name}.pt")
    config = write_config(tmp_path)
    for name, code, message in (
        ("same", 0, "same.pt: fits iresnet; the class centers start anew"),
        ("wider", 1, "wider.pt: does not fit the network"),
        ("none", 1, "none.pt: no such file"),
    ):
        setting = f"model.init_from={tmp_path}/{name}.pt"
        found, out, _ = run(monkeypatch, capsys, "--config", config, "--set", setting)
        assert found == code and message in out, out


@pytest.mark.slow
def test_batch_and_learning_rate_are_checked_for_the_intended_number_of_gpus(tmp_path, monkeypatch, capsys):
    config = write_config(tmp_path, [n // 4 for n in range(64)])
    arguments = ("--config", config, "--set", "optim.lr=0.0032")
    assert "1 rank × " in (alone := run(monkeypatch, capsys, *arguments)[1]) and "lower optim.lr" in alone
    eight = run(monkeypatch, capsys, *arguments, "--gpus", 8)[1]
    assert "2 images × 8 ranks × 1 micro-batch = 16 per step" in eight and "0 warnings" in eight
    assert run(monkeypatch, capsys, "--gpus", 8)[0] == 2


@pytest.mark.slow
def test_without_a_launcher_the_run_is_checked_for_all_gpus_of_the_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("facetrain.distributed.topology.has_gpu_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = ("--config", write_config(tmp_path, [n // 4 for n in range(64)]))
    assert "2 images × 1 rank × " in run(monkeypatch, capsys, *config)[1]
    assert "2 images × 8 ranks × " in run(monkeypatch, capsys, *config, "--set", "train.device=auto")[1]


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


def test_the_checkpoints_are_verified_without_a_sound_config(tmp_path, monkeypatch, capsys):
    CheckpointWriter(tmp_path / "checkpoints", asynchronous=False).save(snapshot(1))
    (tmp_path / "config.yaml").write_text("data: {trian: faces}\n")
    code, out, _ = run(monkeypatch, capsys, tmp_path)
    assert code == 1 and "trian is not a key" in out and "all checksums match" in out
    code, _, err = run(monkeypatch, capsys, tmp_path, "--set", "seed=1")
    assert code == 2 and "trian is not a key" in err


def test_a_missing_folder_is_a_usage_error(tmp_path, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, tmp_path / "none")
    assert code == 2 and err.startswith("error: ") and "no such folder" in err
    code, _, err = run(monkeypatch, capsys, tmp_path)
    assert code == 2 and "not the folder of a run: it has neither config.yaml nor checkpoints" in err


@pytest.mark.slow
def test_under_torchrun_the_network_between_the_ranks_is_measured(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "facetrain", "doctor", "--json"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    network = next(r for r in json.loads(done.stdout)["results"] if r["check"] == "network")
    assert "2 ranks on 1 host: gloo all-reduce at" in network["message"]


@pytest.mark.parametrize("option", [("--gpus", "2"), ("--set", "no.such.key=1")])
def test_an_option_for_a_config_is_refused_without_one(option, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, *option)
    assert code == 2 and err == f"error: {option[0]} needs a config to check; give one with --config\n"
