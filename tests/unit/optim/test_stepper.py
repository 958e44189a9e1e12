import pytest
import torch
from torch import nn

from facetrain.backbone.low_rank import add_adapters
from facetrain.backbone.settings import LoraSettings
from facetrain.errors import ConfigError
from facetrain.optim.build import build_optimizer
from facetrain.optim.frozen_parts import freeze
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.optim.stepper import Stepper


class CountingHead:
    """A head with nothing to update, that records its calls."""

    update_in_backward = False

    def __init__(self):
        self.began, self.stepped = [], []

    def begin_step(self, step, *, lr, loss_scale):
        self.began.append((step, lr, loss_scale and loss_scale.item()))

    def step(self, grad_scale, skip):
        self.stepped.append((grad_scale.item(), skip.item()))


def make_stepper(net, *, name="sgd", clip=None, enabled=False, lr_factors=None, accumulates=False):
    optimizer = build_optimizer(
        OptimSettings(name=name, weight_decay=0.01), parameter_groups(net, lr_factors or {})
    )
    scale = LossScale(torch.device("cpu"), enabled=enabled)
    return Stepper(
        net, [optimizer], CountingHead(), scale,
        schedule=lambda t: 0.1, clip_grad_norm=clip, accumulates=accumulates,
    )  # fmt: skip


def clone_of(net):
    other = nn.Linear(net.in_features, net.out_features)
    other.load_state_dict(net.state_dict())
    return other


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05, 1e3])
def test_scaled_and_clipped_steps_equal_plain_sgd_after_torchs_own_clipping(enabled, clip):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    plain = clone_of(net)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    stepper = make_stepper(net, clip=clip, enabled=enabled)
    for t in range(4):
        x = torch.randn(7, 5)
        stepper.begin(t)
        (net(x).pow(2).mean() * stepper.scale.value).backward()
        stepped = stepper.finish()
        plain(x).pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        reference.step()
        reference.zero_grad()
        assert stepped.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        torch.testing.assert_close(net.weight, plain.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_bound_of_the_gradient_does_not_concern_the_class_centers(enabled):
    net = nn.Linear(5, 3)
    stepper = make_stepper(net, clip=1e-3, enabled=enabled)
    scale = stepper.scale.value.item()
    (net(torch.ones(1, 5)).sum() * scale).backward()
    assert stepper.finish().grad_norm > 1
    assert stepper._head.stepped == [(scale, 0.0)]


def test_two_optimizers_update_all_parameters_as_one_does_and_share_the_bound_of_the_gradient():
    torch.manual_seed(0)
    nets = [nn.Linear(5, 3)]
    nets.append(clone_of(nets[0]))
    optim = OptimSettings(weight_decay=0.01)
    steppers = [
        Stepper(
            net,
            [build_optimizer(optim, [{"params": part, "lr_factor": 1.0}]) for part in parts],
            CountingHead(),
            LossScale(torch.device("cpu"), enabled=False),
            schedule=lambda t: 0.1,
            clip_grad_norm=0.05,
        )
        for net, parts in zip(
            nets, ([list(nets[0].parameters())], [[p] for p in nets[1].parameters()]), strict=True
        )
    ]
    for t in range(3):
        x = torch.randn(7, 5)
        for net, stepper in zip(nets, steppers, strict=True):
            stepper.begin(t)
            net(x).pow(2).mean().backward()
            stepper.finish()
            assert all(parameter.grad is None for parameter in net.parameters())
    one, two = (list(net.parameters()) for net in nets)
    states = [stepper.optimizer_states() for stepper in steppers]
    for parameter, other in zip(one, two, strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(
            *(state[p]["momentum_buffer"] for state, p in zip(states, (parameter, other), strict=True))
        )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_gradient_that_is_not_finite_changes_nothing_not_even_on_the_first_step(name):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    plain = clone_of(net)
    stepper = make_stepper(net, name=name)
    (net(torch.full((2, 5), float("inf"))).sum()).backward()
    assert stepper.finish().skipped == 1
    torch.testing.assert_close(net.weight, plain.weight, rtol=0, atol=0)
    assert stepper._head.stepped == [(1.0, 1.0)]

    other = make_stepper(plain, name=name)
    x = torch.randn(2, 5)
    for model, one in ((net, stepper), (plain, other)):
        one.begin(1)
        model(x).sum().backward()
        assert one.finish().skipped == 0
    torch.testing.assert_close(net.weight, plain.weight, rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_steps_are_torchs_to_the_last_bit_also_where_a_parameter_has_no_gradient(name, momentum):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    rules = {"weight_decay": 0.01} | ({"momentum": momentum} if name == "sgd" else {})
    optimizer = build_optimizer(
        OptimSettings(name=name, **{"betas": (0.8, 0.95)} | rules), [{"params": ours, "lr_factor": 1.0}]
    )
    if name == "sgd":
        reference = torch.optim.SGD(theirs, lr=0.1, fused=True, **rules)
    else:
        reference = torch.optim.AdamW(theirs, lr=0.1, fused=True, betas=(0.8, 0.95), **rules)
    optimizer.param_groups[0]["lr"] = 0.1
    for step in range(4):
        for one, other in zip(ours[step % 2 :], theirs[step % 2 :], strict=True):
            one.grad = torch.randn(3, 4)
            other.grad = one.grad.clone()
        reference.grad_scale = torch.tensor(4.0)
        reference.found_inf = torch.tensor(float(step == 2))
        optimizer.step(reference.grad_scale, reference.found_inf)
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            one.grad = other.grad = None


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_weight_that_a_step_of_several_micro_batches_has_not_used_stays(name):
    net = nn.Linear(5, 3)
    stepper = make_stepper(net, name=name, accumulates=True)
    net(torch.ones(2, 5)).sum().backward()
    stepper.begin(0)
    stepper.finish()
    before = net.bias.clone()
    stepper.begin(1)
    net.weight.sum().backward()
    stepper.finish()
    assert torch.equal(net.bias, before)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_a_streak():
    scale = LossScale(torch.device("cpu"), enabled=True, start=8.0, growth_interval=3)
    fine, overflow = torch.tensor(0.0), torch.tensor(1.0)
    seen = []
    for flag in (overflow, fine, fine, fine, fine, overflow, fine):
        scale.update(flag)
        seen.append(scale.value.item())
    assert seen == [4, 4, 4, 8, 8, 4, 4]


def test_the_loss_scale_continues_from_its_saved_state():
    first = LossScale(torch.device("cpu"), enabled=True, start=8.0, growth_interval=3)
    first.update(torch.tensor(0.0))
    second = LossScale(torch.device("cpu"), enabled=True, start=1.0, growth_interval=3)
    second.load_state(first.state())
    for scale in (first, second):
        scale.update(torch.tensor(0.0))
        scale.update(torch.tensor(0.0))
    assert first.value == second.value == 16


def test_the_head_gets_the_learning_rate_the_step_and_the_scale_of_its_gradient():
    net = nn.Linear(2, 2)
    stepper = make_stepper(net, enabled=True)
    assert stepper.begin(7) == 0.1
    (net(torch.ones(1, 2)).sum() * stepper.scale.value).backward()
    stepper.finish()
    assert stepper._head.began == [(7, 0.1, 65536.0)]
    assert stepper._head.stepped == [(65536.0, 0.0)]


def test_frozen_parameters_stay_and_factors_set_the_rate_of_the_longest_prefix():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    freeze(net, ["0."])
    groups = parameter_groups(net, {"1": 0.1, "1.bias": 0.5})
    assert {group["lr_factor"]: len(group["params"]) for group in groups} == {0.1: 1, 0.5: 1, 1.0: 2}
    with pytest.raises(ConfigError, match="starts with 'layer9'"):
        freeze(net, ["layer9"])


def test_a_factor_for_no_parameter_is_refused_with_the_names_that_there_are():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        ConfigError,
        match=r"model\.lr_factors: .*'nons'.* 0, 1",
    ):
        parameter_groups(net, {"1": 0.1, "nons": 2.0})


def test_adapters_have_the_factor_of_the_weight_that_they_update():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 1), nn.Linear(3, 3))
    add_adapters(net, LoraSettings(rank=2, targets=("0", "1")))
    groups = parameter_groups(net, {"0.weight": 0.5, "1": 2.0, "1.bias": 3.0, "2.weight": 4.0})
    factors = {parameter: group["lr_factor"] for group in groups for parameter in group["params"]}
    trained = {
        name: factors[parameter] for name, parameter in net.named_parameters() if parameter.requires_grad
    }
    first, second = ("0.parametrizations.weight.0", "1.parametrizations.weight.0")
    assert trained == {
        **{f"{first}.{key}": 0.5 for key in ("up", "down", "core")},
        **{f"{second}.{key}": 2.0 for key in ("up", "down")},
    }


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_without_decay_of_norms_only_weights_and_slopes_shrink(name):
    class Standardize(nn.LayerNorm):
        pass

    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Flatten(), nn.Linear(4, 2)]
    net = nn.Sequential(*layers, nn.LayerNorm(2), Standardize(2))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    groups = parameter_groups(net, {"0": 0.5}, decay_norms=False)
    optimizer = build_optimizer(OptimSettings(name=name, weight_decay=0.1), groups)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step(torch.tensor(1.0), torch.tensor(0.0))
    shrunk = {key for key, value in net.named_parameters() if (value < 1).all()}
    assert shrunk == {"0.weight", "2.weight", "4.weight"}
    assert all((value == 1).all() for key, value in net.named_parameters() if key not in shrunk)


