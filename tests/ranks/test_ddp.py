"""A network in DDP on several ranks, against the plain network on one process with the global batch."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.distributed import collectives
from facetrain.distributed.ddp import wrap_in_ddp
from facetrain.distributed.world import World
from facetrain.optim.build import build_optimizer
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.optim.stepper import Stepper
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
LOCAL, STEPS = 4, 3
# (compress, accumulate, checkpoint_activations)
OPTIONS = [("none", 1, False), ("none", 2, False), ("none", 1, True), ("bf16", 1, False), ("fp16", 2, True)]


def make_net(checkpoint_activations):
    torch.manual_seed(5)
    options = {"layers": (1, 1, 1, 1), "widths": (4, 4, 8, 8), "embedding_size": 8, "image_size": 16}
    net = build_backbone("iresnet", **options, checkpoint_activations=checkpoint_activations)
    # Group norm, because batch norm would make the loss depend on how the batch is split.
    for module in net.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(1, child.num_features))
    net.features = nn.Identity()
    return net


def train(network, accumulate, batches):
    """Train with plain SGD, one step per batch; return the gradients of each step."""
    optimizer, gradients = torch.optim.SGD(network.parameters(), lr=0.1), []
    for image in batches:
        micro_batches = image.chunk(accumulate)
        for number, micro_batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches) or not hasattr(network, "no_sync")
            with torch.enable_grad() if last else network.no_sync():
                (network(micro_batch).square().mean() / accumulate).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def batches(world_size):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(world_size * LOCAL, 3, 16, 16, generator=generator) for _ in range(STEPS)]


def train_with_each_option():
    world_size, rank = collectives.world_size(), collectives.rank()
    world = World(rank=rank, local_rank=rank, size=world_size, local_size=world_size, device=CPU)
    local_batches = [batch[rank * LOCAL : (rank + 1) * LOCAL] for batch in batches(world_size)]
    found = []
    for compress, accumulate, checkpoint_activations in OPTIONS:
        network = wrap_in_ddp(make_net(checkpoint_activations), world, compress, accumulate=accumulate)
        found.append(train(network, accumulate, local_batches))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_the_gradients_of_one_process_with_each_option_of_the_exchange(world_size):
    expected = train(make_net(False), 1, batches(world_size))
    for found in run_ranks(world_size, train_with_each_option):
        for (compress, *_), gradients in zip(OPTIONS, found, strict=True):
            # Compressed gradients are rounded, and later steps start from weights that they have changed.
            rtol = 1e-4 if compress == "none" else 0.02
            for step, gradient in enumerate(gradients):
                error = (gradient - expected[step]).norm() / expected[step].norm()
                assert error < rtol, (compress, step, float(error))


def test_on_a_single_rank_the_network_is_not_wrapped():
    net = make_net(False)
    assert wrap_in_ddp(net, World(rank=0, local_rank=0, size=1, local_size=1, device=CPU), "bf16") is net


def restart_after_each_step():
    """Return the gradients of three steps in one DDP, and of the same steps with a new DDP for each."""
    world_size, rank = collectives.world_size(), collectives.rank()
    world = World(rank=rank, local_rank=rank, size=world_size, local_size=world_size, device=CPU)
    local_batches = [batch[rank * LOCAL : (rank + 1) * LOCAL] for batch in batches(world_size)]
    undisturbed = train(wrap_in_ddp(make_net(False), world, "none"), 1, local_batches)
    net, restarted = make_net(False), []
    for batch in local_batches:
        restarted += train(wrap_in_ddp(net, world, "none"), 1, [batch])
    return [undisturbed, restarted]


@pytest.mark.slow
def test_gradients_of_three_ranks_are_equal_bit_for_bit_after_a_restart():
    for undisturbed, restarted in run_ranks(3, restart_after_each_step):
        assert all(torch.equal(a, b) for a, b in zip(undisturbed, restarted, strict=True))


def step_whose_gradient_is_finite_on_rank_0_alone():
    """Take a step; return whether it was skipped, and whether the weights have changed."""
    net = nn.Linear(2, 1)
    optimizer = build_optimizer(OptimSettings(), parameter_groups(net, {}))
    head = SimpleNamespace(update_in_backward=True, begin_step=lambda *_, **__: None)
    scale = LossScale(CPU, enabled=False)
    stepper = Stepper(net, [optimizer], head, scale, schedule=lambda step: 0.1, clip_grad_norm=None)
    before = net.weight.detach().clone()
    stepper.begin(0)
    (net(torch.ones(1, 2)).sum() * (1.0 if collectives.rank() == 0 else math.nan)).backward()
    return [stepper.finish().skipped.item(), not torch.equal(net.weight, before)]


def test_a_step_that_one_rank_must_skip_is_skipped_by_all():
    assert run_ranks(2, step_whose_gradient_is_finite_on_rank_0_alone) == [[1.0, False]] * 2


def steps_of_two_micro_batches():
    """Take steps; return the number of storages that the gradients have after each micro-batch."""
    rank, size = collectives.rank(), collectives.world_size()
    world = World(rank=rank, local_rank=rank, size=size, local_size=size, device=CPU)
    net = make_net(False)
    optimizer = build_optimizer(OptimSettings(), parameter_groups(net, {}))
    head = SimpleNamespace(update_in_backward=True, begin_step=lambda *_, **__: None)
    stepper = Stepper(
        net, [optimizer], head, LossScale(CPU, enabled=False),
        schedule=lambda step: 0.1, clip_grad_norm=None, accumulates=True,
    )  # fmt: skip
    network, storages = wrap_in_ddp(net, world, "none", accumulate=2), []
    for step, image in enumerate(batches(size)):
        stepper.begin(step)
        for number, micro_batch in enumerate(image[rank::size].chunk(2)):
            with nullcontext() if number else network.no_sync():
                network(micro_batch).square().mean().backward()
            storages.append(len({each.grad.untyped_storage().data_ptr() for each in net.parameters()}))
        stepper.finish()
    return storages


def test_gradients_of_all_micro_batches_are_in_the_buckets_of_ddp():
    assert run_ranks(2, steps_of_two_micro_batches) == [[1] * 2 * STEPS] * 2
