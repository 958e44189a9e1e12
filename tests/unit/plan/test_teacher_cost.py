"""Forecast of teachers, frozen parts, adapters and averages."""

import pytest
import torch

from facetrain.backbone.low_rank import add_adapters
from facetrain.backbone.settings import LoraSettings
from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import build_config
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.optim.frozen_parts import freeze
from facetrain.optim.weight_average import WeightAverage
from facetrain.plan.backbone_cost import TrainedParts, measure_backbone
from facetrain.plan.device import DEVICES
from facetrain.plan.execution import runs_fused
from facetrain.plan.forecast import forecast
from facetrain.plan.head_cost import HeadShape, head_bytes
from facetrain.plan.speed import step_time
from facetrain.torch_private import LiveBytes
from facetrain.training.teacher_cache import new_cache
from tests.support.heads import make_head, margin_settings

TINY = {"layers": (1, 1, 1, 1), "widths": (16, 16, 32, 32), "embedding_size": 16, "image_size": 32}
PARTS = [
    TrainedParts(freeze=("conv1", "bn1", "prelu", "layer1", "layer2")),
    TrainedParts(train_batch_norm=False),
    TrainedParts(lora=LoraSettings(rank=2)),
]


def real_network(parts):
    network = build_backbone("iresnet", **TINY)
    freeze(network, parts.freeze, train_batch_norm=parts.train_batch_norm)
    if parts.lora:
        add_adapters(network, parts.lora.rank, alpha=None, targets=())
    return network


@pytest.mark.parametrize("parts", PARTS, ids=["freeze", "batch norm", "LoRA"])
def test_frozen_parts_and_adapters_are_counted_as_they_train(parts):
    cost = measure_backbone(
        {"name": "iresnet", **TINY}, precision="fp32", batch=8, trained=parts, gradients_held=False
    )
    network, image = real_network(parts), torch.randn(8, 3, 32, 32)
    with LiveBytes() as live:
        embedding = network(image)
        kept = live.now
        embedding.backward(torch.ones_like(embedding))
    assert cost.kept(8) == pytest.approx(kept, rel=0.03) and cost.peak(8) == pytest.approx(
        live.peak, rel=0.05
    )
    assert cost.parameters == sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert cost.averaged_bytes == sum(t.nbytes for t in WeightAverage(network, 0.9)._averages.values())
    whole = measure_backbone({"name": "iresnet", **TINY}, precision="fp32", batch=8, gradients_held=False)
    assert cost.parameters < whole.parameters and cost.kept(8) < 1.2 * whole.kept(8)


def config(folder, **sections):
    values = {
        "data": {"train": "none", "image_size": 32},
        "model": {
            "backbone": "iresnet",
            "layers": [1, 1, 1, 1],
            "widths": [16, 16, 32, 32],
            "embedding_size": 8,
        },
        "train": {"batch_size": 4, "precision": "fp32"},
        "eval": {"targets": []},
    }
    return build_config(values | sections, "test")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "t.safetensors"
    save_model(path, build_backbone("iresnet", **TINY).state_dict(), describe_backbone("iresnet", **TINY))
    return path


def test_a_teacher_adds_its_weights_its_centers_and_the_time_of_its_forward_pass(teacher, tmp_path):
    device, gpus, classes = DEVICES["h100"], 2, 1001
    plain = config(tmp_path)
    before, time = forecast(plain, classes, gpus), step_time(plain, classes, gpus, device)
    assert before.teacher == before.average == 0 and time.teacher == 0
    distill = {"teacher": str(teacher), "loss": "adaptive_centers"}
    taught = config(tmp_path, distill=distill)
    after, slower = forecast(taught, classes, gpus), step_time(taught, classes, gpus, device)
    weights = sum(t.nbytes for t in build_backbone("iresnet", **TINY).state_dict().values())
    assert after.teacher == weights + 4 * 8 * 16 * 3  # projection, its gradient and momentum
    assert after.centers == before.centers + 501 * 16 * 4 and after.center_moments == before.center_moments
    assert slower.teacher > 0 and slower.head > time.head
    with new_cache(tmp_path / "c.safetensors", (3, 1, 16), dataset="", teacher=""):
        pass
    cached = config(tmp_path, distill=distill | {"cache": str(tmp_path / "c.safetensors"), "loss": "cosine"})
    assert step_time(cached, classes, gpus, device).teacher == 0
    assert forecast(cached, classes, gpus).teacher == 4 * 8 * 16 * 3


def test_an_average_adds_a_copy_of_what_is_trained_to_memory_and_checkpoint(tmp_path):
    plain, averaged = config(tmp_path), config(tmp_path, optim={"ema": 0.99})
    first, second = (forecast(each, 10, 1, cuda=False) for each in (plain, averaged))
    assert second.average > 0 and second.saving == first.saving + second.average
    assert (
        step_time(averaged, 10, 1, DEVICES["h100"]).device > step_time(plain, 10, 1, DEVICES["h100"]).device
    )


def test_the_fused_trunk_is_not_planned_with_frozen_batch_norms(tmp_path):
    pytest.importorskip("triton")
    model = config(tmp_path).model.model_dump(exclude_none=True)
    train = {"batch_size": 4, "precision": "bf16"}
    assert runs_fused(config(tmp_path, train=train))
    assert runs_fused(config(tmp_path, train=train, model=model | {"freeze": ["fc"]}))
    assert not runs_fused(config(tmp_path, train=train, model=model | {"freeze": ["layer1"]}))


def test_the_bytes_of_a_head_that_is_not_trained_are_forecast(tmp_path):
    shape = HeadShape(
        num_classes=20_480, embedding_size=64, global_batch=256, world_size=1, cuda=False, chunk_size=2048,
        optimizer=config(tmp_path).optim, update_in_backward=False, trained=False,
    )  # fmt: skip
    head = make_head(
        embedding_size=64, num_classes=shape.num_classes, margin=margin_settings("cosface"), chunk_size=2048,
        update_in_backward=False, trained=False,
    )  # fmt: skip
    embedding, label = torch.randn(256, 64, requires_grad=True), torch.randint(0, shape.num_classes, (256,))
    with LiveBytes() as live:
        head.begin_step(0, lr=0.1)
        head(embedding, label).backward()
    found = head_bytes(shape)
    assert found.work == pytest.approx(live.peak, rel=0.05)
    assert (found.centers, found.moments) == (head.weight.data.nbytes, 0)
