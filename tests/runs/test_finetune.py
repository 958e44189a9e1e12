"""Fine-tuning from a dataset of faces to the kept model: interrupted, resumed, repeated as an ordinary run."""

import signal
import time

import pytest
import yaml

from tests.support.command import facetrain, output_of, refusal, start
from tests.support.models import write_model


@pytest.mark.slow
def test_an_interrupted_fine_tuning_is_resumed_and_keeps_a_model(tmp_path):
    photos, output, first = tmp_path / "photos", tmp_path / "out", tmp_path / "first.safetensors"
    faces = ("--identities", 20, "--images-per-identity", 10, "--eval-identities", 2, "--eval-pairs", 20)
    output_of("data", "synth", "--output", photos, *faces, "--image-size", 32)
    write_model(first)
    command = ("finetune", photos, "--model", first, "--output", output)
    process = start(*command, "--set", "train.max_steps=200")
    while process.poll() is None and not (output / "run" / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "already exists; choose another --output, or continue with --resume" in str(refusal(*command))

    printed = output_of(*command, "--resume", "--set", "train.max_steps=200")
    assert "60 images of 20 people are held out" in printed
    assert "kept: " in printed and "held_out: accuracy" in printed and "  threshold " in printed, printed
    page = (output / "report.html").read_text()
    for part in (
        "Choices",
        "Faces",
        "Left out",
        "First batch",
        "Curves",
        "Genuine pairs",
    ):
        assert part in page
    compared = facetrain("eval", output / "model.safetensors", "--target", output / "held_out.bin")
    assert compared.returncode == 0, compared.stderr

    # The config is an ordinary one: the same run by hand.
    chosen = yaml.safe_load((output / "finetune.yaml").read_text())
    assert chosen["distill"]["teacher"] == str(first) and chosen["train"]["max_steps"] == 200
    by_hand = ("--config", output / "finetune.yaml", "--set", "train.max_steps=2")
    assert "at step 2" in output_of("train", *by_hand, "--run-dir", tmp_path / "by_hand")
