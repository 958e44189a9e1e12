"""Networks on recorded graphs against the same networks without graphs, on a stand-in for CUDA graphs."""

import copy
import gc
import weakref

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ConfigError
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import build_optimizer, parameter_groups
from facetrain.optim.stepper import Stepper
from facetrain.training.cuda_graphs import GraphedNetwork
from facetrain.training.precision import InPrecision
from tests.support.recorded_functions import BrokenRecorder, FunctionRecorder

CPU = torch.device("cpu")


class UpdatedHead:
    """Head without centers."""

    update_in_backward = True

    def begin_step(self, step, *, lr, loss_scale):
        pass


def make_network(precision="fp32", **options):
    torch.manual_seed(0)
    options = {
        "layers": (1, 1, 1, 1),
        "widths": (4, 4, 8, 8),
        "embedding_size": 8,
        "image_size": 16,
    } | options
    backbone = build_backbone("iresnet", **options).to(memory_format=torch.channels_last)
    return InPrecision(backbone, precision, CPU, memory_format=torch.channels_last)


def graphed(network, *, accumulates=False, recorder=None, required=False):
    found = GraphedNetwork(
        network, lambda: recorder or FunctionRecorder(), accumulates=accumulates, required=required
    )
    found.enabled = True
    return found


def images(*sizes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 3, 16, 16, generator=generator) for size in sizes]


def train(network, inner, batches, *, accumulate=1, scaled=False, broken_step=None):
    """Take a step with each batch; return losses, the state of the network and its embeddings in evaluation."""
    stepper = Stepper(
        inner.backbone,
        [
            build_optimizer(
                parameter_groups(inner.backbone, {}),
                "sgd",
                momentum=0.9,
                betas=(0.9, 0.99),
                eps=1e-8,
                weight_decay=0,
            )
        ],
        UpdatedHead(),
        LossScale(CPU, enabled=scaled),
        schedule=lambda step: 0.05,
        clip_grad_norm=5.0,
    )
    losses, skipped = [], []
    for number, image in enumerate(batches):
        stepper.begin(number)
        for part in image.chunk(accumulate):
            loss = (network(part) - 1).square().mean() / accumulate
            losses.append(loss.item())
            if number == broken_step:
                loss = loss * torch.inf
            (loss * stepper.scale.value).backward()
        skipped.append(stepper.finish().skipped.item())
    state = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    inner.eval()
    with torch.no_grad():
        state["embedding"] = network(batches[0])
    return losses, skipped, state


def assert_equal_to_eager(batches, *, precision="fp32", options=None, **settings):
    inner = make_network(precision, **(options or {}))
    other = copy.deepcopy(inner)
    torch.manual_seed(1)
    expected = train(inner, inner, batches, **settings)
    torch.manual_seed(1)
    recorder = FunctionRecorder()
    network = graphed(other, accumulates=settings.get("accumulate", 1) > 1, recorder=recorder)
    found = train(network, other, batches, **settings)
    assert found[:2] == expected[:2]
    for name, tensor in expected[2].items():
        assert torch.equal(found[2][name], tensor), name
    return recorder, found


def test_training_on_graphs_gives_the_same_bits():
    recorder, _ = assert_equal_to_eager(images(4, 4, 4))
    assert recorder.replays == 6, "a forward and a backward pass of three steps"


def test_dropout_draws_the_same_numbers():
    assert_equal_to_eager(images(4, 4), options={"dropout": 0.4})


def test_gradients_of_micro_batches_add_up():
    assert_equal_to_eager(images(8, 8), accumulate=2)


def test_batches_of_another_size_run_without_graphs():
    recorder, _ = assert_equal_to_eager(images(4, 3, 4))
    assert recorder.replays == 4


def test_a_skipped_step_leaves_no_trace_in_the_next_ones():
    _, (_, skipped, _) = assert_equal_to_eager(images(4, 4, 4), precision="fp16", scaled=True, broken_step=1)
    assert skipped == [0, 1, 0]


def test_training_without_graphs_and_with_them_can_alternate():
    recorder = FunctionRecorder()
    network = graphed(make_network(), recorder=recorder)
    replays = []
    for enabled in (False, True, False, True):
        network.enabled = enabled
        network(images(4)[0]).sum().backward()
        replays.append(recorder.replays)
    assert replays[0] == 0 < replays[1] == replays[2] < replays[3]


def test_graphs_that_are_not_used_hold_no_memory():
    recorder = FunctionRecorder()
    network = graphed(make_network(), recorder=recorder)
    (image,) = images(4)
    network(image).sum().backward()
    memory = weakref.ref(network._graphs)
    network.enabled = False
    gc.collect()
    assert memory() is None


def test_the_gradient_of_an_overwritten_forward_pass_is_refused():
    network = graphed(make_network())
    first, _ = network(images(4)[0]), network(images(4)[0])
    with pytest.raises(RuntimeError, match="a later forward pass has overwritten"):
        first.sum().backward()


def test_an_embedding_stays_after_the_next_step():
    network = graphed(make_network())
    one, other = images(4, 4)
    first = network(one).detach()
    before = first.clone()
    network(other)
    assert torch.equal(first, before)


def test_a_network_that_cannot_be_recorded_runs_without_graphs_and_keeps_its_statistics():
    inner = make_network()
    other = copy.deepcopy(inner)
    network = graphed(other, recorder=BrokenRecorder())
    for image in images(4, 4):
        assert torch.equal(network(image), inner(image))
    assert "not permitted when stream is capturing" in network.failure


def test_required_graphs_that_cannot_be_recorded_are_an_error():
    network = graphed(make_network(), recorder=BrokenRecorder(), required=True)
    with pytest.raises(
        ConfigError, match="train.cuda_graphs: on is not possible: .* when stream is capturing"
    ):
        network(images(4)[0])


def test_every_parameter_of_the_fused_trunk_gets_its_gradient_from_the_graphs():
    pytest.importorskip("triton", reason="Triton is not installed")
    from facetrain.backbone.fused_iresnet import FusedTrunk
    from facetrain.device.kernel_launches import shapes_only

    backbone = make_network().backbone
    network = InPrecision(
        backbone, "bf16", CPU, memory_format=torch.channels_last, fused_trunk=FusedTrunk(backbone)
    )
    with shapes_only() as counter:  # the kernels need a GPU: their results are not computed
        graphed(network)(images(4)[0]).sum().backward()
    assert counter.launches > 100
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in trained
    )