def test_the_scale_of_a_run_in_fp16_is_not_that_of_its_continuation_in_another_format():
    cpu = torch.device("cpu")
    trained, other = LossScale(cpu, enabled=True), LossScale(cpu, enabled=False)
    trained.update(torch.tensor(1.0))
    other.load_state(trained.state())
    assert other.value == 1
    again = LossScale(cpu, enabled=True)
    again.load_state(trained.state())
    assert again.value == 32768
    fresh = LossScale(cpu, enabled=True)
    fresh.load_state(other.state())
    assert fresh.value == 65536


@pytest.mark.parametrize(("overflowed", "last"), [(0.0, 2**24), (1.0, 1)])
def test_the_scale_neither_grows_nor_shrinks_without_end(overflowed, last):
    scale = LossScale(torch.device("cpu"), enabled=True, growth_interval=1)
    for _ in range(200):
        scale.update(torch.tensor(overflowed))
    assert scale.value == last


def test_a_factor_of_a_layer_multiplies_its_learning_rate():
    net = nn.Linear(5, 3)
    stepper = make_stepper(net, lr_factors={"weight": 0.5})
    before = [parameter.detach().clone() for parameter in net.parameters()]
    stepper.begin(0)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper.finish()
    for parameter, old, rate in zip(net.parameters(), before, (0.05, 0.1), strict=True):
        # A step of SGD with weight decay 0.01, which norms and biases have, too, here.
        torch.testing.assert_close(parameter.detach(), old - rate * (1 + 0.01 * old))
