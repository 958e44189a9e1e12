"""Synthetic training data: the first run writes the dataset, and trains on it like the next one."""

import re
import subprocess
import sys

import pytest

from facetrain.telemetry.jsonl import read_jsonl
from tests.support.command import environment

# Not torch._dynamo and SymPy: torch.optim imports them (torch 2.11 to 2.13).
SLOW_TO_IMPORT = {"onnx", "scipy", "sklearn", "tensorboard"}
CONFIG = """
data:
  train: {folder}/synthetic
  image_size: 32
  workers: 1
  synthetic: {{identities: 30, images_per_identity: 8, eval_identities: 6, eval_pairs: 40}}
model: {{backbone: iresnet, layers: [1, 1, 1, 1], widths: [8, 8, 16, 16], embedding_size: 16}}
train: {{batch_size: 24, max_steps: 4, precision: fp32, device: cpu}}
eval: {{targets: [synth], every_steps: 4}}
log: {{every_steps: 1, tensorboard: false}}
"""


@pytest.mark.slow
def test_a_run_writes_a_missing_synthetic_dataset_first(tmp_path):
    config = tmp_path / "synthetic.yaml"
    config.write_text(CONFIG.format(folder=tmp_path))
    found = []
    for name in ("first", "second"):
        command = [
            sys.executable,
            "-m",
            "facetrain",
            "train",
            "--config",
            config,
            "--run-dir",
            tmp_path / name,
        ]
        every_import = environment(PYTHONPROFILEIMPORTTIME="1")
        done = subprocess.run(command, env=every_import, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))
        assert "torch" in imported and not imported & SLOW_TO_IMPORT, (
            "each of these imports delays the start by a fraction of a second"
        )
        records = list(read_jsonl(tmp_path / name / "metrics.jsonl"))
        found.append([(r["step"], r.get("loss"), r.get("synth/accuracy")) for r in records])
        there = {path.name for path in (tmp_path / "synthetic").iterdir()}
        assert there >= {"train.rec", "train.idx", "property", "synth.bin"}
    assert found[0] == found[1] and len(found[0]) == 6
