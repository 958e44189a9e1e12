"""Distillation on one rank: the losses, the teacher's input, and runs with a teacher."""

import math

import pytest
import torch
from safetensors.torch import load_file

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.data.images.normalize import normalize
from facetrain.errors import CheckpointError, ConfigError
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.model_digest import digest_model
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.training.distillation import Distillation, cosine_loss
from facetrain.training.teacher import LiveTeacher
from tests.runs.conftest import train_and_resume
from tests.support import training
from tests.support.heads import make_head, margin_settings
from tests.support.runs import distill_losses

CPU = torch.device("cpu")
TINY = {"layers": [1, 1, 1, 1], "widths": [4, 4, 4, 4], "embedding_size": 8, "image_size": 32}


def cosine(a, b):
    return float((a @ b) / (a.norm() * b.norm()))


def reference(x, t):
    """The loss by its definition, element by element."""
    return sum(1 - cosine(x[i], t[i]) for i in range(len(x))) / len(x)


def test_the_loss_is_its_definition_with_its_gradient():
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    t = torch.randn(5, 4, dtype=torch.float64)
    loss = cosine_loss(x, t)
    assert loss.item() == pytest.approx(reference(x.detach(), t), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, x)
    for row, column in ((0, 1), (3, 2)):
        step = torch.zeros_like(t)
        step[row, column] = 1e-6
        slope = (reference(x.detach() + step, t) - reference(x.detach() - step, t)) / 2e-6
        assert float(gradient[row, column]) == pytest.approx(slope, rel=1e-6)


class Constant:
    """Teacher with the same embeddings for every batch."""

    digest = "constant"

    def __init__(self, embedding_BT):
        self._embedding_BT, self.embedding_size = embedding_BT, embedding_BT.shape[1]

    def __call__(self, batch, image_BCHW):
        return self._embedding_BT


def test_a_projection_is_there_only_where_lengths_differ_and_can_bridge_them():
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    options = {"weight": 2.0, "seed": 3}
    assert Distillation(Constant(x), embedding_size=4, **options).projection is None
    first, second = (Distillation(Constant(x), embedding_size=7, **options) for _ in range(2))
    assert torch.equal(first.projection.weight, second.projection.weight)
    weighted, value = first(None, None, torch.randn(6, 7))
    assert weighted.requires_grad and not value.requires_grad
    assert weighted.item() == pytest.approx(2 * value.item())


def test_the_averages_of_the_margin_of_the_fixed_centers_are_saved():
    def distillation():
        centers = make_head(embedding_size=4, num_classes=6, margin=margin_settings("adaface"), trained=False)
        return Distillation(Constant(torch.ones(2, 4)), weight=1.0, embedding_size=4, seed=3, centers=centers)

    trained, resumed = distillation(), distillation()
    trained.centers.margin.update_averages(torch.tensor([20.0, 30.0]), torch.zeros(2))
    resumed.load_state(trained.state(), "checkpoint")
    assert all(torch.equal(resumed.state()[name], value) for name, value in trained.state().items())


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = build_backbone("iresnet", **TINY)
    network(torch.randn(8, 3, 32, 32))  # statistics that are not those of the start
    return network.eval()


def test_a_live_teacher_embeds_what_the_student_sees_and_does_not_change(network, tmp_path):
    save_model(tmp_path / "t.safetensors", network.state_dict(), describe_backbone("iresnet", **TINY))
    model = open_model(tmp_path / "t.safetensors", CPU)
    teacher = LiveTeacher(model, digest_model(model, tmp_path / "t.safetensors"))
    image = torch.randn(3, 3, 32, 32).clamp(-1, 1)
    before = teacher.digest
    embedding = teacher(None, image)
    assert torch.equal(embedding, network(image)) and not embedding.requires_grad
    assert teacher.embedding_size == 8 and digest_model(model, tmp_path) == before
    with torch.no_grad():
        model.network.fc.bias[0] += 1
    assert digest_model(model, tmp_path) != before


