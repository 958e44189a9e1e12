"""Forecast of teachers, frozen parts and adapters."""

import shutil

import pytest
import torch

from facetrain.backbone.settings import LoraSettings, ModelSettings
from facetrain.backbone.zoo import build_backbone
from facetrain.head.settings import HeadSettings
from facetrain.models.embedding_model import open_model
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.optim.settings import OptimSettings
from facetrain.plan.backbone_memory import backbone_memory, embedding_memory
from facetrain.plan.forecast import forecast
from facetrain.plan.head_memory import HeadLoad, head_memory
from facetrain.run.parts.backbone import restrict_training
from facetrain.torch_private import LiveBytes
from facetrain.training.teacher_cache import DIGESTS, new_cache
from tests.support.heads import make_head, margin_settings
from tests.unit.plan.helpers import small_config

TINY = {"layers": (1, 1, 1, 1), "widths": (16, 16, 32, 32), "embedding_size": 16, "image_size": 32}
MODEL = ModelSettings(backbone="iresnet", layers=TINY["layers"], widths=TINY["widths"], embedding_size=16)
PARTS = [
    {"freeze": ("conv1", "bn1", "prelu", "layer1", "layer2")},
    {"train_batch_norm": False},
    {"lora": LoraSettings(rank=2)},
]


@pytest.mark.parametrize("parts", PARTS, ids=["freeze", "batch norm", "LoRA"])
def test_frozen_parts_and_adapters_are_counted_as_they_train(parts):
    model = MODEL.model_copy(update={"init_from": "t.safetensors"} | parts)
    memory = backbone_memory(model, 32, precision="fp32", batch=8, gradients_held=False)
    network, image = build_backbone("iresnet", **TINY), torch.randn(8, 3, 32, 32)
    restrict_training(network, model)
    with LiveBytes() as live:
        embedding = network(image)
        kept = live.now
        embedding.backward(torch.ones_like(embedding))
    assert memory.kept == pytest.approx(kept, rel=0.03)
    assert memory.peak == pytest.approx(live.peak, rel=0.05)
    assert memory.parameters == sum(p.numel() for p in network.parameters() if p.requires_grad)
    whole = backbone_memory(MODEL, 32, precision="fp32", batch=8, gradients_held=False)
    assert memory.parameters < whole.parameters and memory.kept < 1.2 * whole.kept


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "t.safetensors"
    save_model(path, build_backbone("iresnet", **TINY).state_dict(), describe_backbone("iresnet", **TINY))
    return path


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_forward_pass_of_a_teacher_is_forecast_without_its_memory(teacher, precision):
    network = open_model(teacher, torch.device("cpu")).network
    image = torch.randn(8, 3, 32, 32)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        LiveBytes() as live,
    ):
        network(image)
    found = embedding_memory(network, 32, precision=precision).peak(8)
    assert found - image.nbytes == pytest.approx(live.peak, rel=0.05)
    config = small_config(
        distill={"teacher": str(teacher)}, train={"batch_size": 512, "precision": precision}
    )
    assert forecast(config, 1001, 2).parts["work"] >= 512 / 8 * 0.9 * found


def test_a_teacher_is_opened_once_for_all_batches_that_a_plan_tries(teacher, tmp_path, monkeypatch):
    opened, path = [], shutil.copy(teacher, tmp_path)

    def open_counted(*given):
        opened.append(given)
        return open_model(*given)

    monkeypatch.setattr("facetrain.plan.forecast.open_model", open_counted)
    config = small_config(distill={"teacher": path})
    small, large = (forecast(config, 1001, 2, batch=batch).parts["work"] for batch in (8, 1024))
    assert len(opened) == 1 and large > 64 * small


def test_a_teacher_that_is_no_network_of_torch_has_a_forecast_without_its_forward_pass():
    class Foreign(torch.nn.Module):
        def forward(self, image):
            return torch.from_numpy(image.numpy())

    assert embedding_memory(Foreign(), 32, precision="fp32").peak(8) == 0


@pytest.mark.slow
def test_a_teacher_adds_its_weights_and_its_centers(teacher, tmp_path):
    gpus, classes = 2, 1001
    before = forecast(small_config(), classes, gpus)
    assert before.parts["teacher"] == 0
    distill = {"teacher": str(teacher)}
    after = forecast(small_config(distill=distill), classes, gpus)
    weights = sum(t.nbytes for t in build_backbone("iresnet", **TINY).state_dict().values())
    assert after.parts["teacher"] == weights
    with new_cache(tmp_path / "c.safetensors", (3, 1, 16), dict.fromkeys(DIGESTS, "")):
        pass
    cached = small_config(
        distill=distill | {"cache": str(tmp_path / "c.safetensors"), "loss": "fixed_centers"}
    )
    after = forecast(cached, classes, gpus)
    added = {
        name: size - before.parts[name] for name, size in after.parts.items() if size != before.parts[name]
    }
    assert added.pop("centers") == 501 * 16 * 4 and not added.keys() & {"teacher", "center_moments"}


def test_the_bytes_of_a_head_that_is_not_trained_are_forecast():
    settings = HeadSettings(chunk_size=2048)
    load = HeadLoad(
        settings, OptimSettings(), 64, rows=20_480, local_batch=256, global_batch=256, trained=False
    )
    head = make_head(
        embedding_size=64, num_classes=load.rows, margin=margin_settings("cosface"), chunk_size=2048,
        update_in_backward=False, trained=False,
    )  # fmt: skip
    embedding, label = torch.randn(256, 64, requires_grad=True), torch.randint(0, load.rows, (256,))
    with LiveBytes() as live:
        head.begin_step(0, lr=0.0)
        head(embedding, label).backward()
    memory = head_memory(load)
    assert memory.peak == pytest.approx(live.peak, rel=0.05)
    assert (memory.centers, memory.moments) == (head.weight.data.nbytes, 0)
