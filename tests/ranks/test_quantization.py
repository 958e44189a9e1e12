"""Training with rounding to int8, from a teacher and with an average of the weights, on two ranks and resumed."""

import json
import shutil

import torch
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.models.model_file import describe_backbone, open_model, save_model
from facetrain.run import training
from facetrain.telemetry.jsonl import read_jsonl
from tests.ranks.test_resume import free_ports, with_rank
from tests.runs.conftest import dataset, describe  # noqa: F401
from tests.support.mxnet_files import randomize

_IRESNET = {"layers": [1, 1, 1, 1], "widths": [8, 8, 16, 16], "embedding_size": 16, "image_size": 32}


def train_and_resume(rank, config, folder, ports):
    torch.set_num_threads(1)
    settings = [
        "data.workers=0", "optim.lr=0.001", "optim.ema=0.8", "model.quantize=int8",
        f"model.init_from={folder}/float.safetensors", "eval.every_steps=4",
        f"distill={{teacher: {folder}/float.safetensors, margin_weight: 0}}",
    ]  # fmt: skip
    described = load_config(config, settings)
    with_rank(rank, 2, ports[0], training.train, described, folder / "whole")
    if rank == 0:
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "step_00000004")
    with_rank(rank, 2, ports[1], training.resume, described, folder / "resumed", 2)


def metadata(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["facetrain"])


def test_a_run_in_int8_resumes_exactly_and_stores_its_ranges(describe, tmp_path):  # noqa: F811
    network = randomize(build_backbone("iresnet", **_IRESNET))
    save_model(tmp_path / "float.safetensors", network.state_dict(), describe_backbone("iresnet", **_IRESNET))
    config = describe(steps=4, checkpoint="every_steps: 2, keep: 9")
    mp.spawn(train_and_resume, (config, tmp_path, free_ports(2)), nprocs=2)
    for name in ("model.safetensors", "model_ema.safetensors"):
        whole, resumed = (load_file(tmp_path / run / name) for run in ("whole", "resumed"))
        assert all(torch.equal(whole[key], resumed[key]) for key in whole) and len(whole) > 20
        described = [metadata(tmp_path / run / name)["int8"] for run in ("whole", "resumed")]
        assert described[0] == described[1] and len(described[0]["ranges"]) > 10
    checkpoint = Checkpoint.open(tmp_path / "whole", 2)
    assert checkpoint.meta["model"]["int8"] == described[0]
    records = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    losses = [record["distill_loss"] for record in records if "distill_loss" in record]
    assert len(losses) == 4 and all(0 < loss < 0.5 for loss in losses), losses
    # The float form of the trained network is still close to the teacher.
    device, image = torch.device("cpu"), torch.randn(4, 3, 32, 32)
    opened = [open_model(tmp_path / name, device) for name in ("whole", "float.safetensors")]
    with torch.no_grad():
        assert F.cosine_similarity(*(one.network(image) for one in opened)).min() > 0.9
