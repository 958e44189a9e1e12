"""Weight files of AdaFace through `eval`, `train` and `export`, with random weights in their names."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from facetrain.checkpoint.load import Checkpoint
from facetrain.cli.app import main
from facetrain.data.formats.bin import write_bin
from facetrain.models.weight_files import read_weights
from facetrain.telemetry.jsonl import read_jsonl
from tests.support.datasets import encoded_image, write_records
from tests.support.made_weights import DEPTHS, ir_layout, weight_of

CLASSES = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faces")
    write_records(folder, [n // 2 for n in range(2 * CLASSES)], size=112)
    # Ten pairs, the fewest that can be divided into ten folds.
    write_bin(
        folder / "val.bin", [encoded_image(n % 4, 112) for n in range(20)], [n % 2 == 0 for n in range(10)]
    )
    return folder


def write_adaface(folder):
    """Write a Lightning checkpoint; return its path and its class centers."""
    state = {f"model.{name}": weight_of(name, shape) for name, shape in ir_layout(DEPTHS["18"]).items()}
    kernel = torch.randn(512, CLASSES)
    head = {"head.kernel": kernel, "head.t": torch.zeros(1), "head.batch_mean": torch.ones(1) * 20}
    path = folder / "adaface_ir18.ckpt"
    torch.save({"epoch": 25, "pytorch-lightning_version": "1.3.8", "state_dict": state | head}, path)
    return path, kernel.T


@pytest.mark.slow
def test_a_foreign_file_is_evaluated_fine_tuned_and_exported(data, tmp_path, monkeypatch, capsys):
    def facetrain(*words):
        monkeypatch.setattr(sys, "argv", ["facetrain", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return printed.out

    torch.manual_seed(0)
    path, centers = write_adaface(tmp_path)
    scored = json.loads(
        facetrain("eval", path, "--target", "val", "--data-dir", data, "--bootstrap", 0, "--json", "-")
    )
    (tmp_path / "run.yaml").write_text(
        f"data: {{train: {data}, workers: 0}}\nmodel: {{backbone: ir18, train_batch_norm: false}}\n"
        "optim: {lr: 1.0e-9, weight_decay: 0}\n"
        "train: {batch_size: 2, max_steps: 1, precision: fp32, device: cpu}\n"
        "eval: {targets: [val], batch_size: 8}\nlog: {tensorboard: false, report: false}\n"
    )
    sets = ("--set", f"model.init_from={path}", "--set", "head.init_from=keep")
    facetrain("train", "--config", tmp_path / "run.yaml", "--run-dir", tmp_path / "run", *sets)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    first = next(record for record in metrics if "val/accuracy" in record)
    assert first["val/accuracy"] == pytest.approx(scored["sets"]["val"]["accuracy"])
    torch.testing.assert_close(Checkpoint.open(tmp_path / "run").rows("weight", 0, CLASSES), centers)
    facetrain("export", path, "--format", "safetensors", "--output", tmp_path / "m.safetensors")
    given = read_weights(path)[0]
    for file in (tmp_path / "m.safetensors", tmp_path / "run" / "model.safetensors"):
        written = load_file(file)
        assert written.keys() == given.keys()
        torch.testing.assert_close([written[name] for name in given], [*given.values()])
