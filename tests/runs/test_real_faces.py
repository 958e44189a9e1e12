"""Real faces, from images in folders to a verified model."""

import json
import shutil

import pytest

from facetrain.telemetry.jsonl import read_jsonl
from tests.support.command import facetrain
from tests.support.shared import shared_path

CONFIG = """
run: {{name: lfw}}
data: {{train: {folder}/packed, image_size: 64}}
model: {{backbone: iresnet, layers: [1, 1, 1, 1], widths: [16, 32, 64, 128], embedding_size: 128}}
head: {{margin: {{type: cosface, scale: 24, m3: 0.1}}}}
optim: {{lr: 0.05, weight_decay: 1.0e-3, warmup_epochs: 1}}
train: {{global_batch_size: 64, epochs: 10, precision: fp32, device: cpu}}
eval: {{targets: [{pairs}], every_steps: 145}}
checkpoint: {{every_steps: 1000}}
log: {{every_steps: 29, tensorboard: false, report: false}}
"""


@pytest.mark.long
def test_packed_images_train_a_network_that_tells_real_people_apart(tmp_path):
    images = shared_path("real/lfw_train")
    pairs = shared_path("real/lfw_verification/lfw_folds1-2.bin")
    packed = facetrain("data", "pack", images, "--output", tmp_path / "packed", "--json")
    assert packed.returncode == 0, packed.stderr
    assert json.loads(packed.stdout)["images"] == 1865
    (tmp_path / "lfw.yaml").write_text(CONFIG.format(folder=tmp_path, pairs=pairs))
    trained = facetrain("train", "--config", tmp_path / "lfw.yaml", "--run-dir", tmp_path / "run")
    assert trained.returncode == 0, trained.stderr
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    accuracy = [r["lfw_folds1-2/accuracy"] for r in records if "lfw_folds1-2/accuracy" in r]
    # 1,865 images do not make a good network; they make one that is clearly better than none.
    assert accuracy[-1] > accuracy[0] + 0.06


@pytest.mark.slow
def test_real_records_and_sets_read_without_special_handling(tmp_path):
    shutil.copytree(shared_path("real/recordio/im2rec_8faces"), tmp_path / "eight")
    found = facetrain("data", "inspect", tmp_path / "eight", "--json")
    assert found.returncode == 0, found.stderr
    inspected = json.loads(found.stdout)
    assert (inspected["images"], inspected["identities"]) == (8, 2)


@pytest.mark.long
def test_a_published_model_has_its_published_accuracy():
    target = shared_path("real/lfw_verification/lfw_folds1-2.bin")
    scored = facetrain("eval", shared_path("real/y1/y1_rgb_pm1.onnx"), "--target", target, "--json", "-")
    assert scored.returncode == 0, scored.stderr
    found = json.loads(scored.stdout)["sets"]["lfw_folds1-2"]
    assert found["accuracy"] == pytest.approx(0.99500, abs=5e-4)
    assert found["auc"] == pytest.approx(0.99964, abs=5e-4)
    assert found["accuracy_no_flip"] == pytest.approx(0.99417, abs=5e-4)
