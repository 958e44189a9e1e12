"""Fine-tuning from a dataset of faces to the kept model: interrupted, resumed, repeated as an ordinary run."""

from __future__ import annotations

import re
import signal

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.models.embedding_model import open_model
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from tests.support.command import facetrain, output_of, refusal, start
from tests.support.models import write_model
from tests.support.runs import wait_for_step


@pytest.mark.slow
def test_an_interrupted_fine_tuning_is_resumed_and_keeps_a_model(web_server, tmp_path):
    photos, output, first = tmp_path / "photos", tmp_path / "out", tmp_path / "first.safetensors"
    faces = ("--identities", 20, "--images-per-identity", 10, "--eval-identities", 2, "--eval-pairs", 20)
    output_of("data", "synth", "--output", photos, *faces, "--image-size", 32)
    write_model(first)
    web_server.files["/first.safetensors"] = first.read_bytes()
    address = f"{web_server.address}/first.safetensors"
    command = ("finetune", photos, "--model", address, "--output", output)
    # More steps than it makes before the signal comes.
    process = start(*command, "--set", "train.max_steps=200", "--set", "log.every_steps=1")
    wait_for_step(output / "run", 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert f"{output}: to continue, give the same command with --resume\n" in errors
    assert "stopped at step" in errors and "continues from" not in errors, "there is one way on"
    last = int(re.findall(r"stopped at step (\d+)", errors)[0]) + 2
    assert "already exists; choose another --output, or continue with --resume" in str(refusal(*command))

    assert not (output / "finetune.yaml").exists()  # no run has accepted its settings to the end
    printed = output_of(*command, "--resume", "--set", f"train.max_steps={last}", "--set", "seed=3")
    assert "51 images of 17 people are held out" in printed and "3 people are set aside" in printed
    assert "kept: " in printed and "strangers keep a cosine" in printed and "  threshold " in printed, printed
    page = (output / "report.html").read_text()
    for part in (
        "Settings that were chosen",
        "Faces",
        "left out",
        "First batch",
        "Curves",
        "Other people",
    ):
        assert part in page
    changed = ("--set", f"train.max_steps={last}", "--set", "seed=3", "--set", "optim.lr=0.5")
    refused = str(refusal(*command, "--resume", *changed))
    assert "optim.lr: 0.001 → 0.5: has no effect, because the run was already finished" in refused
    assert (output / "report.html").read_text() == page
    printed = output_of(*command, "--resume", "--set", "train.device=cpu")
    assert "was already finished" in printed and "  threshold " in printed, "the verdict takes the device"
    compared = facetrain("eval", output / "model.safetensors", "--target", output / "held_out.bin")
    assert compared.returncode == 0, compared.stderr

    # The config is an ordinary one: the same run by hand.
    chosen = yaml.safe_load((output / "finetune.yaml").read_text())
    assert chosen["model"]["init_from"] == chosen["distill"]["teacher"]
    assert (
        chosen["distill"]["teacher"].startswith(f"{address}#sha256=") and chosen["train"]["max_steps"] == last
    )
    assert chosen["seed"] == yaml.safe_load((output / "run" / "config.yaml").read_text())["seed"] == 3
    by_hand = (
        "--config",
        output / "finetune.yaml",
        "--set",
        "train.max_steps=2",
        "--set",
        "log.report=false",
    )
    assert "at step 2" in output_of("train", *by_hand, "--run-dir", tmp_path / "by_hand")


@pytest.mark.long
def test_an_onnx_file_with_merged_batch_norms_is_fine_tuned(tmp_path):
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    options = {"embedding_size": 16, "image_size": 32}
    network = build_backbone("mbf_small", **options)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():  # statistics with which the embeddings of different images differ
        network(torch.rand(64, 3, 1, 1).expand(-1, -1, 32, 32) * 2 - 1)
    write_model(tmp_path / "m.safetensors", "mbf_small", options, network=network)
    first, output = tmp_path / "first.onnx", tmp_path / "out"
    export(open_model(tmp_path / "m.safetensors", torch.device("cpu")), "onnx", first, ExportOptions())
    faces = ("--identities", 20, "--images-per-identity", 10, "--eval-identities", 2, "--eval-pairs", 20)
    output_of("data", "synth", "--output", tmp_path / "photos", *faces, "--image-size", 32)

    command = ("finetune", tmp_path / "photos", "--model", first, "--output", output)
    assert "kept: " in output_of(*command, "--set", "train.max_steps=2")
    # The copy that was compared embeds images as the file does.
    image_BHWC = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8))
    copy, graph = (open_model(path, torch.device("cpu")) for path in (output / "first.safetensors", first))
    with torch.no_grad():
        expected = graph.network(graph.prepare(image_BHWC))
        torch.testing.assert_close(
            copy.network(copy.prepare(image_BHWC)), expected, atol=1e-4 * expected.abs().max().item(), rtol=0
        )