def test_a_teacher_gets_its_own_colors_scale_and_size(network):
    seen = []

    class Recorder(torch.nn.Module):
        def forward(self, x):
            seen.append(x)
            return torch.ones(len(x), 5)

    def blue_first(image_BHWC):
        return image_BHWC.flip(3).permute(0, 3, 1, 2).float()

    teacher = LiveTeacher(EmbeddingModel(Recorder(), 32, 5, blue_first, "raw"), "x")
    pixels = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    assert teacher(None, normalize(pixels)).shape == (2, 5) and teacher.embedding_size == 5
    assert torch.equal(seen[-1], pixels.flip(3).permute(0, 3, 1, 2).float())
    smaller = LiveTeacher(EmbeddingModel(Recorder(), 16, 5, normalize, "small"), "x")
    smaller(None, normalize(pixels))
    assert seen[-1].shape == (2, 3, 16, 16)


def test_a_student_is_taught_and_resumes_bit_for_bit(runs, tmp_path):
    folder, config = runs
    options = [f"distill.teacher={folder}/teacher", "distill.weight=5", "optim.accumulate=2"]
    student = config("student", 12, *options)
    assert training.train(student, tmp_path / "run") == 0
    found = distill_losses(tmp_path / "run")
    assert len(found) == 4 and all(map(math.isfinite, found))
    saved = Checkpoint.open(tmp_path / "run").replicated()
    assert {
        "distill.projection.weight",
        "optimizer.distill.projection.weight.momentum_buffer",
    } <= saved.keys()
    expected = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert training.resume(student, tmp_path / "run", 2) == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected
    resumed = Checkpoint.open(tmp_path / "run").replicated()
    assert all(
        torch.equal(saved[name], resumed[name]) for name in saved if name.startswith(("distill", "optim"))
    )


@pytest.mark.slow
def test_the_teacher_pulls_the_student_toward_it(runs, tmp_path):
    folder, config = runs
    options = [f"distill.teacher={folder}/teacher", "train.max_steps=30", "distill.weight=50"]
    assert training.train(config("pulled", 8, *options), tmp_path / "run") == 0
    values = distill_losses(tmp_path / "run")
    assert values[-1] < 0.9 * values[0]


def test_separate_heads_on_disk_are_taught_and_resume_bit_for_bit(runs, dataset, tmp_path):
    folder, config = runs
    (tmp_path / "two.yaml").write_text(
        f"heads: separate\ndatasets:\n  - {{path: {dataset}/data}}\n  - {{path: {dataset}/data, loss_weight: 0.5}}\n"
    )
    options = [f"data.train={tmp_path}/two.yaml", f"distill.teacher={folder}/teacher", "distill.weight=5"]
    student = config("separate", 8, *options, "head.placement=disk", "head.sample_rate=0.5")
    train_and_resume(student, tmp_path / "run", 2)


def test_a_run_continues_with_its_own_teacher_only(runs, tmp_path):
    folder, config = runs
    options = [f"distill.teacher={folder}/teacher", "train.max_steps=2"]
    assert training.train(config("loyal", 8, *options), tmp_path / "run") == 0
    with pytest.raises(ConfigError, match=r"distill\.weight: 1\.0 → 2\.0"):
        training.resume(config("loyal", 8, *options, "distill.weight=2"), tmp_path / "run")
    other = tmp_path / "other.safetensors"
    weights = load_file(folder / "teacher" / "model.safetensors")
    save_model(other, weights | {"fc.bias": weights["fc.bias"] + 1}, describe_backbone("iresnet", **TINY))
    changed = config("loyal", 8, f"distill.teacher={other}", "train.max_steps=3")
    with pytest.raises(CheckpointError, match=r"distill\.teacher"):
        training.resume(changed, tmp_path / "run", set_keys={"distill.teacher"})


def test_a_run_continues_without_the_projection_to_its_teacher(runs, tmp_path):
    folder, config = runs
    options = [f"distill.teacher={folder}/teacher"]
    assert training.train(config("narrow", 4, *options, "train.max_steps=2"), tmp_path / "run") == 0
    assert "projection.weight" in Checkpoint.open(tmp_path / "run").replicated("distill.")
    changed = config("narrow", 4, *options, "train.max_steps=3", "distill=null")
    assert training.resume(changed, tmp_path / "run", set_keys={"distill"}) == 0
    assert not Checkpoint.open(tmp_path / "run").replicated("optimizer.distill.projection")
