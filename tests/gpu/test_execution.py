"""CUDA graphs and compiled code on a GPU against eager training, and the measurement that chooses one of them."""

import copy

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import load_config
from facetrain.run import training as run
from facetrain.training.cuda_graphs import CudaBackend, GraphedNetwork
from facetrain.training.execution import Execution, ExecutionSettings
from facetrain.training.execution_trial import CudaTimer, ExecutionTrial
from facetrain.training.fused_trunk import choose_trunk
from facetrain.training.precision import InPrecision
from tests.runs.conftest import dataset, describe  # noqa: F401
from tests.runs.test_training import checked, losses
from tests.support.command import torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own deprecated imports
]
LAYOUT = torch.channels_last


def make_network(name, precision, fused, **options):
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    backbone = build_backbone(name, embedding_size=64, image_size=112, **options)
    backbone = backbone.to(device, memory_format=LAYOUT)
    trunk = choose_trunk(
        backbone, fused, precision, device, memory_format=LAYOUT, compile=False, checkpoint_activations=False
    )
    return InPrecision(backbone, precision, device, memory_format=LAYOUT, fused_trunk=trunk)


def train(network, parameters, batches, accumulate=1):
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)
    losses = []
    for image in batches:
        for part in image.chunk(accumulate):
            loss = (network(part) - 1).square().mean() / accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture
def exact():
    """Algorithms whose results are equal in each call, so that eager and graphs can be compared bit for bit."""
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("name", "precision", "fused", "options"),
    [
        ("r18", "bf16", "off", {}),
        ("r18", "bf16", "on", {"dropout": 0.4}),
        ("r18", "fp16", "on", {}),
        ("mbf", "bf16", "off", {}),
        ("vit_t", "bf16", "off", {}),
    ],
)
def test_training_on_graphs_follows_eager_training(name, precision, fused, options, accumulate, exact):
    inner = make_network(name, precision, fused, **options)
    state = copy.deepcopy(inner.backbone.state_dict())
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(size, 3, 112, 112, generator=generator).cuda() for size in (16, 16, 8, 16)]
    torch.manual_seed(1)
    expected = train(inner, inner.parameters(), batches, accumulate)
    trained = copy.deepcopy(inner.backbone.state_dict())
    inner.backbone.load_state_dict(state)
    graphed = GraphedNetwork(inner, CudaBackend, accumulates=accumulate > 1, required=True)
    graphed.enabled = True
    torch.manual_seed(1)
    assert train(graphed, inner.parameters(), batches, accumulate) == pytest.approx(expected, rel=1e-3)
    for key, value in inner.backbone.state_dict().items():
        torch.testing.assert_close(value, trained[key], rtol=1e-2, atol=1e-3, msg=key)


def test_the_measurement_tries_all_modes_and_training_goes_on():
    network = make_network("r18", "bf16", "auto")
    device = next(network.parameters()).device
    settings = ExecutionSettings("auto", "auto", "auto", device, batch_size=16)
    execution, lines = Execution(network, settings), []
    trial = ExecutionTrial(execution, CudaTimer(), lines.append)
    image = torch.randn(16, 3, 112, 112, device=device)
    chosen = None
    while chosen is None:
        trial.begin_step()
        execution.network(image).square().mean().backward()
        network.zero_grad()
        chosen = trial.end_step()
    print(lines[0])
    assert " ms eager" in lines[0] and " ms graphs" in lines[0]
    assert torch.isfinite(execution.network(image)).all()


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}, {"accumulate": 2}])
def test_a_run_on_graphs_has_the_losses_of_an_eager_run(options, describe, tmp_path):  # noqa: F811
    config = describe(steps=6, **options)
    found = {}
    for mode in ("off", "on"):
        changes = ["eval.targets=[]", "train.device=cuda", f"train.cuda_graphs={mode}", "train.compile=off"]
        assert run.train(load_config(config, changes), tmp_path / mode) == 0
        found[mode] = losses(tmp_path / mode)
    assert found["on"] == pytest.approx(found["off"], rel=5e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_two_gpus_on_graphs_have_the_losses_of_two_without(describe, tmp_path):  # noqa: F811
    config, found = describe(steps=6), {}
    for mode in ("off", "on"):
        command = ["train", "--config", config, "--run-dir", tmp_path / mode]
        for change in (
            "eval.targets=[]",
            "train.device=cuda",
            f"train.cuda_graphs={mode}",
            "train.compile=off",
        ):
            command += ["--set", change]
        checked(torchrun(2, *command))
        found[mode] = losses(tmp_path / mode)
    assert found["on"] == pytest.approx(found["off"], rel=5e-3)
